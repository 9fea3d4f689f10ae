"""A room on a decode rank, rule by rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from disagg_kv.errors import (
    AbortedError,
    DeadlineError,
    DisaggKVError,
    IntegrityError,
    PeerLostError,
    RemoteProtocolError,
)
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Epoch, Generation, Rank, RoomId, VirtualOffset
from disagg_kv.planning import Intake, Segment
from disagg_kv.protocol import (
    Awaited,
    Cancel,
    Decided,
    Effect,
    Free,
    Gone,
    Introduced,
    Leased,
    Lost,
    Options,
    Phase,
    Quarantine,
    ReceiveRoom,
    Receiving,
    Reserve,
    RoomFrame,
    Scatter,
    Scattered,
    Send,
    Store,
    Tick,
    Vote,
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
    Expected,
    Grant,
    Head,
    Landed,
    Queued,
    Return,
    Returned,
    StagingRequest,
    WireTable,
)
from disagg_kv.protocol.wire import segment_to_wire
from disagg_kv.staging import Lease

ME = Epoch(bytes([9] * 16))
P = [Epoch(bytes([r] * 16)) for r in range(3)]
SPEC = CacheSpec.kv(2, 2, 64, "int8")
INTAKE = Intake.build(SPEC, [shard(SPEC, tp=2, rank=r) for r in range(2)], shard(SPEC))
TABLES = (WireTable("all", 0, bytes(8)),)
A, B = Segment(0, 4, 0, 2), Segment(4, 8, 0, 2)
LEASE = Lease(VirtualOffset(70000), 2048, 65536)
OTHER_LEASE = Lease(VirtualOffset(75008), 2048, 65536)
E_ = TypeVar("E_")


def head(rank: int) -> Head:
    return Head(src=P[rank], dst=ME, room=b"r", generation=1)


def request(rank: int, s: Segment = A, *, ready: bool = True, path: str = "staged", ask: int = 0) -> StagingRequest:
    return StagingRequest(**head(rank), segment=segment_to_wire(s), ask=ask, ready=ready, path=path)


def back(rank: int, ask: int = 0, s: Segment = A) -> Return:
    return Return(**head(rank), segment=segment_to_wire(s), ask=ask)


def chunk(rank: int, s: Segment = A, lease: Lease | None = LEASE) -> ChunkReady:
    start = None if lease is None else lease.start
    return ChunkReady(**head(rank), segment=segment_to_wire(s), lease=start)


def done(rank: int, stop: int = 8, *, aux: bytes | None = None, tag: bytes = b"tag") -> Done:
    return Done(**head(rank), stop=stop, aux=aux, tag=tag)


def abort(rank: int) -> Abort:
    return Abort(**head(rank), reason="engine")


def drained(rank: int) -> Drained:
    return Drained(**head(rank), reason="engine")


class Room:
    """A room and what came out of it last."""

    def __init__(self, *, stop: int | None = 8, exposed: bool = False, begun: bool = True, window: int = 16) -> None:
        self.machine = ReceiveRoom(RoomId(b"r"), Generation(1), ME, Options(window=window), 0.0, 300.0)
        self.awaited = Awaited(0, stop, 12, ("staged", "direct"), TABLES if exposed else None, b"tag")
        self.introduced = Introduced((P[0], P[1]), INTAKE)
        if begun:
            self.say(self.awaited, self.introduced)

    def say(self, *events: object, now: float = 0.0) -> list[Effect]:
        out: list[Effect] = []
        for event in events:
            out += self.machine.handle(event, now)
            self.machine.check_integrity()
        return out

    def lease(self, s: Segment = A, lease: Lease = LEASE) -> list[Effect]:
        """Both writers ask, the ring grants."""
        return self.say(request(0, s), request(1, s), Leased(s, lease))

    def land(self, s: Segment = A, lease: Lease = LEASE) -> None:
        self.lease(s, lease)
        self.say(chunk(0, s, lease), chunk(1, s, lease), Scattered(s))

    def landed(self) -> None:
        self.land(A)
        self.land(B)
        self.say(done(0, aux=b"zero"), done(1, aux=b"one"))
        assert self.machine.state is Receiving.LANDED


def state_of(room: Room) -> Receiving:
    return room.machine.state


def phase_of(room: Room) -> Phase:
    return room.machine.phase


def released(room: Room) -> bool:
    return room.machine.released


def only(effects: Sequence[Effect], kind: type[E_]) -> list[E_]:
    return [e for e in effects if isinstance(e, kind)]


def sent(effects: Sequence[Effect]) -> list[tuple[int, type[RoomFrame]]]:
    return [(P.index(e.to), type(e.frame)) for e in effects if isinstance(e, Send) and isinstance(e.frame, RoomFrame)]


def failed(room: Room, kind: type[DisaggKVError], *words: str) -> None:
    assert phase_of(room) is Phase.FAILED
    assert type(room.machine.error) is kind
    for word in words:
        assert word in str(room.machine.error)


@pytest.mark.parametrize("order", [1, -1])
def test_a_room_begins_when_wishes_and_writers_are_known_in_any_order(order: int) -> None:
    room = Room(begun=False)
    assert phase_of(room) is Phase.CONNECTING
    first, second = (room.awaited, room.introduced)[::order]
    assert room.say(first) == []
    assert phase_of(room) is (Phase.CONNECTING if order == 1 else Phase.READY)
    assert sent(room.say(second)) == [(0, Expect), (1, Expect)]
    assert phase_of(room) is Phase.MOVING
    assert room.machine.writers == (P[0], P[1])


def test_expect_is_repeated_to_each_rank_until_it_is_expected_and_not_only_parked() -> None:
    """E2."""
    room = Room()
    room.say(Expected(**head(0), parked=True), Expected(**head(1), parked=False))
    assert room.machine.next_at() == 0.2
    assert sent(room.say(Tick(), now=0.2)) == [(0, Expect)]
    room.say(Expected(**head(0), parked=False))
    assert room.machine.next_at() == 300.0


def test_frames_of_strangers_and_frames_before_the_beginning_only_count() -> None:
    room = Room(begun=False)
    assert room.say(request(0), chunk(0), done(0), abort(0), drained(0), Expected(**head(0), parked=False)) == []
    room.say(room.introduced)
    assert room.say(request(0), chunk(0), done(0), Expected(**head(0), parked=False)) == []
    room.say(room.awaited)
    assert room.say(request(2), abort(2)) == []
    assert room.machine.ignored == 12


def test_distinct_writers_are_counted_and_a_repeated_notice_is_only_acknowledged() -> None:
    """E3."""
    room = Room()
    room.lease()
    assert sent(room.say(chunk(0))) == [(0, Landed)]
    assert room.say(chunk(0)) == room.say(chunk(0)) != []
    effects = room.say(chunk(1))
    assert only(effects, Scatter) == [Scatter(A, {Rank(0): 70000 - 65536, Rank(1): 70000 - 65536 + 1024})]
    assert only(room.say(chunk(1), chunk(0)), Scatter) == []
    assert only(room.say(Scattered(A)), Free) == [Free(A)]
    assert (room.machine.segments_landed, room.machine.bytes_landed) == (1, 2048)
    assert sent(room.say(chunk(0), chunk(1))) == [(0, Landed), (1, Landed)]
    assert room.machine.segments_landed == 1


def test_a_request_reserves_once_for_the_first_asker_and_grants_each_its_part() -> None:
    room = Room()
    assert room.say(request(0, ready=False)) == [Reserve(P[0], A, 2048, False)]
    assert only(room.say(request(1)), Reserve) == [Reserve(P[0], A, 2048, True)]
    grants = [s.frame for s in only(room.say(Leased(A, LEASE)), Send)]
    places = [(g.dst, g.lease, g.offset, g.nbytes) for g in grants if isinstance(g, Grant)]
    assert places == [(P[0], 70000, 4464, 1024), (P[1], 70000, 5488, 1024)]


def test_a_lost_grant_is_given_again_for_the_same_lease() -> None:
    """E2, E4: a repeated request is queued or gets its live lease, never a second one."""
    room = Room()
    room.say(request(0))
    effects = room.say(request(0))
    assert sent(effects) == [(0, Queued)]
    assert len(only(effects, Reserve)) == 1
    room.say(Leased(A, LEASE))
    again = room.say(request(0))
    assert sent(again) == [(0, Grant)]
    assert only(again, Reserve) == []
    assert sent(room.say(request(1))) == [(1, Grant)]


def test_look_ahead_that_became_ready_is_promoted() -> None:
    room = Room()
    room.say(request(0, ready=False))
    assert only(room.say(request(0, ready=True)), Reserve) == [Reserve(P[0], A, 2048, True)]


def test_a_lease_that_all_its_askers_give_back_is_free_and_is_asked_for_afresh() -> None:
    """E12: the ring gets the bytes of a preempted room back as soon as nobody has them."""
    room = Room()
    room.lease()
    effects = room.say(back(0))
    assert (sent(effects), only(effects, Free)) == ([(0, Returned)], [])
    effects = room.say(back(1))
    assert (sent(effects), only(effects, Free)) == ([(1, Returned)], [Free(A)])
    again = request(0, ready=False, ask=1)
    assert only(room.say(again), Reserve) == [Reserve(P[0], A, 2048, False)]
    room.say(request(1, ask=1), Leased(A, OTHER_LEASE), chunk(0, lease=OTHER_LEASE))
    assert only(room.say(chunk(1, lease=OTHER_LEASE)), Scatter) != []


def test_what_another_writer_has_written_is_kept() -> None:
    room = Room()
    room.lease()
    room.say(chunk(1))
    assert only(room.say(back(0)), Free) == []
    grants = [s.frame for s in only(room.say(request(0, ask=1)), Send) if isinstance(s.frame, Grant)]
    assert [(g.ask, g.lease) for g in grants] == [(1, 70000)]
    assert only(room.say(chunk(0)), Scatter) != []


def test_late_and_repeated_returns_and_requests_change_nothing() -> None:
    """E4: a request that was given back leaks no lease, and a ``Return`` of the past frees none."""
    room = Room()
    room.lease()
    room.say(back(0))
    assert room.say(request(0)) == []
    assert sent(room.say(back(0))) == [(0, Returned)]
    room.say(request(0, ask=1))
    assert room.say(request(0)) == []
    room.say(back(0), back(1))
    assert sent(room.say(request(0, ask=1))) == [(0, Grant)]
    room.say(chunk(0))
    assert sent(room.say(back(0, 1), back(0, 0, B))) == [(0, Returned), (0, Returned)]
    assert phase_of(room) is Phase.MOVING
    assert room.say(request(1, ask=1), chunk(1)) != []


def test_what_was_given_back_needs_no_evidence() -> None:
    room = Room()
    room.lease()
    room.say(back(0), back(1))
    assert only(room.say(Cancel(AbortedError("engine"))), Quarantine) == []
    assert room.say(back(0)) == []


@pytest.mark.parametrize("when", ["arrived", "scattered", "landed", "closed"])
def test_a_late_request_for_what_has_landed_is_answered_without_a_lease(when: str) -> None:
    """E4: a late request leaks no lease."""
    room = Room()
    if when == "arrived":
        room.lease()
        room.say(chunk(0))
    elif when == "scattered":
        room.land()
    else:
        room.landed()
    if when == "closed":
        room.say(Decided(True, ""))
        assert room.say(request(0)) == []
    else:
        assert sent(effects := room.say(request(0))) == [(0, Landed)]
        assert only(effects, Reserve) == []


def test_done_alone_proves_nothing() -> None:
    room = Room()
    room.say(done(0), done(0), done(1))
    failed(room, RemoteProtocolError, "prefill is done", "layers range(0, 2) are not complete")


def test_a_rank_succeeds_when_all_has_landed_all_are_done_and_all_ranks_agree() -> None:
    """C8: the engine sees no success before the instance agrees."""
    room = Room()
    room.land(A)
    room.lease(B)
    room.say(chunk(0, B), chunk(1, B))
    assert room.say(done(0, aux=b"zero"), done(1, aux=b"one")) == []
    effects = room.say(Scattered(B))
    assert only(effects, Store) == [Store(b"zero")]
    assert only(effects, Vote) == [Vote(True, "")]
    assert (phase_of(room), room.machine.released, state_of(room)) == (Phase.MOVING, False, Receiving.LANDED)
    assert sent(room.say(Decided(True, ""))) == [(0, Complete), (1, Complete)]
    assert (phase_of(room), room.machine.released) == (Phase.DONE, True)
    assert room.machine.next_at() is None


def test_aux_of_the_lowest_rank_wins_whoever_comes_first() -> None:
    room = Room(stop=0)
    assert only(room.say(done(1, aux=b"one"), done(0, aux=b"zero")), Store) == [Store(b"zero")]
    assert only(Room(stop=0).say(done(1, aux=b"one"), done(0)), Store) == [Store(b"one")]
    assert only(Room(stop=0).say(done(1), done(0)), Store) == []


def test_prefill_names_the_end_where_decode_left_it_open() -> None:
    room = Room(stop=None)
    room.land(A)
    assert only(room.say(done(1, stop=4), done(0, stop=4)), Vote) == [Vote(True, "")]


@pytest.mark.parametrize(
    ("stop", "events", "words"),
    [
        (8, [done(0, stop=7)], ["ends at row 7, not at 8"]),
        (None, [done(0, stop=13)], ["ends at row 13; pages are there for 0-12"]),
        (None, [done(0, stop=4), done(1, stop=8)], ["end at different rows: [4, 8]"]),
        (8, [request(0, Segment(6, 10, 0, 2))], ["rows 6-10 outside 0-8"]),
        (None, [request(0, Segment(10, 14, 0, 2))], ["rows 10-14 outside 0-12"]),
        (8, [request(0, Segment(0, 4, 0, 3))], ["layers [0, 3)"]),
        (8, [request(0, A), request(1, Segment(2, 6, 0, 2))], ["overlaps another segment"]),
        (8, [request(0, Segment(4, 4, 0, 2))], ["an empty segment"]),
        (8, [request(0, path="slice")], ["rank 0 must not use path 'slice'"]),
        (8, [request(0), request(0, path="direct")], ["rank 0 must not use path 'direct'"]),
        (8, [chunk(0, A, None)], ["rank 0 wrote to pages that were not exposed"]),
        (8, [request(0), chunk(0)], ["rank 0 used lease 70000"]),
        (8, [request(0), Leased(A, LEASE), chunk(0, A, OTHER_LEASE)], ["used lease 75008"]),
        (8, [request(0), Leased(A, LEASE), chunk(1)], ["rank 1 used lease 70000"]),
    ],
)
def test_what_a_peer_must_not_do_fails_the_room_by_name(
    stop: int | None, events: list[object], words: list[str]
) -> None:
    room = Room(stop=stop)
    effects = room.say(*events)
    failed(room, RemoteProtocolError, "room 72 generation 1", *words)
    assert sent(effects)[-2:] == [(0, Abort), (1, Abort)]


def test_a_segment_that_overlaps_what_has_landed_is_refused() -> None:
    room = Room()
    room.land(A)
    room.say(request(0, Segment(0, 8, 0, 2)))
    failed(room, RemoteProtocolError, "overlaps another segment")


def test_a_rank_that_was_not_elected_is_refused_by_name() -> None:
    """Of these two replicas each sends one layer."""
    latent = CacheSpec.mla(2, 64, "int8")
    intake = Intake.build(latent, [shard(latent), shard(latent)], shard(latent))
    other = next(r for r in (0, 1) if Rank(r) not in intake.writers(Segment(0, 4, 0, 1)))
    room = Room(begun=False)
    room.say(room.awaited, Introduced((P[0], P[1]), intake), request(other, Segment(0, 4, 0, 1)))
    failed(room, RemoteProtocolError, f"prefill rank {other} was not elected")


def test_tags_that_differ_are_an_integrity_error_and_one_that_is_missing_is_not() -> None:
    room = Room()
    room.say(done(0, tag=b"\x01"))
    failed(room, IntegrityError, "prefill's tag 01 is not 746167")
    room = Room()
    room.say(done(0, tag=b""))
    assert phase_of(room) is Phase.MOVING


def test_a_writer_above_the_window_waits_and_fails_nothing() -> None:
    """E14: what a room holds of a peer is bounded; a peer with a larger window is only slowed down."""
    room = Room(window=1)
    room.say(request(0, A))
    effects = room.say(request(0, B))
    assert sent(effects) == [(0, Queued)]
    assert only(effects, Reserve) == []
    room.say(request(1, A), Leased(A, LEASE), chunk(0, A))
    assert len(only(room.say(request(0, B)), Reserve)) == 1


def test_a_fast_writer_may_run_far_ahead_of_a_slow_one() -> None:
    room = Room(exposed=True, window=1)
    for row in range(8):
        assert sent(room.say(chunk(0, Segment(row, row + 1, 0, 2), None))) == [(0, Landed)]
    for row in range(8):
        room.say(chunk(1, Segment(row, row + 1, 0, 2), None))
    assert only(room.say(done(0), done(1)), Vote) == [Vote(True, "")]


# Failing.


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
    assert len(only(effects, Vote)) == 1
    told = {rank for rank, frame in sent(effects) if frame is Abort}
    assert told == ({1} if isinstance(event, Drained) else {0, 1})
    assert room.machine.released, "pages are nobody else's: they were not exposed"
    assert {r for r, _ in sent(room.say(Tick(), now=0.3))} <= {0, 1}
    assert sent(room.say(drained(0), drained(1))) == [(0, DrainedAck), (1, DrainedAck)]
    assert state_of(room) is Receiving.CLOSED
    assert room.machine.next_at() is None


def test_a_leased_segment_stays_in_quarantine_until_each_asker_gives_evidence() -> None:
    """E1: silence and loss free nothing."""
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
    """E1."""
    room = Room()
    room.say(request(0), Leased(A, LEASE), Cancel(AbortedError("engine")))
    assert only(room.say(evidence), Free) == [Free(A)]
    assert only(room.say(evidence), Free) == []
    assert state_of(room) is Receiving.DRAINING
    assert sent(room.say(Tick(), now=0.2))[-1] == (1, Abort)


@pytest.mark.parametrize("no_evidence", [chunk(0, A, OTHER_LEASE), chunk(0, B), chunk(0, A, None), chunk(1)], ids=str)
def test_a_late_notice_of_something_else_is_no_evidence(no_evidence: object) -> None:
    """E1."""
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
    """E1: a scatter reads the lease and writes the pages."""
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
    """E1: each writer may write to them until its Done, its Drained or its observed end."""
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
    assert sent(room.say(room.introduced)) == [(0, Abort), (1, Abort)]
    assert room.machine.released, "released is said once"
    room.say(drained(0), drained(1))
    assert state_of(room) is Receiving.CLOSED


def test_exposed_and_staged_writers_may_share_a_segment() -> None:
    room = Room(exposed=True)
    room.say(request(0), Leased(A, LEASE), chunk(1, A, None))
    assert only(room.say(chunk(0)), Scatter) == [Scatter(A, {Rank(0): 4464})]


def test_an_abort_before_the_writers_are_known_is_told_once_they_are_or_ends_if_nobody_comes() -> None:
    room = Room(begun=False)
    room.say(Cancel(AbortedError("engine")))
    assert state_of(room) is Receiving.DRAINING
    room.say(room.awaited, Cancel(AbortedError("again")))
    room.say(Lost(Epoch(b""), PeerLostError("nobody answers")))
    assert (state_of(room), room.machine.released) == (Receiving.CLOSED, True)


def test_a_loss_while_nobody_is_known_fails_the_room() -> None:
    room = Room(begun=False)
    room.say(Lost(Epoch(b""), PeerLostError("nobody answers")))
    failed(room, PeerLostError, "nobody answers")
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
    room.say(done(0), Lost(P[0], PeerLostError("silent")), Gone(P[0]))
    assert phase_of(room) is Phase.MOVING
    assert only(room.say(done(1)), Vote) == [Vote(True, "")]


def test_a_writer_lost_while_all_has_landed_is_not_waited_for_if_the_room_fails_after_all() -> None:
    room = Room()
    room.landed()
    assert room.say(Lost(P[0], PeerLostError("silent"))) == []
    room.say(Decided(False, "rank 1"))
    room.say(drained(1))
    assert state_of(room) is Receiving.CLOSED


@pytest.mark.parametrize(
    ("event", "answer"), [(abort(0), AbortAck), (drained(0), DrainedAck), (Cancel(AbortedError("engine")), None)]
)
def test_doubt_after_landing_asks_the_others_and_the_agreement_stands(
    event: object, answer: type[RoomFrame] | None
) -> None:
    """E16."""
    room = Room()
    room.landed()
    effects = room.say(event)
    assert [v.ok for v in only(effects, Vote)] == [False]
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
    assert sent(room.say(*late, Decided(False, "x"))) == [(0, Abort), (0, Abort), (1, AbortAck)]


def test_the_deadline_names_who_is_missing() -> None:
    room = Room()
    room.say(done(0))
    room.say(Tick(), now=299.0)
    room.say(Tick(), now=300.0)
    failed(room, DeadlineError, "not complete within 300 s", "ranks [1] are not done")
    room = Room(begun=False)
    room.say(Tick(), now=300.0)
    failed(room, DeadlineError, "the prefill ranks were not found")
    assert state_of(room) is Receiving.CLOSED


def test_no_agreement_in_time_is_a_vote_against_and_is_said_again() -> None:
    """E2."""
    room = Room()
    room.landed()
    assert room.say(Tick(), now=299.0) == []
    assert [v.ok for v in only(room.say(Tick(), now=300.0), Vote)] == [False]
    assert room.say(Tick(), now=301.0) == []
    assert [v.ok for v in only(room.say(Tick(), now=600.0), Vote)] == [False]


def test_nothing_is_taken_in_after_the_end() -> None:
    room = Room()
    room.landed()
    room.say(Decided(True, ""))
    assert room.say(Decided(False, "late"), Cancel(AbortedError("late")), Tick(), abort(0), Gone(P[0])) == []
    assert phase_of(room) is Phase.DONE
