"""Rooms of two sides that cannot work together end at once on both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec import structs

from disagg_kv.errors import AbortedError, IncompatiblePeerError, TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Generation, Peer, RoomId
from disagg_kv.protocol import Phase
from disagg_kv.protocol.flow import room_head
from disagg_kv.protocol.frames import Abort, AbortAck, Heartbeat
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(num_layers=2, kv_heads=4, head_dim=8, dtype="float16")
SOON_S = 0.5


@pytest.fixture
def rig() -> Rig:
    """Prefill writes into exposed pages alone, and decode exposes none."""
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 2), strategy="slice")
    rig.decode(tp_shards(SPEC, 1), strategy="staged")
    return rig


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_both_sides_fail_at_once_with_the_field_that_differs(rig: Rig, first: str) -> None:
    """Whichever engine opens the room first; every prefill rank, each with the name of decode's rank."""
    request = rig.request("room", rig.prefills, rig.decodes, 8)
    opens = [request.open_prefill, request.open_decode]
    for act in opens if first == "prefill" else reversed(opens):
        act()
        rig.wait(0.1)
    began = rig.clock()
    request.failed()
    assert rig.clock() - began < SOON_S
    (received,) = request.receives
    assert isinstance(received.error, IncompatiblePeerError)
    assert received.error.field == "paths"
    for sent in request.sends:
        assert isinstance(sent.error, AbortedError)
        assert "paths: ours is [('staged'" in str(sent.error)
    rig.quiet()


def test_a_prefill_rank_names_the_decode_rank_that_it_refused(rig: Rig) -> None:
    """By instance and rank, although that rank never became a peer."""
    request = rig.request("room", rig.prefills, rig.decodes, 8).open_prefill().open_decode().failed()
    assert {sent.error.peer for sent in request.sends if sent.error is not None} == {"D/0"}
    assert "D" not in {peer.instance for peer in rig.prefills[0].endpoint.peers()}


def test_later_rooms_need_no_other_question(rig: Rig) -> None:
    """For a second the answer counts for other rooms too; after it, decode asks again."""
    rig.request("first", rig.prefills, rig.decodes, 8).open_prefill().open_decode().failed()
    for name in ("second", "third"):
        began = rig.clock()
        rig.request(name, rig.prefills, rig.decodes, 8).open_prefill().open_decode().failed()
        assert rig.clock() - began < SOON_S
        rig.wait(1.5)
    rig.quiet()


def test_nothing_is_repeated_once_the_other_side_knows(rig: Rig) -> None:
    """Neither side sends the other a frame about a room that both have ended."""
    rig.request("room", rig.prefills, rig.decodes, 8).open_prefill().open_decode().failed()
    rig.wait(1.0)
    sent: list[bytes] = []
    for channel in [member.channel for member in rig.members]:
        channel.send = partial(noting, sent, channel.send)  # type: ignore[method-assign]
    rig.wait(3.0)
    assert sent
    assert not [frame for frame in sent if b"room" in frame]


def noting(sent: list[bytes], send: Callable[[str, bytes], bool], address: str, frame: bytes) -> bool:
    """Send a frame, and note it."""
    sent.append(frame)
    return send(address, frame)


def test_a_decode_rank_that_was_refused_ends_no_room_that_others_have(rig: Rig) -> None:
    """Its engine uses an id that another instance uses, too."""
    others = rig.decode(tp_shards(SPEC, 1), "E", strategy="slice")
    request = rig.request("room", rig.prefills, others, 8).open_prefill().open_decode().expect(8)
    rig.wait(0.5)
    stray = rig.decodes[0].endpoint.open(RoomId(b"room"), request.source)
    rig.until(lambda: stray.released, "the refusal")
    assert isinstance(stray.error, IncompatiblePeerError)
    rig.wait(0.5)
    request.send(8).finish().landed(8)


def test_no_other_frame_of_a_refused_life_is_accepted(rig: Rig) -> None:
    """It is counted and dropped, as that of any stranger."""
    rig.request("room", rig.prefills, rig.decodes, 8).open_prefill().open_decode().failed()
    table = rig.prefills[0].endpoint.driver.loop.peers
    loop = rig.decodes[0].endpoint.driver.loop
    ours, theirs = rig.prefills[0].endpoint.driver.loop.me.epoch, loop.me.epoch
    dropped = table.dropped
    head = room_head(theirs, ours, RoomId(b"room"), Generation(9))
    frames = [Heartbeat(src=theirs, dst=ours, ask=True), AbortAck(**head)]
    assert [table.on_frame(frame, rig.clock()) for frame in frames] == [(False, []), (False, [])]
    assert table.dropped == dropped + 2
    abort = Abort(**head, reason="")
    assert table.on_frame(abort, rig.clock()) == (True, [])
    assert table.on_frame(structs.replace(abort, dst=Epoch(bytes(16))), rig.clock()) == (False, [])
    assert table.on_frame(structs.replace(abort, src=Epoch(bytes(16))), rig.clock()) == (False, [])


class Unconnected(InprocTransport):
    """A transport that reaches no peer."""

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Raise."""
        raise TransportError("no route")


def test_prefill_learns_that_decode_s_transport_does_not_reach_it() -> None:
    """Frames cross, so that nothing else would end prefill's room before its deadline."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(transport=Unconnected))
    request = rig.request("room", prefills, decodes, 8).open_prefill().open_decode()
    began = rig.clock()
    request.failed()
    assert rig.clock() - began < SOON_S
    assert "no route" in str(request.sends[0].error)
    assert request.sends[0].phase is Phase.FAILED
