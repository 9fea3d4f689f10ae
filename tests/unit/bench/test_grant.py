"""``bench grant`` uses the grants that it measures, checks the bytes, and measures ZeroMQ alone in the same rhythm."""

from __future__ import annotations

import json
import time
from pathlib import Path

import attrs
import numpy as np
import pytest

from bench import grant
from bench.__main__ import run
from bench.grant import ASKED, rooms, run_grant
from bench.timing import Timed
from disagg_kv.channels import Arrived, UnixChannel
from disagg_kv.core import Codec
from disagg_kv.core.wire.frames import Grant, Head, StagingRequest
from disagg_kv.errors import ConfigurationError, DeadlineError, IntegrityError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.memory import Event
from disagg_kv.planning import Writes
from disagg_kv.transports import InprocTransport, registry
from tests.support.channels import take


class Careless(InprocTransport):
    """Loses the last byte of each write and says that all is well."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, attrs.evolve(writes, nbytes=np.maximum(writes.nbytes - 1, 0)))


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_grants_and_bare_frames_stand_side_by_side_in_two_rhythms(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads where the transport works within one process, else processes; repeats are rounded up to whole rooms."""
    more = ["--transport", transport, "--repeats", str(ASKED + 1), "--pause", "0.001", "--json"]
    assert run(["grant", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["transport"], found["repeats"]) == (True, transport, 2 * ASKED)
    assert found["request_bytes"] > 50 < found["grant_bytes"]
    assert (found["in_a_row"]["pause_s"], found["after_pause"]["pause_s"]) == (0.0, 0.001)
    for rhythm in (found["in_a_row"], found["after_pause"]):
        assert all(0 < rhythm[of]["p50"] <= rhythm[of]["p95"] for of in ("grant", "zeromq"))
        assert rhythm["ratio"] == pytest.approx(rhythm["grant"]["p50"] / rhythm["zeromq"]["p50"])
    assert found["machine"]["cores"] >= 1


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["grant", "--transport", "inproc", "--repeats", "1", "--pause", "0.001"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("in a row", "after 1 ms", "bare ZeroMQ", "every byte was right"))


def test_grants_through_which_wrong_bytes_came_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "careless", Careless)
    with pytest.raises(IntegrityError, match=rf"bytes are wrong, and {ASKED + 1} segments crossed"):
        run_grant("careless", 1, 0.001)


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (rooms(1), rooms(ASKED), rooms(ASKED + 1)) == (1, 1, 2)
    for repeats, pause_s in ((0, 0.01), (1, 0.0), (1, 60.0)):
        with pytest.raises(ConfigurationError, match="round trips"):
            run_grant("inproc", repeats, pause_s)
    assert run(["grant", "--transport", "pigeon", "--json"]) == 2
    assert "known: " in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_bare_frame_that_nobody_answers_is_not_awaited_for_ever(tmp_path: Path) -> None:
    pair = grant._Pair(str(tmp_path), "prefill", "decode", 0.05)
    pair.send(b"anybody?")
    with pytest.raises(DeadlineError, match="no answer"):
        pair.receive()
    pair.let_go()
    pair.end()


def test_a_grant_is_timed_from_its_first_request_and_once(tmp_path: Path) -> None:
    """A request that is repeated, or a grant that is, makes no second time; sizes are those of the frames."""
    one, other = (Timed(UnixChannel(f"unix://{tmp_path}/{name}")) for name in "ab")
    codec = Codec()
    head: Head = {"src": b"a" * 16, "dst": b"b" * 16, "room": b"r", "generation": 1}
    box = (0, 16, 0, 2, False)
    request = codec.encode(StagingRequest(**head, segment=box, ask=0, ready=False))
    granted = codec.encode(Grant(**head, segment=box, ask=0, lease=0, offset=0, nbytes=64))
    try:
        assert one.send(other.address, request)
        assert one.send_all(other.address, [request])
        assert other.send(one.address, granted)
        assert other.send(one.address, granted)
        heard, until = 0, time.monotonic() + 60.0
        while heard < 2 and time.monotonic() < until:
            heard += sum(isinstance(event, Arrived) for event in take(one, 1.0))
        (taken,) = one.taken()
        assert taken.seconds > 0
        assert (taken.request_bytes, taken.grant_bytes) == (len(request), len(granted))
        assert one.taken() == []
    finally:
        one.close()
        other.close()
