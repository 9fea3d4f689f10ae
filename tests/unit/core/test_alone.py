"""A rank that decides for itself: its own outcome is the room's, at once, whatever becomes of the other ranks."""

from __future__ import annotations

from disagg_kv.core import Alone, Decided, Options, Outcome, RoomKey
from disagg_kv.core.wire.frames import Decision, Vote
from disagg_kv.ids import Epoch, Generation, Rank, RoomId

KEY = RoomKey(RoomId(b"r"), Generation(1))
E = [Epoch(bytes([rank] * 16)) for rank in range(3)]


def test_the_own_outcome_decides_at_once() -> None:
    """That the room opens decides nothing. A success may be withdrawn before the engine acts on it, as a failure."""
    one = Alone(Rank(1), 3, E[1], Options(), "I")
    assert one.vote(KEY, None, "", 0.0) == []
    assert one.vote(KEY, True, "", 0.0) == [Outcome(KEY, Decided(True, ""))]
    assert one.vote(KEY, False, "broken", 0.0) == [Outcome(KEY, Decided(False, "broken"))]
    assert (one.undecided, one.next_at(), one.tick(9.0)) == (0, None, ())


def test_nothing_of_other_ranks_changes_an_outcome() -> None:
    """Neither that they are there or lost, nor what they vote or decide."""
    one = Alone(Rank(0), 3, E[0], Options(), "I")
    one.vote(KEY, None, "", 0.0)
    assert one.joined(E[1], Rank(1), 0.0) == one.lost(E[1], 1.0) == ()
    one.followed(E[2], Rank(2))
    vote = Vote(src=E[1], dst=E[0], room=KEY.room, generation=1, ok=False, reason="")
    decision = Decision(src=E[1], dst=E[0], room=KEY.room, generation=1, ok=True, shared=True, reason="")
    assert one.on_frame(vote, 1.0) == one.on_frame(decision, 1.0) == ()
