"""A room on a prefill rank, rule by rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest

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
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import Epoch, Generation, GroupId, LayerId, Rank, RoomId
from disagg_kv.planning import Intake, Segment
from disagg_kv.protocol import (
    Decided,
    Effect,
    FlowPlan,
    Gone,
    Lost,
    Options,
    Phase,
    Quiet,
    RoomFrame,
    Send,
    Sending,
    SendRoom,
    Transfer,
    Vote,
    WriteFailed,
    Wrote,
)
from disagg_kv.protocol.frames import (
    Abort,
    AbortAck,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Grant,
    Head,
    Landed,
    Queued,
    Return,
    Returned,
    StagingRequest,
)
from disagg_kv.protocol.sending import WRITE_TRIES

ME = Epoch(bytes([9] * 16))
D = [Epoch(bytes([r] * 16)) for r in range(3)]
SPEC = CacheSpec.kv(2, 2, 64, "int8")
INTAKE = Intake.build(SPEC, [shard(SPEC, tp=2, rank=r) for r in range(2)], shard(SPEC))
ALL = GroupId("all")
TABLES = {ALL: PageTable(ALL, np.arange(4, dtype=np.int32))}
A, B = Segment(0, 4, 0, 2), Segment(4, 8, 0, 2)
E_ = TypeVar("E_")
RETRY = TransportError("busy", retryable=True)
FINAL = TransportError("no route")


def plan(*, exposed: bool = False, start: int = 0, stop: int | None = 8, slot_bytes: int = 4096) -> FlowPlan:
    return FlowPlan(Rank(0), INTAKE, start, stop, exposed, slot_bytes, 8192, 4)


def head(rank: int = 0) -> Head:
    return Head(src=D[rank], dst=ME, room=b"r", generation=5)


def box(s: Segment) -> tuple[int, int, int, int, bool]:
    return (s.start, s.stop, s.first, s.last, s.state)


def grant(s: Segment = A, nbytes: int = 1024, rank: int = 0, ask: int = 0) -> Grant:
    return Grant(**head(rank), segment=box(s), ask=ask, lease=s.start, offset=s.start * 100, nbytes=nbytes)


def landed(s: Segment = A) -> Landed:
    return Landed(**head(), segment=box(s))


def abort(rank: int = 0) -> Abort:
    return Abort(**head(rank), reason="engine")


class Room:
    """A room; ``chunks`` of four rows are there before decode asks."""

    def __init__(self, *, chunks: int = 2, ready: bool = True, window: int = 16) -> None:
        self.turns = 0
        self.machine = SendRoom(RoomId(b"r"), Generation(1), ME, Options(window=window), 0.0, 300.0)
        for i in range(chunks):
            self.add(4 * i + 4, ready=ready)

    def add(self, stop: int, *, ready: bool = True, first: int = 0, start: int | None = None) -> list[Effect]:
        tables = {ALL: PageTable(ALL, np.arange(4, dtype=np.int32), first)}
        self.turns += 1
        start = self.machine.rows.stop if start is None else start
        return self.machine.add(self.turns, start, stop, tables, ready=ready, now=0.0)

    def ready(self, turn: int, layers: set[LayerId] | None = None) -> list[Effect]:
        return self.machine.ready(turn, layers, 0.0)

    def expect(self, rank: int = 0, world: int = 1, given: FlowPlan | None = None) -> list[Effect]:
        return self.machine.expect(D[rank], Generation(5), given or plan(), world, 0.0)

    def say(self, *events: object, rank: int = 0) -> list[Effect]:
        out: list[Effect] = []
        for event in events:
            out += self.machine.handle(D[rank], event, 0.0)
            self.machine.check_integrity()
        return out

    def begin(self, s: Segment = A, rank: int = 0, lease: int | None = -1) -> bool:
        return self.machine.flows[D[rank]].begin(Transfer(D[rank], s, None, 0, s.start if lease == -1 else lease))

    def write(self, s: Segment = A) -> list[Effect]:
        """From grant to notice."""
        self.say(grant(s))
        assert self.begin(s)
        return self.say(Wrote(s))

    def complete(self, rank: int = 0) -> list[Effect]:
        return self.say(Complete(**head(rank)), rank=rank)


def state(room: Room, rank: int = 0) -> Sending:
    return room.machine.flows[D[rank]].state


def phase(room: Room) -> Phase:
    return room.machine.phase


def only(effects: Sequence[Effect], kind: type[E_]) -> list[E_]:
    return [e for e in effects if isinstance(e, kind)]


def frames(effects: Sequence[Effect], kind: type[E_]) -> list[E_]:
    return [e.frame for e in effects if isinstance(e, Send) and isinstance(e.frame, kind)]


def sent(effects: Sequence[Effect]) -> list[type[RoomFrame]]:
    return [type(e.frame) for e in effects if isinstance(e, Send) and isinstance(e.frame, RoomFrame)]


def transfers(effects: Sequence[Effect]) -> list[Segment]:
    return [t.segment for t in only(effects, Transfer)]


def finished() -> Room:
    """All is acknowledged, nothing agreed."""
    room = Room()
    room.expect()
    for s in (A, B):
        room.write(s)
        room.say(landed(s))
    room.machine.finish(8, b"aux", b"tag", 0.0)
    return room


# How it goes.


def test_a_room_from_its_opening_to_its_end() -> None:
    room = Room(chunks=0)
    assert phase(room) is Phase.CONNECTING
    assert room.expect() == []
    assert phase(room) is Phase.READY
    (request,) = frames(room.add(4), StagingRequest)
    assert (request.segment, request.ready) == ((0, 4, 0, 2, False), True)
    assert phase(room) is Phase.MOVING
    assert only(room.say(grant()), Transfer) == [Transfer(D[0], A, 0, 1024, 0)]
    assert room.begin()
    (notice,) = frames(room.say(Wrote(A)), ChunkReady)
    assert (notice.segment, notice.lease) == ((0, 4, 0, 2, False), 0)
    assert room.say(landed()) == []
    (done,) = frames(room.machine.finish(4, b"aux", b"tag", 0.0), Done)
    assert (done.stop, done.aux, done.tag) == (4, b"aux", b"tag")
    assert room.complete() == [Vote(True, "")]
    assert not room.machine.released
    assert room.machine.decided(Decided(True, ""), 0.0) == []
    assert (phase(room), room.machine.released, room.machine.closed) == (Phase.DONE, True, True)
    assert room.machine.next_at() is None


def test_rows_that_decode_holds_or_does_not_await_are_not_sent() -> None:
    room = Room()
    (request,) = frames(room.expect(given=plan(start=4, stop=6)), StagingRequest)
    assert request.segment == (4, 6, 0, 2, False)
    room = Room(chunks=1)
    room.machine.finish(4, None, b"", 0.0)
    assert sent(room.expect(given=plan(start=4, stop=4))) == [Done]


def test_a_rank_that_was_not_elected_says_done_only() -> None:
    """Both replicas hold the latent; of a single layer and row one of them sends nothing."""
    latent = CacheSpec.mla(1, 64, "int8")
    intake = Intake.build(latent, [shard(latent), shard(latent)], shard(latent))
    idle = next(Rank(r) for r in (0, 1) if not intake.part_bytes(Segment(0, 1, 0, 1), Rank(r)))
    room = Room(chunks=0)
    room.add(1)
    assert room.expect(given=FlowPlan(idle, intake, 0, 1, False, 4096, 8192, 4)) == []
    assert sent(room.machine.finish(1, None, b"", 0.0)) == [Done]


def test_requests_notices_and_done_are_repeated_until_answered() -> None:
    """E2."""
    room = Room(chunks=1)
    room.expect()
    assert sent(room.machine.tick(0.2)) == [StagingRequest]
    room.say(Queued(**head(), segment=box(A)), grant())
    assert room.machine.tick(5.0) == []
    room.begin()
    room.say(Wrote(A))
    assert sent(room.machine.tick(6.0)) == [ChunkReady]
    room.say(landed())
    room.machine.finish(4, None, b"", 6.0)
    assert sent(room.machine.tick(7.0)) == [Done]


def test_the_window_bounds_what_is_under_way() -> None:
    room = Room(window=1)
    assert len(frames(room.expect(), StagingRequest)) == 1
    room.write()
    assert [f.segment for f in frames(room.say(landed()), StagingRequest)] == [box(B)]


def test_a_request_that_is_answered_landed_is_over() -> None:
    """E4."""
    room = Room(chunks=1)
    room.expect()
    room.say(landed())
    assert sent(room.machine.finish(4, None, b"", 0.0)) == [Done]


@pytest.mark.parametrize(
    "event", [grant(Segment(5, 5, 0, 0)), landed(Segment(5, 5, 0, 0)), grant(B), landed(B)], ids=str
)
def test_answers_about_unknown_segments_only_count(event: object) -> None:
    room = Room(chunks=1)
    room.expect()
    assert room.say(event) == []
    assert room.machine.flows[D[0]].ignored == 1


def test_a_repeated_grant_or_acknowledgement_moves_nothing_twice() -> None:
    """E3, E5."""
    room = Room(chunks=1)
    room.expect()
    assert transfers(room.say(grant(), grant())) == [A]
    assert room.begin()
    assert not room.begin()
    assert room.say(grant(), landed()) == []
    assert sent(room.say(Wrote(A), grant())) == [ChunkReady]
    room.say(landed(), landed())
    flow = room.machine.flows[D[0]]
    assert (flow.segments_landed, flow.bytes_landed) == (1, 1024)


def test_a_grant_of_another_size_fails_the_room_by_name() -> None:
    room = Room()
    room.expect()
    effects = room.say(grant(nbytes=7))
    assert isinstance(room.machine.error, RemoteProtocolError)
    assert "granted 7 bytes for 1024 of Segment(start=0" in str(room.machine.error)
    assert Drained in sent(effects)


def test_exposed_pages_need_no_lease() -> None:
    room = Room(chunks=1)
    assert only(room.expect(given=plan(exposed=True)), Transfer) == [Transfer(D[0], A, None, 1024, None)]
    assert room.begin(lease=None)
    assert [f.lease for f in frames(room.say(Wrote(A)), ChunkReady)] == [None]


def test_exposed_pages_wait_for_rows_that_are_not_computed() -> None:
    room = Room(chunks=1, ready=False)
    assert room.expect(given=plan(exposed=True)) == []
    assert transfers(room.ready(1)) == [A]


def test_look_ahead_asks_early_and_says_again_when_the_rows_are_computed() -> None:
    room = Room(ready=False)
    assert [f.ready for f in frames(room.expect(), StagingRequest)] == [False, False]
    assert transfers(room.say(grant(A))) == []
    assert transfers(room.ready(1)) == [A]
    effects = room.ready(2)
    assert [(f.segment, f.ready) for f in frames(effects, StagingRequest)] == [(box(B), True)]


def test_withdrawn_pages_are_not_read_until_they_are_given_again() -> None:
    room = Room()
    room.expect(given=plan(exposed=True))
    room.machine.withdraw(0.0)
    assert not room.begin(A, lease=None)
    assert transfers(room.add(4, start=0)) == [A]
    assert not room.begin(B, lease=None), "its rows are beyond the pages that are there again"
    assert room.begin(A, lease=None)
    assert room.add(8, start=4, first=8) == [], "its rows are before the pages"
    assert transfers(room.add(8, start=4, first=4)) == [B]
    assert room.begin(B, lease=None)


def test_what_was_granted_for_withdrawn_pages_goes_back() -> None:
    """E12: a preempted room holds no bytes of the ring; it says so until that is known, and asks afresh."""
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    (back,) = frames(room.machine.withdraw(0.0), Return)
    assert (back.segment, back.ask) == (box(A), 0)
    assert not room.begin()
    assert sent(room.machine.tick(0.2)) == [Return]
    assert room.say(grant()) == [], "a late grant is of what was given back"
    assert room.say(Returned(**head(), segment=box(A), ask=0)) == []
    assert room.machine.tick(9.0) == []
    (request,) = frames(room.add(4, start=0), StagingRequest)
    assert (request.ask, request.ready) == (1, True)
    assert room.say(grant()) == []
    assert transfers(room.say(grant(ask=1))) == [A]
    assert room.begin()


def test_a_new_request_says_that_the_last_grant_went_back() -> None:
    """The answer to an earlier ``Return`` does not end the repetition of a later one."""
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    room.machine.withdraw(0.0)
    room.add(4, start=0)
    assert sent(room.machine.tick(0.2)) == [StagingRequest]
    room.say(grant(ask=1))
    assert [f.ask for f in frames(room.machine.withdraw(0.3), Return)] == [1]
    room.say(Returned(**head(), segment=box(A), ask=0), Returned(**head(), segment=box(B), ask=0))
    assert sent(room.machine.tick(1.0)) == [Return]
    assert room.machine.flows[D[0]].ignored == 2


def test_a_grant_that_comes_after_the_withdrawal_goes_back_at_once() -> None:
    room = Room(chunks=1)
    room.expect()
    assert room.machine.withdraw(0.0) == []
    assert sent(room.say(grant())) == [Return]


def test_a_write_that_fails_after_the_withdrawal_is_not_tried_from_pages_that_are_gone() -> None:
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    assert room.begin()
    assert room.machine.withdraw(0.0) == []
    assert sent(room.say(WriteFailed(A, RETRY, True))) == [Return]


def test_a_transfer_of_an_earlier_lease_has_become_void() -> None:
    """The mover may still hold it when the part is granted afresh."""
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    room.machine.withdraw(0.0)
    room.add(4, start=0)
    room.say(Grant(**head(), segment=box(A), ask=1, lease=77, offset=0, nbytes=1024))
    assert not room.begin(lease=0)
    assert room.begin(lease=77)


def test_events_of_chunks_may_happen_in_any_order() -> None:
    """Each call that hands rows over is final by itself; one from before a withdrawal says nothing."""
    room = Room(ready=False)
    room.expect(given=plan(exposed=True))
    assert transfers(room.ready(2)) == [B]
    room.machine.withdraw(0.0)
    assert room.ready(1) == []
    assert room.add(8, start=0, ready=False) == []
    assert room.ready(2) == []
    assert transfers(room.ready(3)) == [A, B]


def test_rows_that_came_by_two_calls_are_final_when_both_are() -> None:
    room = Room(chunks=0)
    room.add(8, ready=False)
    room.expect(given=plan(exposed=True))
    room.machine.withdraw(0.0)
    room.add(2, start=0, ready=False)
    room.add(8, start=2, ready=False)
    assert room.ready(3) == []
    assert len(transfers(room.ready(2))) == 1


def test_a_segment_is_final_when_all_its_layers_are() -> None:
    """B1."""
    room = Room(chunks=1, ready=False)
    room.expect(given=plan(exposed=True))
    assert room.ready(1, {LayerId(1)}) == []
    room.machine.tick(300.0)
    assert "rows 0-4 never became final in layers [0]" in str(room.machine.error)
    room = Room(chunks=1, ready=False)
    room.expect(given=plan(exposed=True))
    room.ready(1, {LayerId(1)})
    assert transfers(room.ready(1, {LayerId(0)})) == [A]


def test_rows_that_are_known_are_not_added_twice() -> None:
    room = Room()
    assert frames(room.expect(), StagingRequest) != []
    assert room.add(8, start=4) == room.add(4, start=0) == []
    assert room.machine.rows.stop == 8


# What goes wrong.


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
    assert room.machine.error is RETRY
    assert sent(effects) == [Drained]
    assert [v.ok for v in only(effects, Vote)] == [False]


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
    """E1: a failed write that may still be under way is waited for, and so is one that has not ended."""
    room = Room()
    room.expect()
    room.say(grant(A), grant(B))
    assert room.begin(A)
    assert room.begin(B)
    assert sent(room.say(WriteFailed(A, RETRY, False))) == [Abort]
    assert state(room) is Sending.ABORTING
    assert not room.begin(B)
    assert sent(room.machine.tick(0.2)) == [Abort]
    assert room.say(AbortAck(**head())) == []
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
    """E1: whatever became of the peer, a posted write reads our memory."""
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


@pytest.mark.parametrize("made", ["moving", "draining", "finished"])
def test_expect_is_answered_in_every_state(made: str) -> None:
    room = finished() if made == "finished" else Room()
    if made != "finished":
        room.expect()
    if made == "draining":
        room.machine.cancel(AbortedError("engine"), 0.0)
    expect = Expect(**head(), start=0, stop=8, paths=("staged",), tables=None, tag=b"")
    assert [t.__name__ for t in sent(room.say(expect))] == ["Abort" if made == "draining" else "Expected"]


# The room as a whole.


def test_success_needs_complete_from_every_decode_rank_and_the_agreement() -> None:
    """C8."""
    room = Room(chunks=0)
    room.machine.finish(0, None, b"", 0.0)
    room.expect(0, 2)
    assert room.complete(0) == []
    assert phase(room) is Phase.CONNECTING
    room.expect(1, 2)
    assert room.complete(1) == [Vote(True, "")]
    assert room.machine.cancel(AbortedError("engine"), 0.0) == [Vote(False, "engine")]
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
    assert len(only(effects, Vote)) == 1
    assert phase(room) is Phase.FAILED
    assert sent(room.expect(2, 3)) == [Drained], "a rank that asks after the failure hears of it"
    for rank in range(3):
        room.say(DrainedAck(**head(rank)), rank=rank)
    assert room.machine.closed


def test_a_failure_elsewhere_fails_the_room_though_all_here_is_complete() -> None:
    """E16."""
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
        "room 72: not complete within 300 s: 1 of 2 decode ranks asked for it; 00000000 is moving"
    )
    alone = Room()
    assert alone.machine.next_at() == 300.0
    alone.machine.tick(300.0)
    assert "0 of unknown decode ranks asked for it" in str(alone.machine.error)


def test_after_its_end_the_engine_changes_nothing() -> None:
    room = Room()
    room.machine.cancel(AbortedError("engine"), 0.0)
    assert room.add(12) == room.machine.finish(12, None, b"", 0.0) == room.ready(3) == []
    assert room.machine.rows.chunks == []


def test_calls_out_of_order_are_the_callers_error() -> None:
    room = Room()
    with pytest.raises(LocalProtocolError, match="finish at row 9, but chunks end at 8"):
        room.machine.finish(9, None, b"", 0.0)
    room.machine.finish(8, None, b"", 0.0)
    with pytest.raises(LocalProtocolError, match="finished at row 8 already"):
        room.machine.finish(8, None, b"", 0.0)
    with pytest.raises(LocalProtocolError, match="rows up to 12 after it was finished at 8"):
        room.add(12)
