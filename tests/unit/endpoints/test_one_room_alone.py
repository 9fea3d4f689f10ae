"""Many rooms whose prefill ranks come and go at once: each ends by itself, and no other room or peer pays for it."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import pytest

from disagg_kv.core import Lost, Phase
from disagg_kv.endpoints.prefill.read_pools import ReadPools
from disagg_kv.errors import SupersededError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Peer, RoomId
from disagg_kv.planning import InstancePlans
from disagg_kv.rendezvous import Source
from disagg_kv.transports import InprocTransport, ShmTransport
from tests.support.rig import Memory, Rig, tp_shards
from tests.unit.endpoints.test_several import Far, several

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROOMS = 800
"""More than begin in one step."""


def test_a_prefill_rank_that_ends_while_many_rooms_begin_ends_those_rooms_alone() -> None:
    rig = Rig(SPEC)
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    rig.prefill(tp_shards(SPEC, 1), "Q")
    innocent = decode.endpoint.open(RoomId(b"innocent"), Source("Q"))
    handles = [decode.endpoint.open(RoomId(b"%d" % i), Source("P")) for i in range(ROOMS)]
    for _ in range(4):
        rig.turn()
    (prefill,) = rig.prefill(tp_shards(SPEC, 1))
    left = decode.endpoint._side._discovery.outcomes
    while not left:
        rig.turn()
    prefill.close(0.0)
    rig.wait(1.0)
    assert innocent.phase is Phase.READY
    assert Counter(handle.phase for handle in handles) == {Phase.FAILED: ROOMS}
    rig.decodes[0].endpoint.poll()


def test_a_room_that_cannot_begin_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the step in which it would begin is that of another peer."""
    rig = Rig(SPEC)
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    rig.prefill(tp_shards(SPEC, 1), "Q")
    innocent = decode.endpoint.open(RoomId(b"innocent"), Source("Q"))
    rig.wait(0.5)
    handles = [decode.endpoint.open(RoomId(b"%d" % i), Source("P")) for i in range(ROOMS)]
    begun, rotation = Counter[str](), InstancePlans.rotation

    def begins(plans: InstancePlans, room: RoomId) -> object:
        begun["rooms"] += 1
        if begun["rooms"] in (10, ROOMS - 10):
            raise MemoryError("one room")
        return rotation(plans, room)

    monkeypatch.setattr(InstancePlans, "rotation", begins)
    rig.prefill(tp_shards(SPEC, 1))
    rig.wait(1.0)
    assert innocent.phase is Phase.READY
    assert Counter(handle.phase for handle in handles) == {Phase.READY: ROOMS - 2, Phase.FAILED: 2}


def test_close_tells_prefill_of_all_rooms_that_were_given_up_before_it_was_found() -> None:
    rig, rooms = Rig(SPEC), 1500
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    handles = [decode.endpoint.open(RoomId(b"%d" % i), Source("P")) for i in range(rooms)]
    for _ in range(8):
        rig.turn()
    for handle in handles:
        handle.abort("given up")
    for _ in range(8):
        rig.turn()
    (prefill,) = rig.prefill(tp_shards(SPEC, 1))
    theirs = [prefill.endpoint.open(RoomId(b"%d" % i)) for i in range(rooms)]
    while not decode.endpoint._side._discovery.untold:
        rig.turn()
    began = rig.clock()
    decode.close(30.0)
    assert rig.clock() - began < 5.0
    for _ in range(50):
        rig.turn()
    assert Counter(handle.phase for handle in theirs) == {Phase.FAILED: rooms}


def test_a_replaced_rank_raises_an_error_of_its_own_for_each_call() -> None:
    """One error would keep the frames of all callers."""
    rig = Rig(SPEC)
    (prefill,) = rig.prefill(tp_shards(SPEC, 1))
    prefill.endpoint._loop.ranks._yield("inproc://elsewhere")
    raised = []
    for number in range(2):
        with pytest.raises(SupersededError, match=f"room {number}: .*lives elsewhere") as caught:
            prefill.endpoint.open(RoomId(b"%d" % number))
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_all_peers_of_a_failed_transport_are_lost_although_one_loss_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(SPEC)
    (decode,) = rig.decode(tp_shards(SPEC, 1), memory=several(ShmTransport, Far))
    for name in "QRS":
        rig.prefill(tp_shards(SPEC, 1), name, memory=several(Far))
        decode.endpoint.open(RoomId(name.encode()), Source(name))
    rig.wait(0.5)
    loop = decode.endpoint._loop
    assert len(list(loop.all_there())) == 3
    lost, raised = loop.side.on_lost, list[Lost]()

    def once(event: Lost) -> None:
        raised.append(event)
        if len(raised) == 1:
            raise MemoryError("once")
        lost(event)

    monkeypatch.setattr(loop.side, "on_lost", once)
    (far,) = (one for one in loop.me.transports if one.name == "far")
    assert isinstance(far, Far)
    far.broken = True
    rig.wait(0.5)
    assert len(raised) == 3


def test_a_peer_that_cannot_be_made_ready_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    connected, disconnected = list[Peer](), list[Peer]()

    class Counted(InprocTransport):
        def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
            connected.append(super().connect(descriptor, timeout_s))
            return connected[-1]

        def disconnect(self, peer: Peer) -> None:
            disconnected.append(peer)
            super().disconnect(peer)

    def no_compiler(*_: object) -> NoReturn:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(ReadPools, "warm", no_compiler)
    rig = Rig(SPEC)
    rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Counted))
    (decode,) = rig.decode(tp_shards(SPEC, 1))
    decode.endpoint.open(RoomId(b"room"), Source("P"))
    rig.wait(1.0)
    assert connected
    assert disconnected == connected
