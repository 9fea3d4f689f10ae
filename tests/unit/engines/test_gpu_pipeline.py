"""The benchmark of a real model's first token runs anywhere, with a tiny model: only its numbers need a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_pipeline, model_ranks
from disagg_kv.errors import IntegrityError
from disagg_kv.geometry import PageTable, shard
from disagg_kv.kernels.tensors import plane_of
from disagg_kv.memory import PagedPool

TINY = (
    "--device cpu --model tiny --transport inproc --slots 8 --slot-mib 1 --ring-mib 16 --repeats 2 --commit abc "
    "--tokens"
)


def cases(capsys: pytest.CaptureFixture[str], *more: str) -> Sequence[dict[str, Any]]:
    """What it prints."""
    gpu_pipeline.main([*TINY.split(), *more])
    found = json.loads(capsys.readouterr().out)
    assert (found["commit"], found["model"]["num_hidden_layers"]) == ("abc", 4)
    assert found["published"]["pipelined_ms"][1] == 274
    rows: Sequence[dict[str, Any]] = found["cases"]
    return rows


def test_a_case_that_fails_is_a_row_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """C, T, groups, bound and hidden share agree with one another, and the caches with prefill's."""
    bad, good = cases(capsys, "70", "--wires", "-1", "0.05")
    assert "emulated wire of" in bad["error"]
    assert (good["wire_GB_per_s"], good["tokens"], good["turns"]) == (0.05, 70, 2)
    assert 1 <= good["groups"] <= 4
    assert good["reason"]
    took = good["all_ms"]
    bounds = [
        min(max(c, t) + min(c, t) / n + n * good["group_ms"] for n in range(1, 5))
        for c, t in zip(took["compute"], took["transfer"], strict=True)
    ]
    assert good["bound_ms"] == pytest.approx(sum(bounds) / 2, abs=0.01)
    over = [took["pipelined"][turn] / bounds[turn] for turn in range(2)]
    assert good["over_bound"] == pytest.approx(sum(over) / 2, abs=0.01)
    assert len(took["per_chunk"]) == 2
    least = {name: min(of) for name, of in took.items()}
    assert good["quiet"]["pipelined_ms"] == least["pipelined"]
    c, t = least["compute"], least["transfer"]
    bound = min(max(c, t) + min(c, t) / n + n * good["group_ms"] for n in range(1, 5))
    assert good["quiet"]["over_bound"] == pytest.approx(least["pipelined"] / bound, abs=0.01)


def test_paths_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a row of its own; over an emulated wire there is no mapping."""
    rows = cases(capsys, "70", "--wires", "0", "1", "--paths", "staged", "mapped")
    assert [(row["path"], row["wire_GB_per_s"]) for row in rows] == [("staged", None), ("mapped", None), ("staged", 1)]
    first, second, _ = rows
    assert first["model_over_first"] == first["model_per_chunk_over_first"] == 1
    assert second["model_over_first"] > 0
    assert first["all_ms"]["compute"] == second["all_ms"]["compute"]
    assert all(0 < row["model_pipelined_ms"] <= row["pipelined_ms"] for row in rows)


def test_a_file_has_all_that_is_there_after_each_case_in_the_order_asked_for(tmp_path: Path) -> None:
    """A run that is ended keeps what it has measured."""
    out = tmp_path / "result.json"
    gpu_pipeline.main([*TINY.split(), "10", "70", "--wires", "0", "--all-s", "-1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["tokens"] for row in found["cases"]] == [10, 70]


def test_cases_for_which_no_time_is_left_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = cases(capsys, "70", "--wires", "0", "--all-s", "-1")
    assert "not begun" in row["error"]


def test_caches_that_differ_are_found() -> None:
    """By each byte of the request, and by its place; not by what lies beside it."""
    spec = model_ranks.model_spec("tiny")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=model_ranks.PAGE)
    table = PageTable(model_ranks.KV, [2, 0])
    plane = plane_of(pool, 3)
    plane.copy_(torch.randint(256, plane.shape, dtype=torch.uint8))
    before = model_ranks.digests(pool, table, 70)
    plane[1] ^= 1
    plane[0, 6:] ^= 1
    assert model_ranks.digests(pool, table, 70) == before
    plane[0, 5, 1, 3] ^= 1
    changed = [a != b for a, b in zip(before, model_ranks.digests(pool, table, 70), strict=True)]
    assert changed == [number == 3 for number in range(len(before))]
    plane[0, 5, 1, 3] ^= 1
    plane[[0, 2]] = plane[[2, 0]]
    assert model_ranks.digests(pool, table, 70) != before


class Liar(model_ranks.Decode):
    """Has another first token than prefill."""

    def arrive(self) -> model_ranks.Came:
        """The truth but for the token."""
        came = super().arrive()
        return model_ranks.Came(came.ended, came.token + 1)


def test_a_wrong_first_token_ends_the_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_ranks, "Decode", Liar)
    (row,) = cases(capsys, "70", "--wires", "0")
    assert IntegrityError.__name__ in row["error"]
    assert "first token" in row["error"]
