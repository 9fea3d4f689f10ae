"""``bench chunks`` hands a request over chunk by chunk, checks the bytes, and compares two lengths."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest

from bench.__main__ import run
from bench.chunks import SMALLER, run_chunks
from disagg_kv.errors import ConfigurationError, IntegrityError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.memory import Event
from disagg_kv.planning import Writes
from disagg_kv.transports import InprocTransport, registry


class Careless(InprocTransport):
    """Loses the last byte of each write and says that all is well."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, attrs.evolve(writes, nbytes=np.maximum(writes.nbytes - 1, 0)))


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_every_chunk_crosses_by_itself_in_both_lengths(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads where the transport works within one process, else processes."""
    more = ["--transport", transport, "--tokens", "1000", "--chunk", "16", "--repeats", "2", "--layers", "2", "--json"]
    assert run(["chunks", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["transport"], found["tokens"], found["chunk"]) == (True, transport, 1000, 16)
    assert [of["strategy"] for of in found["strategies"]] == ["staged", "direct"]
    for of in found["strategies"]:
        assert of["segments"] == 63
        assert 0 < of["seconds"]["p50"] <= of["seconds"]["p95"]
        assert of["chunk_us"] == pytest.approx(1e6 * of["seconds"]["p50"] / 63)
        assert of["shorter_chunk_us"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chunks", "--transport", "inproc", "--tokens", "256", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("staged", "direct", "us a chunk", "every byte was right"))


def test_requests_with_wrong_bytes_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "careless", Careless)
    with pytest.raises(IntegrityError, match="bytes are wrong"):
        run_chunks("careless", ("staged",), 16 * SMALLER, 16, repeats=1)


@pytest.mark.parametrize(("tokens", "chunk", "repeats"), [(63, 16, 1), (64, 0, 1), (64, 16, 0)])
def test_numbers_that_cannot_be_are_refused(tokens: int, chunk: int, repeats: int) -> None:
    with pytest.raises(ConfigurationError, match="chunks of"):
        run_chunks("inproc", ("staged",), tokens, chunk, repeats=repeats)
