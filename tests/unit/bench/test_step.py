"""``benchmarks.step`` measures requests between engines that make steps; wrong bytes have no speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import step
from benchmarks.step import ROOT, Pair, compared, in_turns, main, shown
from benchmarks.step_rank import Ask, Cache, Engine, Load

SOURCE = ROOT / "src"
TINY = ["--tokens", "32", "--layers", "2", "--paths", "staged", "--channels", "unix"]
NOTHING = Load("nothing", 0.0, 0.0)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    """The processes of two rows, which all tests of this file use: each imports torch, for seconds."""
    with ExitStack() as stack:
        cache = Cache(layers=2, tokens=32)
        yield {
            name: stack.enter_context(step.started(name, SOURCE, "staged", "unix", cache)) for name in ("this", "other")
        }


@pytest.fixture
def running(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> dict[str, Pair]:
    """A run uses processes that have been started."""
    monkeypatch.setattr(step, "started", lambda library, *_: nullcontext(pairs[library]))
    return pairs


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_each_row_has_both_libraries_in_turns_and_their_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This checkout beside itself, each in two processes of its own."""
    turns: list[str] = []
    real = Pair.request

    def request(self: Pair, *args: Any, **more: Any) -> Any:
        turns.append(self.library)
        return real(self, *args, **more)

    monkeypatch.setattr(Pair, "request", request)
    monkeypatch.setattr(step, "WARM", 1)
    into = tmp_path / "step.json"
    loads = ["waiting", "forward"]
    assert main([*TINY, "--repeats", "3", "--loads", *loads, "--other", str(SOURCE), "--json", str(into)]) == 0
    assert turns[:8] == ["other", "this", "this", "other", "other", "this", "this", "other"], "one of each before"
    found = json.loads(into.read_text())
    assert [row["load"] for row in found["rows"]] == [step.LOADS[name].name for name in loads]
    assert (found["request"]["bytes"], found["repeats"]) == (2 * 2 * 4 * 64 * 2 * 32, 3)
    for row in found["rows"]:
        for of in row["libraries"].values():
            assert 0 < of["known_s"]["p50"] <= of["released_s"]["p50"] <= of["released_s"]["p95"]
            assert of["released_s"]["p95"] <= of["released_s"]["max"]
            assert of["prefill_call_s"]["p50"] > 0 < of["decode_call_s"]["p50"]
        mine, base = (row["libraries"][name]["released_s"]["p50"] for name in ("this", "other"))
        assert row["ratios"]["p50"]["ratio"] == pytest.approx(mine / base)
        assert row["ratios"]["p50"]["low"] <= row["ratios"]["p50"]["ratio"] <= row["ratios"]["p50"]["high"]
    assert capsys.readouterr().out.strip() == shown(found)


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_requests_end_though_one_sides_engine_stops_polling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "CALIBRATED", 5)
    into = tmp_path / "wakeups.json"
    assert main([*TINY, "--wakeups", "20", "--json", str(into)]) == 0
    found = json.loads(into.read_text())
    ((name, of),) = found["wakeups"][0]["libraries"].items()
    assert (name, found["repeats"]) == ("this", 20)
    assert 0 < of["p50_s"] <= of["p99_s"] <= of["max_s"]
    assert of["max_over_p50"] == pytest.approx(of["max_s"] / of["p50_s"])
    assert set(of["max_at"]) < {"prefill", "decode"}
    assert capsys.readouterr().out.strip() == shown(found)


@pytest.mark.slow
def test_wrong_bytes_have_no_speed(
    running: dict[str, Pair], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill's pages are overwritten before the first request."""
    into, prefill = tmp_path / "step.json", running["this"]._prefill
    prefill.ask(type(None), "poison")
    assert main([*TINY, "--repeats", "1", "--json", str(into)]) == 1
    prefill.ask(type(None), "fill")
    printed = capsys.readouterr()
    assert (printed.out, into.exists()) == ("", False)
    assert "bytes are wrong; nothing is measured" in printed.err


def test_another_checkout_without_the_library_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--other", str(tmp_path)])
    assert "there is no disagg_kv in it" in capsys.readouterr().err


def test_an_engine_that_stops_polls_until_a_poll_reports_nothing() -> None:
    """A handle that a poll reported shows that state until the next poll."""
    reports = [["handle"], ["handle"], [], ["never polled"]]
    looks: list[int] = []
    engine = Engine(lambda: reports.pop(0), Ask("room", NOTHING, stop_s=0.0))

    def good() -> bool:
        looks.append(len(reports))
        return len(looks) == 6

    engine.until(good, SimpleNamespace(error=None, room=b"room"))
    assert looks == [3, 2, 1, 1, 1, 1]


def test_an_engine_keeps_the_longest_of_its_calls() -> None:
    engine = Engine(list, Ask("room", NOTHING))
    assert engine.call(sum, range(1_000_000)) == 499_999_500_000
    longest = engine.longest_s
    engine.call(list)
    assert engine.longest_s == longest > 0


def test_who_is_first_rotates() -> None:
    one, two = (Pair(name, None, None) for name in "AB")  # type: ignore[arg-type]
    assert ["".join(pair.library for pair in in_turns([one, two], n)) for n in range(4)] == ["AB", "BA", "AB", "BA"]


def test_a_ratio_is_of_paired_repetitions() -> None:
    """Twice as long each time is exactly two, however far repetitions differ."""
    base = np.array([1.0, 5.0, 2.0, 40.0])
    assert compared(2 * base, base, 50) == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    wide = compared(np.array([1.0, 3.0, 1.0, 3.0]), np.full(4, 2.0), 50)
    assert wide["low"] < wide["ratio"] == 1.0 < wide["high"]


def figures(ms: float) -> dict[str, dict[str, float]]:
    seconds = {"p50": ms / 1e3, "p95": ms / 5e2, "max": ms / 2e2}
    return dict.fromkeys(("released_s", "known_s", "prefill_call_s", "decode_call_s"), seconds)


RECORDED = {
    "machine": {"cpu": "Fast", "cores": 2},
    "libraries": {"this": "a" * 40, "other": "b" * 40},
    "request": {"bytes": 8 << 20},
    "repeats": 100,
}
ROW = {
    "load": "8 ms of Python",
    "path": "staged",
    "channel": "zmq",
    "libraries": {"this": figures(2.0), "other": figures(4.0)},
    "ratios": {name: {"ratio": 0.5, "low": 0.4, "high": 0.6} for name in ("p50", "p95")},
}
STOPPED = {"p50_s": 0.002, "p99_s": 0.004, "max_s": 0.01, "max_over_p50": 5.0, "max_at": {"decode": 0.25}}


def test_a_recorded_result_is_a_table() -> None:
    head, _, row, *_, request, machine = shown({**RECORDED, "rows": [ROW]}).splitlines()
    assert head.count("|") == row.count("|") == 12
    assert row.startswith("| 8 ms of Python | staged | zmq | 2.00 / 4.00 / 10.00 | 4.00 / 8.00 / 20.00 |")
    assert "| 0.500 (0.400 to 0.600) |" in row
    assert row.endswith("| 2,000 / 4,000; 2,000 / 4,000 | 4,000 / 8,000; 4,000 / 8,000 |")
    assert request == "100 requests of 8.0 MiB for each row; every byte was right."
    assert machine == f"Fast, 2 cores; this: commit {'a' * 40}, other: commit {'b' * 40}"


def test_a_recorded_result_of_stopped_engines_is_a_table() -> None:
    row = {"path": "staged", "channel": "zmq", "libraries": {"this": STOPPED}}
    assert "| staged | zmq | this | 2.00 | 4.00 | 10.00 | 5.0 | decode at 25% |" in shown(
        {**RECORDED, "wakeups": [row]}
    )
