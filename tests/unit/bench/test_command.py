"""``bench transfer`` checks bytes before it prints a speed, and takes strategies and ceiling in turns."""

from __future__ import annotations

import json
import os
from multiprocessing import util
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from bench.__main__ import run
from disagg_kv.ids import Peer, Ticket
from disagg_kv.memory import Event
from disagg_kv.planning import Writes
from disagg_kv.transports import InprocTransport, registry

pytestmark = pytest.mark.slow

SHAPE = "--tokens 40 --layers 2 --kv-heads 4 --head-dim 16 --page-size 16 --repeats 3"
SMALL = ["transfer", *SHAPE.split()]
QUANTILES = {"p50", "p95"}
PHASES = ["plan", "gather", "post", "wire", "scatter", "checksum"]


class Careless(InprocTransport):
    """Loses the last byte of each write and says that all is well."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, attrs.evolve(writes, nbytes=np.maximum(writes.nbytes - 1, 0)))


class Lazy(InprocTransport):
    """Moves a write only when the target polls."""

    caps = attrs.evolve(InprocTransport.caps, needs_target_polling=True)


def bench(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> dict[str, Any]:
    """Run it with ``--json``; stdout must be one document."""
    assert run([*SMALL, *more, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_strategies_stand_side_by_side_under_one_ceiling(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads where the transport works within one process, else processes; TP 2 -> 1, pages of 16 to pages of 32."""
    found = bench(
        capsys, "--transport", transport, "--prefill-tp", "2", "--decode-page-size", "32", "--decode-layout", "HND"
    )
    assert found["ok"] is True
    assert found["nbytes"] == 40 * 2 * 2 * 4 * 16 * 2
    assert list(found["strategies"]) == ["slice", "staged"]
    for name, measured in found["strategies"].items():
        assert list(measured["phases"]) == [*PHASES, "call", "grant", "placed", "known", "total"]
        placed, known, total = (measured["phases"][phase]["p50"] for phase in ("placed", "known", "total"))
        assert placed <= known <= total
        assert all(of.keys() == QUANTILES and 0 <= of["p50"] <= of["p95"] for of in measured["phases"].values())
        assert measured["path"] == name
        assert measured["gb_per_s"] == pytest.approx(found["nbytes"] / measured["phases"]["total"]["p50"] / 1e9)
        assert measured["total_share_of_ceiling"] == pytest.approx(measured["gb_per_s"] / found["ceiling"]["gb_per_s"])
        wire, plain = measured["wire_s"]["p50"], found["ceiling"]["wire"]["p50"]
        assert measured["share_of_ceiling"] == pytest.approx(plain / wire)
    slices, staged = found["strategies"].values()
    assert staged["phases"]["gather"]["p50"] > 0 < staged["phases"]["scatter"]["p50"]
    assert staged["phases"]["grant"]["p50"] > 0 == slices["phases"]["grant"]["p50"]
    assert slices["wire_s"] == slices["phases"]["wire"], "only staged has a run without copies"
    assert (slices["descriptors"], found["ceiling"]["writes"]) == (40 * 2 * 2 * 4, 2)
    assert staged["descriptors"] == staged["segments"]
    assert found["ratio_staged_over_slice"] == pytest.approx(staged["gb_per_s"] / slices["gb_per_s"])
    assert found["machine"]["cores"] >= 1
    assert {"python", "numpy", "torch", "disagg_kv"} <= found["machine"]["versions"].keys()
    assert found["shape"]["transport"] == transport


def test_wrong_bytes_have_no_speed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "careless", Careless)
    found = bench(capsys, "--transport", "careless", "--strategies", "staged", "--prefill-tp", "2", code=1)
    assert found.keys() == {"ok", "error"}
    assert found["error"]["type"] == "IntegrityError"
    assert "'staged'" in found["error"]["message"]
    assert "bytes are wrong" in found["error"]["message"]


def test_a_transport_that_needs_its_target_to_poll_is_polled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registered, "lazy", Lazy)
    found = bench(capsys, "--transport", "lazy", "--strategies", "direct", "--prefill-tp", "1")
    assert found["ratio_staged_over_slice"] is None
    assert found["strategies"]["direct"]["descriptors"] > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--strategies", "direct"], "path 'direct' cannot"),
        (["--strategies", "bulk"], "known: auto, "),
        (["--strategies", "staged,staged"], "each once"),
        (["--strategies", ""], "at least one"),
        (["--transport", "pigeon"], "known: "),
        (["--prefill-tp", "3"], "3"),
        (["--programs", "8"], "8 programs of a copy: at least one, and only on GPUs"),
        (["--programs", "0", "--device", "cuda"], "--programs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert said in bench(capsys, *more, code=2)["error"]["message"]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--transport", "inproc", "--strategies", "staged", "--prefill-tp", "1"]) == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("gather", "known ms", "share of ceiling", "plain writes", "every byte was right")
    )


def test_busy_engine_threads_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--transport", "shm", "--strategies", "staged", "--prefill-tp", "1", "--repeats", "1"]
    assert bench(capsys, *one, "--busy")["shape"]["busy"] is True
    assert bench(capsys, *one)["shape"]["busy"] is False
    assert run([*SMALL, *one, "--busy"]) == 0
    assert "engine threads busy" in " ".join(capsys.readouterr().out.split())


def test_a_benchmark_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nothing"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_nothing_is_left_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    util.get_temp_dir()  # multiprocessing's own, made once for each process and removed at its end
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bench(capsys, "--strategies", "staged", "--prefill-tp", "2")
    assert os.listdir(tmp_path) == []


def test_verification_is_measured_beside_the_same_without(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of both are checked, and what checksums cost is said."""
    found = bench(capsys, "--transport", "inproc", "--prefill-tp", "2", "--verify", "full", "--strategies", "staged")
    assert list(found["strategies"]) == ["staged", "staged, verify full"]
    plain, verified = (of["phases"] for of in found["strategies"].values())
    assert plain["checksum"]["p95"] == 0 < verified["checksum"]["p50"]
    assert found["verify_cost"] == {"staged": pytest.approx(verified["total"]["p50"] / plain["total"]["p50"])}
    assert run([*SMALL, "--transport", "inproc", "--prefill-tp", "1", "--verify", "sampled"]) == 0
    assert "slice takes" in " ".join(capsys.readouterr().out.split())


def test_steps_of_decode_are_measured_beside_transfers_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(
        capsys, "--transport", "inproc", "--prefill-tp", "1", "--decode-tp", "2", "--strategies", "mapped",
        "--decode-load",
    )  # fmt: skip
    mapped = found["strategies"]["mapped"]
    assert mapped["decode_step"]["p50"] > 0
    assert mapped["decode_step_alone"]["p50"] > 0
    assert run([*SMALL, "--transport", "inproc", "--prefill-tp", "1", "--decode-load"]) == 0
    assert "decode step ms" in capsys.readouterr().out
    assert run([*SMALL, "--decode-load", "--busy"]) == 2
    assert "one of them" in " ".join(capsys.readouterr().err.split())
