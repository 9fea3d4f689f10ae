"""A room on a prefill rank that fails, or whose peers do: what is tried again, when it is quiet, who hears of it."""

from __future__ import annotations

import pytest

from disagg_kv.core import CastVote, Decided, Gone, Lost, Phase, Quiet, Send, WriteFailed, Wrote
from disagg_kv.core.room.flow import WRITE_TRIES
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import Abort, ChunkReady, Drained, DrainedAck, Expect
from disagg_kv.errors import (
    AbortedError,
    DeadlineError,
    DisaggKVError,
    LocalProtocolError,
    OversizeError,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
)
from disagg_kv.ids import Generation
from tests.support.send_room import (
    FINAL,
    RETRY,
    A,
    B,
    D,
    Room,
    abort,
    finished,
    grant,
    head,
    only,
    phase,
    plan,
    sent,
    state,
    transfers,
)


@pytest.mark.parametrize("tries", range(1, WRITE_TRIES))
def test_a_write_that_may_be_tried_again_is(tries: int) -> None:
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    for _ in range(tries):
        assert room.begin()
        assert transfers(room.say(WriteFailed(A, RETRY, True))) == [A]
    assert room.begin()
    assert sent(room.say(Wrote(A))) == [ChunkReady]


def test_a_write_is_tried_three_times() -> None:
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    for _ in range(WRITE_TRIES):
        assert room.begin()
        effects = room.say(WriteFailed(A, RETRY, True))
    error = room.machine.error
    assert isinstance(error, TransportError)
    assert (error.epoch, error.room, error.retryable) == (D[0], b"r", True)
    assert str(error).startswith("room r towards epoch ")
    assert sent(effects) == [Drained]
    assert [v.ok for v in only(effects, CastVote)] == [False]


@pytest.mark.parametrize("error", [FINAL, ValueError("kernel")])
def test_an_error_that_will_not_pass_fails_the_room_at_once(error: Exception) -> None:
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    room.begin()
    room.say(WriteFailed(A, error, True))
    assert isinstance(room.machine.error, DisaggKVError)
    assert state(room) is Sending.DRAINING


@pytest.mark.parametrize("last", [Quiet(B), Wrote(B), WriteFailed(B, FINAL, True)], ids=str)
def test_drained_is_said_only_when_every_write_is_quiet(last: object) -> None:
    """A failed write that may still be under way is waited for, and so is one that has not ended."""
    room = Room()
    room.expect()
    room.say(grant(A), grant(B))
    assert room.begin(A)
    assert room.begin(B)
    assert sent(room.say(WriteFailed(A, RETRY, False))) == [Abort]
    assert state(room) is Sending.ABORTING
    assert not room.begin(B)
    assert sent(room.machine.tick(0.2)) == [Abort]
    assert room.say(abort()) == []
    assert room.machine.tick(9.0) == []
    assert room.say(WriteFailed(B, FINAL, False)) == []
    assert room.say(Quiet(A)) == []
    assert room.machine.flows[D[0]].busy
    assert sent(room.say(last)) == [Drained]
    assert sent(room.machine.tick(20.0)) == [Drained]
    assert sent(room.say(abort())) == [Drained]
    room.say(DrainedAck(**head()))
    assert (state(room), room.machine.closed) == (Sending.CLOSED, True)
    assert room.say(abort(), Quiet(A)) == []


def test_their_abort_is_answered_drained_once_all_is_quiet() -> None:
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    room.begin()
    assert sent(room.say(abort())) == []
    assert "decode gave up: engine" in str(room.machine.error)
    assert sent(room.say(abort())) == []
    assert sent(room.say(Wrote(A))) == [Drained]


@pytest.mark.parametrize("event", [Lost(D[0], PeerLostError("silent")), Gone(D[0])], ids=str)
@pytest.mark.parametrize("busy", [False, True])
def test_a_lost_peer_ends_the_flow_once_our_own_memory_is_quiet(event: object, busy: bool) -> None:
    """Whatever became of the peer, a posted write reads our memory."""
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    if busy:
        room.begin()
    assert sent(room.say(event)) == []
    assert isinstance(room.machine.error, PeerLostError)
    assert state(room) is (Sending.ABORTING if busy else Sending.CLOSED)
    if busy:
        assert room.say(event) == []
        assert state(room) is Sending.ABORTING
        assert room.say(Quiet(A)) == []
        assert state(room) is Sending.CLOSED


def test_the_end_of_the_peer_ends_draining() -> None:
    room = Room(chunks=1)
    room.expect()
    room.machine.cancel(AbortedError("engine"), 0.0)
    assert state(room) is Sending.DRAINING
    room.say(Gone(D[0]))
    assert room.machine.closed


def test_the_end_of_a_peer_that_has_all_changes_nothing() -> None:
    room = finished()
    room.complete()
    assert room.say(Gone(D[0])) == []
    assert state(room) is Sending.COMPLETE


@pytest.mark.parametrize("made", ["moving", "draining", "finished"])
def test_expect_is_answered_in_every_state(made: str) -> None:
    room = finished() if made == "finished" else Room()
    if made != "finished":
        room.expect()
    if made == "draining":
        room.machine.cancel(AbortedError("engine"), 0.0)
    expect = Expect(**head(), start=0, stop=8, path="staged", tables=None, tag=b"")
    assert [t.__name__ for t in sent(room.say(expect))] == ["Abort" if made == "draining" else "Expected"]


def test_success_needs_complete_from_every_decode_rank_and_the_agreement() -> None:
    room = Room(chunks=0)
    room.machine.finish(0, None, 0.0)
    room.expect(0, 2)
    assert room.complete(0) == []
    assert phase(room) is Phase.CONNECTING
    room.expect(1, 2)
    assert room.complete(1) == [CastVote(True, "")]
    assert room.machine.cancel(AbortedError("engine"), 0.0) == [CastVote(False, "engine")]
    room.machine.decided(Decided(True, ""), 0.0)
    assert phase(room) is Phase.DONE
    assert room.machine.decided(Decided(False, "late"), 0.0) == []
    assert room.machine.cancel(AbortedError("late"), 0.0) == []
    assert phase(room) is Phase.DONE


def test_the_failure_of_one_flow_fails_the_others() -> None:
    room = Room()
    room.expect(0, 3)
    room.expect(1, 3)
    effects = room.say(abort(), rank=0)
    assert [(e.to, type(e.frame)) for e in only(effects, Send)] == [(D[0], Drained), (D[1], Drained)]
    assert len(only(effects, CastVote)) == 1
    assert phase(room) is Phase.FAILED
    assert sent(room.expect(2, 3)) == [Drained], "a rank that asks after the failure hears of it"
    for rank in range(3):
        room.say(DrainedAck(**head(rank)), rank=rank)
    assert room.machine.closed


def test_a_failure_elsewhere_fails_the_room_though_all_here_is_complete() -> None:
    room = finished()
    room.complete()
    room.machine.decided(Decided(False, "rank 1 lost its peer"), 0.0)
    assert "another rank failed: rank 1 lost its peer" in str(room.machine.error)
    assert room.machine.closed


def test_a_complete_flow_answers_a_late_abort_with_drained() -> None:
    room = finished()
    room.complete()
    assert sent(room.say(abort())) == [Drained]
    assert phase(room) is Phase.MOVING


def test_a_rank_that_gives_up_before_it_expected_fails_the_room() -> None:
    room = Room()
    effects = room.machine.decline(D[0], Generation(5), abort(), 0.0)
    assert sent(effects) == [Drained]
    assert phase(room) is Phase.FAILED


def test_a_rank_that_cannot_be_served_fails_the_room_and_hears_so() -> None:
    room = Room()
    effects = room.machine.refuse(D[0], Generation(5), AbortedError("no path"), 0.0)
    assert sent(effects) == [Drained]
    assert str(room.machine.error) == "no path"


def test_decode_instances_of_different_sizes_fail_the_room() -> None:
    room = Room()
    room.expect(0, 2)
    room.expect(1, 3)
    assert isinstance(room.machine.error, RemoteProtocolError)
    assert "decode instances of 2 and 3 ranks" in str(room.machine.error)


@pytest.mark.parametrize("early", [True, False])
def test_a_row_that_fits_no_slot_fails_the_room_with_the_sizes(early: bool) -> None:
    room = Room(chunks=1 if early else 0)
    effects = room.expect(given=plan(slot_bytes=100))
    if not early:
        effects = room.add(4)
    assert isinstance(room.machine.error, OversizeError)
    assert (room.machine.error.asked, room.machine.error.capacity) == (128, 100)
    assert sent(effects) == [Drained]


def test_pages_are_released_when_nothing_reads_them() -> None:
    room = Room()
    room.machine.reads = 1
    room.machine.cancel(AbortedError("engine"), 0.0)
    assert (phase(room), room.machine.released, room.machine.closed) == (Phase.FAILED, False, False)
    room.machine.reads = 0
    assert (room.machine.released, room.machine.closed) == (True, True)


def test_the_deadline_names_who_is_missing() -> None:
    room = Room()
    room.expect(0, 2)
    assert room.machine.next_at() == 0.2
    room.machine.tick(300.0)
    assert isinstance(room.machine.error, DeadlineError)
    assert str(room.machine.error) == (
        "room r: not complete within 300 s: 1 of 2 decode ranks asked for it; "
        "epoch 00000000000000000000000000000000 is moving"
    )
    alone = Room()
    assert alone.machine.next_at() == 300.0
    alone.machine.tick(300.0)
    assert "0 of unknown decode ranks asked for it" in str(alone.machine.error)


def test_after_its_end_the_engine_changes_nothing() -> None:
    room = Room()
    room.machine.cancel(AbortedError("engine"), 0.0)
    assert room.add(12) == room.machine.finish(12, None, 0.0) == room.ready(3) == []
    assert room.machine.rows.chunks == []


def test_calls_out_of_order_are_the_callers_error() -> None:
    room = Room()
    with pytest.raises(LocalProtocolError, match="finish at row 9, but chunks end at 8"):
        room.machine.finish(9, None, 0.0)
    room.machine.finish(8, None, 0.0)
    with pytest.raises(LocalProtocolError, match="finished at row 8 already"):
        room.machine.finish(8, None, 0.0)
    with pytest.raises(LocalProtocolError, match="rows up to 12 after it was finished at 8"):
        room.add(12)
