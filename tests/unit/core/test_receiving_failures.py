"""A room on a decode rank that fails: who hears of it, what is evidence, and what stays until there is some."""

from __future__ import annotations

import pytest

from disagg_kv.core import (
    Cancel,
    CastVote,
    Decided,
    Free,
    Gone,
    Leased,
    Lost,
    Met,
    Phase,
    Quarantine,
    Receiving,
    RoomFrame,
    Scattered,
    Tick,
)
from disagg_kv.core.wire.frames import Abort, Drained, DrainedAck, Expected, Landed
from disagg_kv.errors import (
    AbortedError,
    DeadlineError,
    DisaggKVError,
    PeerLostError,
)
from disagg_kv.ids import Epoch
from disagg_kv.planning import Segment
from tests.support.receive_room import (
    LEASE,
    OTHER_LEASE,
    A,
    B,
    P,
    Room,
    abort,
    chunk,
    done,
    drained,
    expected,
    failed,
    head,
    only,
    phase_of,
    released,
    request,
    sent,
    state_of,
)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (abort(0), AbortedError),
        (drained(0), AbortedError),
        (Lost(P[0], PeerLostError("silent")), PeerLostError),
        (Cancel(AbortedError("engine")), AbortedError),
        (Cancel(ValueError("foreign")), DisaggKVError),
        (Decided(False, "rank 1"), AbortedError),
    ],
    ids=str,
)
def test_after_any_failure_all_hear_abort_until_there_is_evidence(event: object, kind: type[DisaggKVError]) -> None:
    room = Room()
    effects = room.say(event)
    failed(room, kind)
    assert len(only(effects, CastVote)) == 1
    told = {rank for rank, frame in sent(effects) if frame is Abort}
    assert told == ({1} if isinstance(event, Drained) else {0, 1})
    assert room.machine.released, "pages are nobody else's: they were not exposed"
    assert {r for r, _ in sent(room.say(Tick(), now=0.3))} <= {0, 1}
    assert sent(room.say(drained(0), drained(1))) == [(0, DrainedAck), (1, DrainedAck)]
    assert state_of(room) is Receiving.CLOSED
    assert room.machine.next_at() is None


def test_a_leased_segment_stays_in_quarantine_until_each_asker_gives_evidence() -> None:
    """Silence and loss free nothing."""
    room = Room()
    room.lease()
    room.say(chunk(1))
    assert only(room.say(Cancel(AbortedError("engine")), chunk(1)), Quarantine) == [Quarantine(A)]
    assert only(room.say(Tick(), now=1e6), Free) == []
    assert only(room.say(Lost(P[0], PeerLostError("silent"))), Free) == []
    assert only(room.say(drained(1)), Free) == []
    assert state_of(room) is Receiving.DRAINING
    assert only(room.say(drained(0)), Free) == [Free(A)]
    assert state_of(room) is Receiving.CLOSED


@pytest.mark.parametrize("evidence", [chunk(0), drained(0), Gone(P[0])], ids=str)
def test_landed_drained_and_gone_are_evidence(evidence: object) -> None:
    room = Room()
    room.say(request(0), Leased(A, LEASE), Cancel(AbortedError("engine")))
    assert only(room.say(evidence), Free) == [Free(A)]
    assert only(room.say(evidence), Free) == []
    assert state_of(room) is Receiving.DRAINING
    assert sent(room.say(Tick(), now=0.2))[-1] == (1, Abort)


@pytest.mark.parametrize("no_evidence", [chunk(0, A, OTHER_LEASE), chunk(0, B), chunk(0, A, None), chunk(1)], ids=str)
def test_a_late_notice_of_something_else_is_no_evidence(no_evidence: object) -> None:
    room = Room()
    room.say(request(0), Leased(A, LEASE), Cancel(AbortedError("engine")))
    assert only(room.say(no_evidence, done(0)), Free) == []


def test_a_lease_that_no_writer_was_told_of_is_free_at_once() -> None:
    room = Room()
    room.say(request(0))
    assert only(room.say(Cancel(AbortedError("engine"))), Free) == [Free(A)]
    assert room.say(Leased(A, LEASE)) == [Free(A)]


@pytest.mark.parametrize("error", [None, RuntimeError("kernel")])
def test_pages_and_lease_are_held_while_a_scatter_runs(error: Exception | None) -> None:
    """A scatter reads the lease and writes the pages."""
    room = Room()
    room.lease()
    room.say(chunk(0), chunk(1), Cancel(AbortedError("engine")), drained(0), drained(1))
    assert (state_of(room), room.machine.released) == (Receiving.DRAINING, False)
    assert only(room.say(Scattered(A, error)), Free) == [Free(A)]
    assert (state_of(room), room.machine.released) == (Receiving.CLOSED, True)


def test_a_scatter_that_fails_fails_the_room_and_names_the_segment() -> None:
    room = Room()
    room.lease()
    effects = room.say(chunk(0), chunk(1), Scattered(A, RuntimeError("kernel")))
    failed(room, DisaggKVError, "scatter of Segment(start=0", "kernel")
    assert only(effects, Free) == [Free(A)]


def test_exposed_pages_are_released_on_evidence_only() -> None:
    """Each writer may write to them until its Done, its Drained or its observed end."""
    room = Room(exposed=True)
    room.say(Cancel(AbortedError("engine")), Lost(P[0], PeerLostError("silent")))
    assert not released(room)
    room.say(done(1))
    assert not released(room)
    room.say(Gone(P[0]))
    assert released(room)
    room.say(drained(1))
    assert state_of(room) is Receiving.CLOSED


def test_pages_that_no_expect_has_named_are_nobody_elses() -> None:
    room = Room(begun=False, exposed=True)
    room.say(room.awaited, Cancel(AbortedError("engine")))
    assert room.machine.released
    assert sent(room.say(Met(P[0]), Met(P[1]))) == [(0, Abort), (1, Abort)]
    assert room.machine.released, "released is said once"
    room.say(drained(0), drained(1))
    assert state_of(room) is Receiving.DRAINING, "there may be others"
    room.say(Lost(Epoch(b""), AbortedError("these are all")))
    assert state_of(room) is Receiving.CLOSED


def test_a_room_that_failed_before_its_writers_were_known_waits_for_their_answers() -> None:
    room = Room(begun=False)
    room.say(Cancel(AbortedError("engine")), Met(P[1]), Lost(Epoch(b""), AbortedError("these are all")))
    assert state_of(room) is Receiving.DRAINING
    assert sent(room.say(Tick(), now=0.2)) == [(1, Abort)], "repeated"
    room.say(drained(1))
    assert state_of(room) is Receiving.CLOSED


def test_an_abort_before_the_writers_are_known_is_told_once_they_are_or_ends_if_nobody_comes() -> None:
    room = Room(begun=False)
    room.say(Cancel(AbortedError("engine")))
    assert state_of(room) is Receiving.DRAINING
    room.say(room.awaited, Cancel(AbortedError("again")))
    room.say(Lost(Epoch(b""), PeerLostError("nobody answers")))
    assert (state_of(room), room.machine.released) == (Receiving.CLOSED, True)


def test_a_rank_that_returns_hears_again_of_a_room_that_failed_before_it_came() -> None:
    """It may have missed the first notice."""
    room = Room(begun=False)
    room.say(Cancel(AbortedError("engine")), Met(P[0]), Lost(P[0], PeerLostError("silent")))
    assert sent(room.say(Tick(), now=1.0)) == []
    assert sent(room.say(Met(P[0]), now=2.0)) == [(0, Abort)]


def test_a_loss_while_nobody_is_known_fails_the_room() -> None:
    room = Room(begun=False)
    room.say(Lost(Epoch(b""), PeerLostError("nobody answers")))
    failed(room, PeerLostError, "nobody answers")
    assert (state_of(room), room.machine.released) == (Receiving.DRAINING, True)
    assert sent(room.say(Met(P[0]), now=29.0)) == [(0, Abort)], "whoever comes all the same learns it"
    assert room.machine.next_at() is not None
    room.say(Tick(), now=29.9)
    assert state_of(room) is Receiving.DRAINING
    room.say(Tick(), now=30.0)
    assert state_of(room) is Receiving.CLOSED


@pytest.mark.parametrize("state", ["opened", "moving", "landed", "draining"])
def test_the_loss_or_end_of_somebody_else_changes_nothing(state: str) -> None:
    room = Room(begun=state != "opened")
    if state == "opened":
        room.say(room.introduced)
    elif state == "landed":
        room.landed()
    elif state == "draining":
        room.lease()
        room.say(Cancel(AbortedError("engine")))
    before = state_of(room)
    assert room.say(Lost(P[2], PeerLostError("silent")), Gone(P[2])) == []
    assert state_of(room) is before


def test_a_writer_that_is_done_may_be_lost() -> None:
    room = Room()
    room.land(A)
    room.land(B)
    room.say(done(0, 2), Lost(P[0], PeerLostError("silent")), Gone(P[0]))
    assert phase_of(room) is Phase.MOVING
    assert only(room.say(done(1, 2)), CastVote) == [CastVote(True, "")]


def test_a_writer_lost_while_all_has_landed_is_not_waited_for_if_the_room_fails_after_all() -> None:
    room = Room()
    room.landed()
    assert room.say(Lost(P[0], PeerLostError("silent"))) == []
    room.say(Decided(False, "rank 1"))
    room.say(drained(1))
    assert state_of(room) is Receiving.CLOSED


@pytest.mark.parametrize(
    ("event", "answer"), [(abort(0), Abort), (drained(0), DrainedAck), (Cancel(AbortedError("engine")), None)]
)
def test_doubt_after_landing_asks_the_others_and_the_agreement_stands(
    event: object, answer: type[RoomFrame] | None
) -> None:
    room = Room()
    room.landed()
    effects = room.say(event)
    assert [v.ok for v in only(effects, CastVote)] == [False]
    assert sent(effects) == ([] if answer is None else [(0, answer)])
    room.say(Decided(True, ""))
    assert phase_of(room) is Phase.DONE


def test_landed_answers_late_frames_and_malformed_ones_do_no_harm() -> None:
    room = Room()
    room.landed()
    late = [chunk(0), request(1), request(0, Segment(4, 4, 0, 0)), done(0), Expected(**head(0), parked=False)]
    assert sent(room.say(*late)) == [(0, Landed), (1, Landed), (0, Landed)]


def test_draining_answers_late_frames() -> None:
    room = Room()
    room.say(Cancel(AbortedError("engine")))
    late = [request(0), request(0, Segment(4, 4, 0, 0)), chunk(0, Segment(4, 4, 0, 0)), abort(1)]
    assert sent(room.say(*late, Decided(False, "x"))) == [(0, Abort), (0, Abort), (1, Abort)]


def test_the_deadline_names_who_is_missing() -> None:
    room = Room()
    room.say(done(0), expected(1))
    room.say(Tick(), now=299.0)
    room.say(Tick(), now=300.0)
    failed(room, DeadlineError, "not complete within 300 s", "ranks [1] are not done")
    room = Room(begun=False)
    room.say(Tick(), now=300.0)
    failed(room, DeadlineError, "the prefill ranks were not found")


def test_a_room_that_prefill_does_not_open_in_time_fails_by_name() -> None:
    """Any frame about the room but ``Expected(parked=True)`` shows that its sender has opened it."""
    room = Room()
    room.say(expected(1, parked=True), request(0, A), now=20.0)
    room.say(Tick(), now=29.9)
    assert phase_of(room) is Phase.WAITING
    effects = room.say(Tick(), now=30.0)
    failed(room, DeadlineError, "prefill ranks [1] have not opened it within 30 s (claim_s)")
    assert sent(effects) == [(0, Abort), (1, Abort)]
    assert [vote.ok for vote in only(effects, CastVote)] == [False]
    room = Room()
    room.say(expected(0), done(1), now=29.9)
    room.say(Tick(), now=31.0)
    assert phase_of(room) is Phase.MOVING


def test_a_deadline_before_the_writers_are_known_is_told_once_they_are_or_ends_if_nobody_comes() -> None:
    """Prefill does not wait for its own deadline."""
    room = Room(begun=False)
    room.say(Tick(), now=300.0)
    assert (state_of(room), room.machine.released) == (Receiving.DRAINING, True)
    assert sent(room.say(Met(P[0]), Met(P[1]), now=301.0)) == [(0, Abort), (1, Abort)]
    room = Room(begun=False)
    room.say(Tick(), now=300.0)
    room.say(Lost(Epoch(b""), PeerLostError("nobody answers")), now=301.0)
    assert state_of(room) is Receiving.CLOSED


def test_no_agreement_in_time_is_a_vote_against_and_is_said_again() -> None:
    room = Room()
    room.landed()
    assert room.say(Tick(), now=299.0) == []
    assert [v.ok for v in only(room.say(Tick(), now=300.0), CastVote)] == [False]
    assert room.say(Tick(), now=301.0) == []
    assert [v.ok for v in only(room.say(Tick(), now=600.0), CastVote)] == [False]


def test_nothing_is_taken_in_after_the_end() -> None:
    room = Room()
    room.landed()
    room.say(Decided(True, ""))
    assert room.say(Decided(False, "late"), Cancel(AbortedError("late")), Tick(), abort(0), Gone(P[0])) == []
    assert phase_of(room) is Phase.DONE
