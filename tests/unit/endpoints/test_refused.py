"""Rooms of two sides that cannot work together end at once on both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from msgspec import structs

from disagg_kv.core import Codec, Phase
from disagg_kv.core.peers.refusals import MAX_REFUSED, Refusals, RefusedIncarnation
from disagg_kv.core.room import draining
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.wire.frames import Abort, Complete, Heartbeat
from disagg_kv.endpoints.decode import rooms
from disagg_kv.errors import AbortedError, IncompatiblePeerError, TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Generation, Peer, RoomId
from disagg_kv.rendezvous import Source
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


def test_a_refused_room_costs_the_same_however_many_were_refused_before_it(rig: Rig) -> None:
    """Counted in calls of the code that informs prefill ranks of such rooms."""
    costs: list[int] = []
    for earlier in (2, 60):
        for number in range(earlier):
            room = RoomId(f"{earlier} {number}".encode())
            rig.decodes[0].endpoint.open(room, Source("P"))
        rig.wait(1.0)
        calls: list[str] = []
        before = sys.getprofile()
        sys.setprofile(partial(calling, calls))
        try:
            rig.decodes[0].endpoint.open(RoomId(f"after {earlier}".encode()), Source("P"))
            for member in 2 * rig.members:
                member.endpoint.driver.step(0.0)
        finally:
            sys.setprofile(before)
        assert "_inform" in calls
        costs.append(len(calls))
    assert costs[1] < 2 * costs[0]


def calling(calls: list[str], frame: FrameType, event: str, about: object) -> None:
    """Note the calls of two modules' functions, and of their generators."""
    if event == "call" and frame.f_code.co_filename in (rooms.__file__, draining.__file__):
        calls.append(frame.f_code.co_name)


def test_a_rank_that_comes_later_is_notified_of_every_room_in_order(rig: Rig) -> None:
    """Also where another source has rooms, and of none that is too old."""
    prefills, (decode,) = rig.prefills, rig.decodes
    for prefill in prefills:
        prefill.frozen = True
    names = [b"a", b"b", b"c"]
    handles = [decode.endpoint.open(RoomId(name), Source("P")) for name in names]
    decode.endpoint.open(RoomId(b"other"), Source("Q"))
    rig.wait(0.5)
    for handle in handles:
        handle.abort("never mind")
    rig.wait(0.5)
    sent: list[bytes] = []
    decode.channel.send = partial(noting, sent, decode.channel.send)  # type: ignore[method-assign]
    prefills[1].frozen = False
    rig.until(lambda: len(aborted(sent)) >= len(names), "the notices")
    assert aborted(sent)[: len(names)] == names


def aborted(sent: list[bytes]) -> list[bytes]:
    """The rooms of all ``Abort`` frames, in order."""
    return [frame.room for frame in map(Codec().decode, sent) if isinstance(frame, Abort)]


def test_a_refused_life_that_has_moved_is_known_at_its_last_address() -> None:
    """Whatever becomes of the address where it was before."""
    known, one, two, error = Refusals(), Epoch(b"1" * 16), Epoch(b"2" * 16), TransportError("no")

    def life(epoch: Epoch, address: str) -> RefusedIncarnation:
        return RefusedIncarnation(epoch, address, "", {}, error)

    known.add(life(one, "here"))
    known.add(life(one, "there"))
    known.add(life(two, "here"))
    assert known.get(one) == life(one, "there")
    assert known.add(life(one, "here")) == "there"
    known.discard("there")
    assert known.get(one) == life(one, "here")
    known.discard("here")
    assert (known.get(one), known.get(two)) == (None, None)
    assert known.add(life(one, "there")) is None
    assert known.add(life(one, "here")) == "there"
    others = [life(Epoch(n.to_bytes(16, "big")), str(n)) for n in range(MAX_REFUSED)]
    assert [known.add(other) for other in others] == [None] * (MAX_REFUSED - 1) + ["here"]
    assert known.get(one) is None


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
    """It is dropped, as that of any stranger."""
    rig.request("room", rig.prefills, rig.decodes, 8).open_prefill().open_decode().failed()
    table = rig.prefills[0].endpoint.driver.loop.peers
    loop = rig.decodes[0].endpoint.driver.loop
    ours, theirs = rig.prefills[0].endpoint.driver.loop.me.epoch, loop.me.epoch
    head = room_head(theirs, ours, RoomId(b"room"), Generation(9))
    frames = [Heartbeat(src=theirs, dst=ours, ask=True), Complete(**head)]
    assert [table.on_frame(frame, rig.clock()) for frame in frames] == [(False, []), (False, [])]
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
