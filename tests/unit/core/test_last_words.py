"""``Done`` goes out with the last notice: what each side makes of it, whatever is lost, late or ends in between."""

from __future__ import annotations

import pytest

from disagg_kv.core import (
    Cancel,
    CastVote,
    Free,
    Gone,
    Lost,
    Phase,
    Quiet,
    Receiving,
    Scattered,
    Tick,
    WriteFailed,
    Wrote,
)
from disagg_kv.core.room.outbound import SegmentStep
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import MAX_AUX, Abort, ChunkReady, Done, Drained, Landed
from disagg_kv.errors import AbortedError, DeadlineError, PeerLostError, RemoteProtocolError, TransportError
from disagg_kv.planning import Segment
from tests.support import receive_room as decode
from tests.support import send_room as prefill
from tests.support.receive_room import LEASE, OTHER_LEASE, P, chunk, done, failed, phase_of, released, request, state_of
from tests.support.send_room import FINAL, RETRY, A, B, D, frames, grant, landed, only, plan, sent, state, transfers

# Prefill.


def announced() -> prefill.Room:
    """All is written, nothing acknowledged, and the room is finished."""
    room = prefill.Room()
    room.expect()
    room.write(A)
    room.write(B)
    room.machine.finish(8, b"aux", 0.0)
    assert state(room) is Sending.FINISHED
    return room


def counted(room: prefill.Room) -> int:
    return room.machine.flows[D[0]].outbound.segments_landed


def test_done_goes_out_with_the_last_notice_and_says_how_many_there_are() -> None:
    room = prefill.Room()
    room.expect()
    assert room.machine.finish(8, b"aux", 0.0) == []
    assert sent(room.write(A)) == [ChunkReady]
    room.say(landed(A))
    effects = room.write(B)
    assert sent(effects) == [ChunkReady, Done]
    assert [(f.segments, f.stop, f.aux) for f in frames(effects, Done)] == [(2, 8, b"aux")]


def test_a_room_that_is_finished_after_its_last_notice_says_done_at_once() -> None:
    room = prefill.Room()
    room.expect()
    room.write(A)
    room.write(B)
    assert [f.segments for f in frames(room.machine.finish(8, None, 0.0), Done)] == [2]


@pytest.mark.parametrize(
    "step", ["planned", "asked", "granted", "writing", "to be tried again"], ids=lambda s: str(s).replace(" ", "_")
)
def test_done_waits_for_what_is_not_written(step: str) -> None:
    """Pages that were exposed are decode's own again when it hears ``Done``."""
    room = prefill.Room(ready=False) if step == "planned" else prefill.Room()
    room.expect(given=plan(exposed=step == "planned"))
    if step == "planned":
        assert transfers(room.ready(1)) == [A]
        assert room.begin(A, lease=None)
        room.say(Wrote(A))
    else:
        room.write(A)
    if step in ("granted", "writing", "to be tried again"):
        room.say(grant(B))
    if step in ("writing", "to be tried again"):
        assert room.begin(B)
    if step == "to be tried again":
        room.say(WriteFailed(B, RETRY, True))
    assert Done not in sent(room.machine.finish(8, None, 0.0))
    assert sent(room.say(landed(A))) == []
    assert state(room) is Sending.MOVING


def test_done_brings_all_aux_data_and_waits_for_no_acknowledgement() -> None:
    room = prefill.Room(chunks=1)
    room.expect()
    room.write(A)
    aux = bytes(range(256)) * (MAX_AUX // 256)
    assert [done.aux for done in frames(room.machine.finish(4, aux, 0.0), Done)] == [aux]


def test_notices_are_repeated_beside_done_until_each_is_acknowledged() -> None:
    room = announced()
    assert sent(room.machine.tick(0.2)) == [ChunkReady, ChunkReady, Done]
    assert room.say(landed(A)) == []
    assert counted(room) == 1
    assert sent(room.machine.tick(9.0)) == [ChunkReady, Done]
    assert room.say(landed(A), landed(B)) == []
    assert (counted(room), room.machine.flows[D[0]].ignored) == (2, 1)
    assert sent(room.machine.tick(19.0)) == [Done]


@pytest.mark.parametrize("before", [0, 1])
def test_complete_proves_that_all_has_landed_whose_landed_was_lost(before: int) -> None:
    room = announced()
    room.say(*[landed(s) for s in (A, B)[:before]])
    assert room.complete() == [CastVote(True, "")]
    assert counted(room) == 2
    assert room.machine.tick(9.0) == []
    assert room.say(landed(A), landed(B)) == []
    assert counted(room) == 2


@pytest.mark.parametrize("error", [RETRY, FINAL], ids=["retryable", "final"])
def test_a_write_that_fails_after_complete_is_not_tried_again(error: TransportError) -> None:
    """Decode knew from flags that it has all rows: its pages are another room's, and no write to them may begin."""
    room = prefill.Room(chunks=1)
    room.expect(given=plan(exposed=True))
    assert room.begin(A, lease=None)
    assert room.complete() == []
    effects = room.say(WriteFailed(A, error, True))
    assert transfers(effects) == []
    assert not room.begin(A, lease=None)
    assert room.machine.phase is Phase.FAILED


def test_no_write_begins_after_complete() -> None:
    """Whatever orders it: the flow alone says whether a transfer may begin."""
    room = prefill.Room(chunks=1)
    room.expect(given=plan(exposed=True))
    flow = room.machine.flows[D[0]]
    assert room.begin(A, lease=None)
    room.complete()
    flow.outbound.move(flow.outbound[A], SegmentStep.GRANTED)
    assert not room.begin(A, lease=None)


def test_pages_that_are_taken_away_after_done_change_nothing() -> None:
    """They are not read any more, and pages that come again are not needed."""
    room = announced()
    assert room.machine.withdraw(0.0) == []
    assert room.add(8, start=0) == []
    assert sent(room.machine.tick(0.2)) == [ChunkReady, ChunkReady, Done]
    assert room.complete() == [CastVote(True, "")]


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (prefill.abort(), [Drained]),
        (Cancel(AbortedError("engine")), [Drained]),
        (Lost(D[0], PeerLostError("silent")), []),
        (Gone(D[0]), []),
    ],
    ids=str,
)
def test_a_room_that_fails_before_its_notices_are_acknowledged_is_quiet_already(
    event: object, says: list[type[Drained]]
) -> None:
    room = announced()
    assert sent(room.say(event)) == says
    assert sent(room.machine.tick(9.0)) == says
    assert state(room) is (Sending.DRAINING if says else Sending.CLOSED)


def test_a_write_that_is_not_quiet_keeps_done_back_for_good() -> None:
    room = prefill.Room(chunks=1)
    room.expect()
    room.say(grant())
    assert room.begin()
    room.machine.finish(4, None, 0.0)
    assert sent(room.say(WriteFailed(A, RETRY, False))) == [Abort]
    assert sent(room.say(Quiet(A))) == [Drained]


# Decode.


@pytest.mark.parametrize("exposed", [False, True], ids=["leased", "exposed"])
def test_done_may_come_before_the_notices(exposed: bool) -> None:
    """What was lost is said again, what came late counts, and a repeated ``Done`` changes nothing."""
    room = decode.Room(exposed=exposed)
    lease = None if exposed else LEASE
    other = None if exposed else OTHER_LEASE
    if not exposed:
        room.lease(A, LEASE)
        room.lease(B, OTHER_LEASE)
    assert room.say(done(0, 2), done(1, 2), done(0, 2)) == []
    room.say(chunk(1, B, other), chunk(1, A, lease), chunk(0, A, lease), chunk(0, A, lease))
    if not exposed:
        room.say(Scattered(A))
    assert state_of(room) is Receiving.MOVING
    effects = room.say(chunk(0, B, other))
    if not exposed:
        assert only(effects, CastVote) == []
        effects = room.say(Scattered(B))
    assert only(effects, CastVote) == [CastVote(True, "")]
    assert (room.machine.inbound.segments_placed, state_of(room)) == (2, Receiving.PLACED)


def test_a_done_writer_that_is_lost_before_its_notices_fails_the_room() -> None:
    """Nobody else says that its parts are there."""
    room = decode.Room()
    room.lease(A)
    room.say(done(0, 1), chunk(1), Lost(P[0], PeerLostError("silent")))
    failed(room, PeerLostError, "silent")


def test_a_done_writer_whose_notices_have_come_may_be_lost_while_others_are_missing() -> None:
    room = decode.Room(exposed=True)
    room.say(chunk(0, A, None), chunk(0, B, None), done(0, 2), Lost(P[0], PeerLostError("silent")), Gone(P[0]))
    assert phase_of(room) is Phase.WAITING
    assert only(room.say(done(1, 2), chunk(1, A, None), chunk(1, B, None)), CastVote) == [CastVote(True, "")]


def test_the_deadline_says_whose_notices_are_missing() -> None:
    room = decode.Room(exposed=True)
    room.say(chunk(0, A, None), done(0, 2))
    room.say(Tick(), now=300.0)
    failed(room, DeadlineError, "ranks [1] are not done; rank 0 is done, but 1 of its 2 notices have come")
    room = decode.Room()
    room.land(A)
    room.lease(B, OTHER_LEASE)
    room.say(chunk(0, B, OTHER_LEASE), chunk(1, B, OTHER_LEASE), done(0, 2), done(1, 2))
    room.say(Tick(), now=300.0)
    failed(room, DeadlineError, "all ranks are done")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([done(0, 1), done(1, 1), chunk(0, A, None), chunk(1, A, None)], "layers range(0, 2) are not complete"),
        ([chunk(0, A, None), done(0, 1), done(1, 0)], "layers range(0, 2) are not complete"),
        ([done(1, 0), done(0, 1), chunk(0, A, None)], "layers range(0, 2) are not complete"),
        ([chunk(0, A, None), done(0, 0)], "rank 0 is done after 0 segments, and has announced 1"),
        ([done(0, 1), chunk(0, A, None), chunk(0, B, None)], "rank 0 is done after 1 segments, and has announced 2"),
    ],
)
def test_what_is_not_complete_when_all_was_said_fails_at_once(events: list[object], words: str) -> None:
    """``Done`` proves nothing, and a room that cannot succeed does not wait for its deadline."""
    room = decode.Room(exposed=True)
    assert only(room.say(*events), CastVote)[-1].ok is False
    failed(room, RemoteProtocolError, words)


def test_a_lease_that_nobody_used_keeps_a_room_from_success() -> None:
    """I3: where prefill names the end, rows beyond it may have been asked for."""
    room = decode.Room(stop=None)
    room.land(A)
    room.say(request(0, B), done(0, 1, stop=4))
    effects = room.say(done(1, 1, stop=4))
    failed(room, RemoteProtocolError, "layers range(0, 2) are not complete")
    assert only(effects, Free) == [Free(B)]


def test_exposed_pages_are_quiet_once_all_are_done_although_notices_are_missing() -> None:
    """``Done`` is said when nothing of the room is written any more."""
    room = decode.Room(exposed=True)
    room.say(done(0, 2), Cancel(AbortedError("engine")))
    assert not released(room)
    room.say(done(1, 2))
    assert released(room)
    assert decode.sent(room.say(chunk(0, Segment(0, 4, 0, 2), None))) == []


def test_a_late_request_after_done_is_answered_like_any_other() -> None:
    room = decode.Room()
    room.lease(A)
    room.say(chunk(0), done(0, 1))
    assert decode.sent(room.say(request(0))) == [(0, Landed)]
