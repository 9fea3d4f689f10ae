"""Where the time of a request goes: its parts add up, what is beside the way is in none, and a gap is red."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.engines_gpu import trace
from benchmarks.engines_gpu.cases import Order
from benchmarks.engines_gpu.trace import PARTS, Run, Way, arguments, copies, document, in_short, plot, shown, way
from tests.support.pages import ROOT

Moments = list[dict[str, Any]]


def note(name: str, at: float, **more: object) -> dict[str, Any]:
    """A moment."""
    return {"name": name, "at": at, **more}


def prefill() -> Moments:
    """Of a prefill instance on a GPU; the copy is launched before the pass has ended."""
    return [
        note("new", 1.0),
        note("begin", 1.5, chunks=1, loads=0, idle=False),
        note("begun", 1.75, chunks=1, loads=0, idle=False),
        note("forward", 6.0),
        note("marked", 6.5),
        note("launched", 3.0),
        note("copied", 8.5),
        note("span wire", 9.0, start=7.0, stop=9.0, nbytes=4096),
    ]


def decode(by: float = 0.0) -> Moments:
    """Of a decode instance, which gets the request ``by`` seconds later."""
    return [
        note("new", 1.25 + by),
        note("begin", 1.5 + by, chunks=0, loads=1, idle=True),
        note("begun", 2.0 + by, chunks=0, loads=1, idle=True),
        note("over", 2.5, failed=False, sent=False),
        note("room", 8.75, handle="ReceptionHandle", phase="DONE", released=False),
        note("room", 8.875, handle="ReceptionHandle", phase="DONE", released=True),
        note("received", 9.0, failed=False, sent=False),
        note("learned", 10.0),
        note("begin", 10.5, chunks=0, loads=0, idle=True),
        note("begin", 11.0, chunks=0, loads=0, idle=False),
        note("forward", 13.0),
        note("forward", 99.0),
    ]


AT_ONCE = [1.0, 0.5, 0.25, 4.25, 0.5, 0, 0, 0, 0, 0, 2.0, 0.25, 0.25, 1.0, 1.0, 2.0, 1.0]


def test_parts_add_up_and_what_decode_prepares_meanwhile_is_in_none() -> None:
    found = way("at once", 0.0, 7.0, 14.0, prefill(), decode())
    assert found.parts == AT_ONCE
    assert sum(found.parts) == 14.0
    assert (found.room, found.nbytes) == (2.0, 4096)


def test_asked_after_prefill_decode_s_part_is_on_the_way() -> None:
    found = way("after prefill", 0.0, 7.0, 14.0, prefill(), decode(by=6.0))
    assert dict(zip([part.name for part in PARTS], found.parts, strict=True)) == {
        **dict(zip([part.name for part in PARTS], AT_ONCE, strict=True)),
        "prefill's answer reaches the router": 0.5,
        "the request reaches decode's scheduler": 0.25,
        "decode gives it blocks": 0.25,
        "the room is opened": 0.5,
        "the rows cross": 0.5,
    }
    assert sum(found.parts) == 14.0


def test_without_a_gpu_rows_cross_while_the_span_says_so_and_one_runner_has_no_hook_after_the_pass() -> None:
    ones = [
        [one for one in found if one["name"] not in ("forward", "copied", "launched")]
        for found in (prefill(), decode())
    ]
    ones[1].append(note("marked", 12.0))
    found = way("at once", 0.0, 7.0, 14.0, *ones)
    assert found.parts[3:5] == [4.75, 0]
    assert found.parts[9:12] == [0.5, 1.75, 0], "decode knows before prefill does"
    assert found.parts[15:] == [1.0, 2.0]
    assert sum(found.parts) == 14.0


@pytest.mark.parametrize("name", ["new", "marked", "span wire"])
def test_a_moment_that_is_missing_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="no rows have crossed" if name == "span wire" else f"no moment '{name}'"):
        way("at once", 0.0, 7.0, 14.0, [one for one in prefill() if one["name"] != name], decode())


FAKE = """
import json, os, sys, time
config = json.loads(sys.argv[1])
name, moments = config["kv"]["engine_id"], json.loads(MOMENTS)
print(json.dumps({"id": "ready", "start_s": 0.1}), flush=True)
for line in sys.stdin:
    asked, now = json.loads(line), time.monotonic()
    with open(os.environ["TRACE_TO"] + ".1.jsonl", "a") as file:
        for one in moments[name]:
            times = {key: now + one[key] / 1e3 for key in ("at", "start", "stop") if key in one}
            file.write(json.dumps({**one, **times}) + "\\n")
    time.sleep(0.02)
    answer = {"id": asked["id"], "tokens": [7], "t0": now, "t1": now + 0.014, "t2": now + 0.014, "cached": 0}
    answer["params"] = {"instance": "prefill", "addresses": ["here"], "transfer_id": "x"}
    print(json.dumps(answer), flush=True)
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, moments: Mapping[str, Moments]) -> tuple[Run, dict[str, Any]]:
    """A run with instances that say these moments of each request, in milliseconds."""
    monkeypatch.setattr(trace, "PAUSE_S", 0.03)
    (folder / "fake.py").write_text(FAKE.replace("MOMENTS", repr(json.dumps(moments))))
    given = arguments(
        ["--cpu", "--block", "8", "--tokens", "30", "--reps", "2", "--out", str(folder / "out"), "--commit", "f" * 40]
    )
    made = Run(given, 1, (sys.executable, str(folder / "fake.py")))
    asyncio.run(made.all())
    return made, json.loads(json.dumps(document(made, None, 4096, [0.001, 0.002, 0.003])))


def test_each_order_has_its_samples_and_its_parts_are_those_of_the_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, found = run(tmp_path, monkeypatch, {"prefill": prefill(), "decode": decode()})
    assert (made.red, found["ok"]) == ([], True)
    assert {order: len(one["ttft_ms"]) for order, one in found["orders"].items()} == {"after prefill": 2, "at once": 2}
    for one in found["orders"].values():
        sums = [sum(values) for values in zip(*one["parts_ms"].values(), strict=True)]
        assert sums == pytest.approx(one["ttft_ms"], abs=0.02)
    assert shown(found).count("\n") == 1 + len(PARTS) + 2 + 1 + 8
    head, _, *rows = in_short(found).splitlines()
    assert head == "| ms, p50 / p90 | asked at once | asked after prefill |"
    shown_as = {row.split(" | ")[0][2:]: float(row.split(" | ")[1].split(" / ")[0]) for row in rows}
    of = list(found["orders"]["at once"]["parts_ms"].values())
    for name, expected in (
        ("model", [sum(one) for one in zip(of[3], of[4], of[15], strict=True)]),
        ("wire", of[10]),
        ("the load beside it, ours", [sum(one) - 2 for one in zip(*of[9:13], strict=True)]),
        ("the load beside it, vLLM's", [sum(one) for one in zip(*of[13:15], strict=True)]),
    ):
        assert shown_as[name] == pytest.approx(median(expected), abs=0.006), name


def test_a_request_without_moments_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = run(tmp_path, monkeypatch, {"prefill": prefill(), "decode": []})
    assert not found["ok"]
    assert set(made.red) == {
        "after prefill: no moment 'room' with {'handle': 'ReceptionHandle', 'phase': 'DONE'}",
        "at once: no moment 'room' with {'handle': 'ReceptionHandle', 'phase': 'DONE'}",
    }


def ways() -> Iterator[tuple[Order, list[Way]]]:
    """Those of both orders."""
    yield "at once", [way("at once", 0.0, 7.0, 14.0, prefill(), decode())]
    yield "after prefill", [way("after prefill", 0.0, 7.0, 14.0, prefill(), decode(by=6.0))]


def test_the_picture_has_a_bar_for_each_part_that_took_time_and_no_words_that_overlap() -> None:
    made = Run(arguments(["--cpu", "--out", "out", "--commit", "f" * 40]), 1)
    made.ways = dict(ways())
    found = document(made, None, 4096, [0.001])
    for order, bars in (("at once", 13), ("after prefill", 16)):
        picture = plot(found, order)
        assert list(picture.clashes()) == []
        assert picture.svg().count("<rect") == 1 + 4 + bars


def test_the_picture_of_the_docs_is_that_of_the_result() -> None:
    found = json.loads((ROOT / "benchmarks/results/h200_trace.json").read_text())
    picture = plot(found)
    assert (ROOT / "docs/images/bench-trace.svg").read_text() == picture.svg(), "run the command in docs/results.md"
    assert list(picture.clashes()) == []


def test_plain_copies_are_timed() -> None:
    took = copies(1 << 16, ["cpu"])
    assert len(took) == trace.COPIES
    assert min(took) > 0
