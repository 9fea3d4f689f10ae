"""``disagg-kv demo``: exit codes, the JSON document and the tables, of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.cli.demo import moved, verdict
from disagg_kv.cli.main import run
from disagg_kv.engines.hf.demo import DemoConfig
from disagg_kv.engines.hf.demo.report import Report
from tests.support.needs import needs_mooncake, needs_nixl

pytestmark = pytest.mark.slow

SMALL = ["--requests", "2", "--max-new-tokens", "6", "--layers", "2", "--prefill-tp", "1"]
FIELDS = {
    "ok", "tokens_equal", "wrong_bytes", "stray_bytes", "requests", "prompt_tokens", "new_tokens", "kv_bytes",
    "descriptors", "descriptors_slice", "strategy", "paths", "transports", "transport", "prefill_tp", "decode_tp",
    "inject", "model", "prefill_pp", "decode_pp", "phases", "gb_per_s", "ranks", "turns", "device",
    "dtype", "decode_dtype", "kv_bytes_unconverted", "returned_bytes", "evicted",
}  # fmt: skip


def test_direct_between_equal_layouts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One document on stdout, exit code 0; whole pages, no staging."""
    assert run(["demo", *SMALL, "--strategy", "direct", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == FIELDS
    assert found["ok"] is True
    assert found["tokens_equal"] is True
    assert found["wrong_bytes"] == found["stray_bytes"] == 0
    assert found["paths"] == ["direct"]
    assert (found["strategy"], found["transport"], found["transports"], found["requests"]) == (
        "direct",
        "auto",
        ["shm"],
        2,
    )
    assert (found["prefill_tp"], found["decode_tp"], found["inject"]) == (1, 1, None)
    assert (found["model"], found["prefill_pp"], found["decode_pp"]) == ("llama", 1, 1)
    assert 0 < found["descriptors"] < found["descriptors_slice"]
    assert found["kv_bytes"] == found["prompt_tokens"] * 2 * 2 * 8 * 32 * 4
    assert found["gb_per_s"] > 0
    assert {"start", "prefill", "transfer", "decode", "reference", "check"} <= set(found["phases"])
    assert all(seconds >= 0 for seconds in found["phases"].values())
    ranks = {(rank["role"], rank["rank"]): rank for rank in found["ranks"]}
    assert set(ranks) == {("prefill", 0), ("decode", 0), ("reference", 0)}
    assert len({rank["pid"] for rank in ranks.values()}) == 3
    assert ranks["decode", 0]["kv_heads"] == list(range(8))
    assert ranks["decode", 0]["nbytes"] == ranks["prefill", 0]["nbytes"] == found["kv_bytes"]


def test_layers_cross_while_others_are_computed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The trace has every group of every chunk, on every rank; tokens and bytes are right.

    No group leaves before its last layer is final, and on every rank bytes leave while later layers are computed: on a
    host that is too busy to let the threads that send run meanwhile, in one of three demos.
    """
    sizes = ["--prefill-tp", "1", "--prefill-pp", "2", "--layers", "6"]
    ranks, groups = 2, {"0-2", "2-3", "3-5", "5-6"}
    for _ in range(3):
        hidden = _pipelined(capsys, tmp_path / "out.json", sizes, ranks, groups)
        if all(overlapping and early for _, overlapping, early in hidden) and any(inside for inside, _, _ in hidden):
            break
    assert all(overlapping for _, overlapping, _ in hidden), "on every rank some wire overlaps a later group's compute"
    assert any(inside for inside, _, _ in hidden), "some wire lies inside the next group's compute"
    assert all(early for _, _, early in hidden), "on every rank some bytes have left before the pass was closed"


def _pipelined(
    capsys: pytest.CaptureFixture[str], file: Path, sizes: list[str], ranks: int, groups: set[str]
) -> list[tuple[int, int, int]]:
    """One demo; what must hold in every one of them does. What its ranks' spans show, see :func:`_hidden`."""
    more = ["--layer-group", "2", "--strategy", "staged+layer_pipelined", "--trace", str(file), "--json"]
    assert run(["demo", *SMALL, *sizes, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["tokens_equal"] is True
    assert found["wrong_bytes"] == found["stray_bytes"] == 0
    events = json.loads(file.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(names) == ["decode 0", *(f"prefill {rank}" for rank in range(ranks))]
    moved: dict[str, set[tuple[str, str, str]]] = {"wire": set(), "scatter": set(), "gather": set()}
    for event in events:
        if event["ph"] == "X" and event["name"] in moved:
            args = event["args"]
            moved[event["name"]].add((args["room"], args["rows"], args["layers"]))
    assert moved["wire"] == moved["scatter"] == moved["gather"]
    assert {layers for _, _, layers in moved["wire"]} == groups
    last = max(int(group.split("-")[1]) for group in groups)
    computed = {e["args"]["layers"] for e in events if e["name"] == "compute"}
    assert computed >= {f"{layer}-{layer + 1}" for layer in range(last)}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    return [_hidden(events, f"prefill {rank}") for rank in range(ranks)]


def _hidden(events: list[dict[str, Any]], rank: str) -> tuple[int, int, int]:
    """What one rank's spans show: wires inside, and overlapping, a later group's compute, or ended with more to come.

    Spans are compared within one room and pass, on the one clock of the trace.
    """
    (pid,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == rank)
    spans: dict[tuple[str, str], dict[str, dict[str, tuple[float, float]]]] = {}
    for e in events:
        if e["pid"] == pid and e["name"] in ("compute", "wire", "pass"):
            of = spans.setdefault((e["args"]["room"], e["args"]["rows"]), {})
            of.setdefault(e["name"], {})[e["args"].get("layers", "all")] = (e["ts"], e["ts"] + e["dur"])
    inside = overlapping = early = 0
    for of in spans.values():
        groups = sorted((tuple(map(int, layers.split("-"))), wire) for layers, wire in of["wire"].items())
        computed = [  # from the end of the layer before it until its last layer is final
            (of["compute"][f"{first}-{first + 1}"][0], of["compute"][f"{last - 1}-{last}"][1])
            for (first, last), _ in groups
        ]
        for number, (_, (start, stop)) in enumerate(groups):
            assert start >= computed[number][1] - 1.0, "a group left before it was final"  # times are rounded to 1 us
            after = computed[number + 1 :]
            inside += any(a - 1.0 <= start and stop <= b + 1.0 for a, b in after[:1])
            overlapping += any(start < b and a < stop for a, b in after)
            early += bool(after) and stop <= of["pass"]["all"][1]
    return inside, overlapping, early


@pytest.mark.parametrize(
    ("transport", "tp"),
    [pytest.param("nixl", (2, 1), marks=needs_nixl), pytest.param("mooncake", (1, 2), marks=needs_mooncake)],
)
def test_real_libraries_carry_the_demo(capsys: pytest.CaptureFixture[str], transport: str, tp: tuple[int, int]) -> None:
    """Between tensor-parallel sizes, every byte in its place, and checksums agree.

    Two stages of prefill, each with its own layers, rows and states.
    """
    hybrid = ["--model", "hybrid", "--layers", "4", "--prefill-pp", "2", "--verify", "full"]
    sizes = ["--prefill-tp", str(tp[0]), "--decode-tp", str(tp[1])]
    assert run(["demo", *SMALL, *hybrid, *sizes, "--transport", transport, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["wrong_bytes"] == found["stray_bytes"] == 0
    assert (found["transport"], found["prefill_tp"], found["prefill_pp"]) == (transport, tp[0], 2)
    assert found["decode_tp"] == tp[1]
    assert found["phases"]["checksum"] > 0


def test_swapped_heads_fail_in_words_and_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """The negative control, with both heads on one rank; the report has each turn of a conversation."""
    assert run(["demo", *SMALL, "--inject", "swap-heads", "--turns", "2"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAILED: the tokens differ from those of one process" in text
    assert "bytes are wrong" in text
    assert "llama, TP 1 -> 1, staged, shm" in text
    assert "prefill 0" in text
    assert "one per token and head slice" in text
    assert "Turns" in text
    assert "held by decode" in text


def test_what_went_back_is_shown_for_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside what is best; tokens are those of one process."""
    assert run(["demo", *SMALL, "--turns", "2", "--both-ways"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "sent back" in text
    assert "OK: the tokens are those of one process" in text


def test_what_gather_swaps_is_noticed_by_checksums_before_a_token_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Between TP 2 and TP 1, whose parts no plain comparison of buffers could hold against each other."""
    sizes = ["--prefill-tp", "2", "--verify", "full"]
    assert run(["demo", *SMALL, *sizes, "--inject", "swap-heads", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "IntegrityError"
    assert "written by prefill rank 0 by path staged: the sum is" in " ".join(err.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefill-tp", "3"], "prefill_tp 3"),
        (["--strategy", "teleport"], "unknown strategy 'teleport'"),
        (["--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["--inject", "nothing"], "swap-heads"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    """With ``--json`` one document as well."""
    assert run(["demo", *argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert json.loads(out)["ok"] is False


def made(**changes: Any) -> Report:
    """A report of a demo that worked, but for ``changes``."""
    values: dict[str, Any] = {
        "tokens_equal": True, "wrong_bytes": 0, "stray_bytes": 0, "requests": 1, "prompt_tokens": 9, "new_tokens": 1,
        "kv_bytes": 9, "descriptors": 1, "descriptors_slice": 9, "strategy": "staged", "paths": ("staged",),
        "transports": ("shm",), "transport": "shm", "prefill_tp": 1, "decode_tp": 1, "inject": None, "phases": {},
        "gb_per_s": 0.0, "ranks": (), "dtype": "float32", "decode_dtype": "float32", "kv_bytes_unconverted": 9,
        "model": "llama", "device": "cpu", "prefill_pp": 1, "decode_pp": 1,
        "turns": (), "returned_bytes": 0, "evicted": 0,
    }  # fmt: skip
    return Report(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "OK: the tokens are those of one process, and every byte is right"),
        ({"tokens_equal": False}, "FAILED: the tokens differ from those of one process"),
        ({"wrong_bytes": 1234}, "FAILED: 1,234 bytes are wrong"),
        ({"stray_bytes": 5}, "FAILED: 5 other bytes were changed"),
    ],
)
def test_each_failing_check_is_named(changes: dict[str, object], words: str) -> None:
    """Any one of them is enough."""
    report = made(**changes)
    assert str(verdict(report)) == words
    assert report.ok is words.startswith("OK")


def test_the_title_says_which_model_crossed_between_which_ranks() -> None:
    """Stages only where there are several."""
    flat, staged = made(prefill_tp=4), made(model="hybrid", prefill_pp=2, decode_tp=2)
    assert moved(DemoConfig(), flat).title == "llama, TP 4 -> 1, staged, shm"
    assert moved(DemoConfig(), staged).title == "hybrid, TP 1 -> 2, PP 2 -> 1, staged, shm"


def test_a_cache_is_converted_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes are the specified conversion of prefill's, half of bfloat16's; tokens follow from rounded rows."""
    line = ["demo", *SMALL, "--decode-dtype", "float8_e4m3fn", "--verify", "full", "--json"]
    assert run(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["tokens_equal"], found["wrong_bytes"], found["stray_bytes"]) == (True, True, 0, 0)
    assert (found["dtype"], found["decode_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert found["kv_bytes"] == found["prompt_tokens"] * 2 * 2 * 8 * 32
    assert found["kv_bytes_unconverted"] == 2 * found["kv_bytes"]


def test_a_cache_of_another_dtype_than_the_models_crosses_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A window among its layers; without a conversion both caches have the same dtype."""
    line = ["demo", *SMALL, "--requests", "1", "--model", "window", "--dtype", "float16", "--decode-tp", "2", "--json"]
    assert run(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["dtype"], found["decode_dtype"]) == (True, "float16", "float16")
    assert found["kv_bytes_unconverted"] == found["kv_bytes"]


def test_the_table_names_both_dtypes_of_a_conversion() -> None:
    """And what the bytes would be without it."""
    cells = {"kv_bytes": 1000, "kv_bytes_unconverted": 2000, "dtype": "bfloat16", "decode_dtype": "float8_e5m2"}
    table = moved(DemoConfig(), made(**cells))
    values = dict(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert values["KV bytes"] == "1,000 of float8_e5m2 (of bfloat16: 2,000)"
