"""Recurrent states on a decode rank: awaited like rows, and bounded like them."""

from __future__ import annotations

import re

import pytest

from disagg_kv.core import CastVote, Introduced
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.geometry import CacheSpec, Component, shard
from disagg_kv.ids import LayerId, VirtualOffset
from disagg_kv.planning import RankPlan, Segment
from disagg_kv.staging import Lease
from tests.support.receive_room import OTHER_LEASE, SPEC, A, B, P, Room, done, only, request

HYBRID = CacheSpec.uniform(2, [*SPEC.layers[LayerId(0)], Component("ssm", "int8", 2, 16, tokens_per_row=0, rows=1)])
HYBRID_PLAN = RankPlan.build(HYBRID, [shard(HYBRID, tp=2, rank=r) for r in range(2)], shard(HYBRID))


def hybrid() -> Room:
    """A room that awaits rows and states."""
    room = Room(begun=False)
    room.introduced = Introduced((P[0], P[1]), HYBRID_PLAN)
    room.say(room.awaited, room.introduced)
    return room


def test_a_room_with_states_succeeds_only_when_they_have_landed_too() -> None:
    """``Done`` alone proves nothing; states need a lease, writers and a scatter like rows."""
    room = hybrid()
    room.land(A)
    room.land(B, OTHER_LEASE)
    out = room.say(done(0, 2), done(1, 2))
    assert isinstance(room.machine.error, RemoteProtocolError)
    assert "states of layers range(0, 2) are not complete" in str(room.machine.error)
    assert only(out, CastVote)[0].ok is False
    room = hybrid()
    room.land(A)
    room.land(B, OTHER_LEASE)
    room.land(Segment(0, 1, 0, 2, state=True), Lease(VirtualOffset(80128), 512, 14592))
    assert only(room.say(done(0, 3), done(1, 3)), CastVote) == [CastVote(True, "")]
    assert room.machine.inbound.segments_placed == 3


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(0, 2, 0, 2, state=True), "state rows up to 2, but layers range"),
        (Segment(0, 1, 0, 3, state=True), r"layers \[0, 3\) are not a run"),
    ],
)
def test_states_that_there_are_not_are_refused(segment: Segment, message: str) -> None:
    """Decode trusts no range."""
    room = hybrid()
    room.say(request(0, segment))
    assert re.search(message, str(room.machine.error))


def test_states_of_a_room_without_any_are_refused() -> None:
    """The flag is no way around the bounds of rows."""
    room = Room()
    room.say(request(0, Segment(0, 1, 0, 2, state=True)))
    assert "state rows up to 1" in str(room.machine.error)
