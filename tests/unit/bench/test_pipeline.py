"""``bench pipeline``: what it reports follows from what it measured, and wrong numbers are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import run
from bench.pipeline import PipelineShape
from bench.shape import TransferShape
from disagg_kv.errors import ConfigurationError

SMALL = (
    "pipeline --transport inproc --prefill-tp 1 --tokens 64 --layers 4 --kv-heads 2 --head-dim 8 --compute 0.04 "
    "--ratios 1 --lengths 64,128 --repeats 2 --pairs 2"
)


def test_overlaps_and_lengths_stand_beside_their_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C, T, N, the bound and the hidden share are all there, and agree with one another; the picture is drawn."""
    assert run([*SMALL.split(), "--plot", str(tmp_path / "sweep.svg"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["overlaps"]
    assert found["ok"] is True
    assert (one["compute_s"], one["wire_s"]) == (0.04, 0.04)
    assert 1 <= one["groups"] <= 4
    best = one["bound_groups"]
    assert one["bound_s"] == pytest.approx(0.04 + 0.04 / best + best * found["group_s"])
    assert one["over_bound"] == pytest.approx(one["pipelined"]["p50"] / one["bound_s"])
    assert one["per_chunk"]["p50"] > 0.08, "nothing of a chunk crosses before it is computed"
    assert [length["tokens"] for length in found["lengths"]] == [64, 128]
    assert all(length["ratio"] > 0 for length in found["lengths"])
    picture = (tmp_path / "sweep.svg").read_text()
    assert picture.count("<polyline") == 3
    assert "emulated" in picture


def test_the_table_says_what_is_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody takes its numbers for those of a model."""
    assert run([*SMALL.split()[:-6], "--lengths", "", "--repeats", "1"]) == 0
    assert "compute (sleeps) and wire" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "wrong",
    [{"compute_s": 0.0}, {"ratios": (1.0, 0.0)}, {"lengths": (0,)}, {"pairs": 0}],
)
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        PipelineShape(TransferShape(), **wrong)  # type: ignore[arg-type]


def test_a_list_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pipeline", "--ratios", "one"]) != 0
    assert "not a list of numbers" in " ".join(capsys.readouterr().err.split())
