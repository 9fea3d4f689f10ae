"""A room on a decode rank, rule by rule."""

from __future__ import annotations

import pytest
from attrs import evolve

from disagg_kv.core import (
    Cancel,
    CastVote,
    Decided,
    Free,
    Introduced,
    Leased,
    Phase,
    Prepare,
    Quarantine,
    Receiving,
    Reserve,
    Scatter,
    Scattered,
    Send,
    Store,
    Tick,
)
from disagg_kv.core.wire.frames import (
    Abort,
    Complete,
    Done,
    Expect,
    Expected,
    Grant,
    Landed,
    Queued,
    Returned,
)
from disagg_kv.errors import (
    AbortedError,
    IntegrityError,
    RemoteProtocolError,
)
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Rank
from disagg_kv.planning import RankPlan, Segment
from tests.support.receive_room import (
    LEASE,
    OTHER_LEASE,
    A,
    B,
    P,
    Room,
    abort,
    back,
    chunk,
    done,
    drained,
    expected,
    failed,
    head,
    only,
    phase_of,
    request,
    sent,
    state_of,
)


@pytest.mark.parametrize("order", [1, -1])
def test_a_room_begins_when_wishes_and_writers_are_known_in_any_order(order: int) -> None:
    room = Room(begun=False)
    assert phase_of(room) is Phase.CONNECTING
    first, second = (room.awaited, room.introduced)[::order]
    assert room.say(first) == []
    assert phase_of(room) is (Phase.CONNECTING if order == 1 else Phase.READY)
    assert sent(room.say(second)) == [(0, Expect), (1, Expect)]
    assert phase_of(room) is Phase.WAITING
    room.say(expected(0), expected(1, parked=True))
    assert phase_of(room) is Phase.WAITING, "rank 1 has not opened the room"
    room.say(expected(1))
    assert phase_of(room) is Phase.MOVING
    room.say(expected(1, parked=True))
    assert phase_of(room) is Phase.MOVING, "a late frame changes nothing"
    assert tuple(room.machine.writers) == (P[0], P[1])


def test_staging_memory_is_refused_where_pages_are_exposed() -> None:
    """The path of a room is decode's to choose."""
    room = Room(exposed=True)
    effects = room.say(request(0))
    failed(room, RemoteProtocolError, "room r generation 1", "rank 0 must not use staging memory: the path is 'direct'")
    assert sent(effects)[-2:] == [(0, Abort), (1, Abort)]


def test_expect_is_repeated_to_each_rank_until_it_is_expected_and_not_only_parked() -> None:
    room = Room()
    room.say(Expected(**head(0), parked=True), Expected(**head(1), parked=False))
    assert room.machine.next_at() == 10.0
    assert sent(room.say(Tick(), now=10.0)) == [(0, Expect)]
    room.say(Expected(**head(0), parked=False))
    assert room.machine.next_at() == 300.0


def test_the_transports_of_the_writers_are_known_from_their_answers() -> None:
    """A repeated answer, or one of a rank whose room is not open yet, adds none."""
    room = Room()
    room.say(Expected(**head(0), parked=False, transport="shm"), Expected(**head(1), parked=True))
    assert room.machine.transport == "shm"
    room.say(Expected(**head(1), parked=False, transport="nixl"), Expected(**head(0), parked=False, transport="shm"))
    assert room.machine.transport == "nixl+shm"


def test_a_lane_is_known_from_done_where_the_answer_was_lost() -> None:
    """A room cannot succeed by frames before its report has the transports."""
    room = Room()
    room.say(Expected(**head(0), parked=False, transport="shm"))
    room.land()
    room.land(B)
    room.say(Done(**head(0), stop=8, segments=2, aux=b"zero", transport="shm"))
    assert room.machine.transport == "shm"
    room.say(Done(**head(1), stop=8, segments=2, aux=b"one", transport="nixl"))
    assert (room.machine.state, room.machine.transport) == (Receiving.PLACED, "nixl+shm")


def test_a_room_waits_for_no_done_once_each_writer_has_named_its_transport() -> None:
    """Its report has the transports. Whatever comes after success changes nothing."""
    room = Room(exposed=True, begun=False)
    room.say(evolve(room.awaited, aux_bytes=0), room.introduced)
    room.say(
        Expected(**head(0), parked=False, transport="shm"), chunk(0, A, None), chunk(1, A, None), chunk(0, B, None)
    )
    moving = [room.machine.moving]
    room.say(Expected(**head(1), parked=False, transport="shm"))
    assert [*moving, room.machine.moving] == [False, True]
    said = room.say(chunk(1, B, None))
    assert [one for one in said if isinstance(one, CastVote)] == [CastVote(True, "")]
    assert (state_of(room), list(room.machine.inbound)) == (Receiving.PLACED, [])
    room.say(chunk(0, B, None), chunk(1, Segment(0, 3, 0, 2), None), done(0, 7), request(1))
    room.say(Decided(True, ""))
    assert (state_of(room), room.machine.phase) == (Receiving.CLOSED, Phase.DONE)


def test_an_agreement_without_this_rank_fails_the_room() -> None:
    """Another rank is wrong, and other rooms go on."""
    room = Room()
    room.say(Decided(True, ""))
    assert "without this rank" in str(room.machine.error)


def test_frames_of_strangers_and_frames_before_the_beginning_only_count() -> None:
    room = Room(begun=False)
    assert room.say(request(0), chunk(0), done(0), abort(0), drained(0), Expected(**head(0), parked=False)) == []
    room.say(room.introduced)
    assert room.say(request(0), chunk(0), done(0), Expected(**head(0), parked=False)) == []
    room.say(room.awaited)
    assert room.say(request(2), abort(2)) == []
    assert room.machine.ignored == 12


def test_distinct_writers_are_counted_and_a_repeated_notice_is_only_acknowledged() -> None:
    room = Room()
    room.lease()
    assert sent(room.say(chunk(0))) == [(0, Landed)]
    assert room.say(chunk(0)) == room.say(chunk(0)) != []
    effects = room.say(chunk(1))
    assert only(effects, Scatter) == [Scatter(A, {Rank(0): 70000 - 65536, Rank(1): 70000 - 65536 + 1024})]
    assert only(room.say(chunk(1), chunk(0)), Scatter) == []
    assert only(room.say(Scattered(A)), Free) == [Free(A)]
    assert (room.machine.inbound.segments_placed, room.machine.inbound.bytes_placed) == (1, 2048)
    assert sent(room.say(chunk(0), chunk(1))) == [(0, Landed), (1, Landed)]
    assert room.machine.inbound.segments_placed == 1


def test_a_request_reserves_once_for_the_first_asker_and_grants_each_its_part() -> None:
    room = Room()
    assert room.say(request(0, ready=False)) == [Reserve(P[0], A, 2048, False)]
    assert only(room.say(request(1)), Reserve) == [Reserve(P[0], A, 2048, True)]
    grants = [s.frame for s in only(room.say(Leased(A, LEASE)), Send)]
    places = [(g.dst, g.lease, g.offset, g.nbytes) for g in grants if isinstance(g, Grant)]
    assert places == [(P[0], 70000, 4464, 1024), (P[1], 70000, 5488, 1024)]


def test_a_lost_grant_is_given_again_for_the_same_lease() -> None:
    """A repeated request is queued or gets its live lease, never a second one."""
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
    """The ring gets the bytes of a preempted room back as soon as nobody has them."""
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


def test_a_scatter_can_be_prepared_once_there_is_a_lease_and_all_writers_have_asked() -> None:
    """Its places are then known, and each writer's path; it is said once, and with the places of the scatter."""
    places = {Rank(0): 70000 - 65536, Rank(1): 70000 - 65536 + 1024}
    room = Room()
    assert only(room.say(request(0), request(1)), Prepare) == []
    assert only(room.say(Leased(A, LEASE)), Prepare) == [Prepare(A, places)]
    assert only(room.say(request(0), request(1)), Prepare) == []
    assert only(room.say(chunk(0), chunk(1)), Scatter) == [Scatter(A, places)]
    late = Room()
    assert only(late.say(request(1), Leased(A, LEASE), chunk(1)), Prepare) == []
    assert only(late.say(request(0)), Prepare) == [Prepare(A, places)]


def test_each_lease_is_prepared_for_anew_and_one_that_is_kept_is_not() -> None:
    room = Room()
    room.lease()
    assert only(room.say(back(0), request(0, ask=1)), Prepare) == []
    room.say(back(0, 1), back(1))
    effects = room.say(request(0, ask=2), request(1, ask=1), Leased(A, OTHER_LEASE))
    assert only(effects, Prepare) == [Prepare(A, {Rank(0): 75008 - 65536, Rank(1): 75008 - 65536 + 1024})]


def test_nothing_is_prepared_nor_scattered_where_writers_write_into_pages() -> None:
    room = Room(exposed=True)
    effects = room.say(chunk(1, lease=None), chunk(0, lease=None))
    assert only(effects, Prepare) == []
    assert only(effects, Scatter) == []


def test_what_another_writer_has_written_is_kept() -> None:
    room = Room()
    room.lease()
    room.say(chunk(1))
    assert only(room.say(back(0)), Free) == []
    grants = [s.frame for s in only(room.say(request(0, ask=1)), Send) if isinstance(s.frame, Grant)]
    assert [(g.ask, g.lease) for g in grants] == [(1, 70000)]
    assert only(room.say(chunk(0)), Scatter) != []


def test_late_and_repeated_returns_and_requests_change_nothing() -> None:
    """A request that was given back leaks no lease, and a ``Return`` of the past frees none."""
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
    """A late request leaks no lease."""
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
    """The engine sees no success before the instance agrees."""
    room = Room()
    room.land(A)
    room.lease(B)
    room.say(chunk(0, B), chunk(1, B))
    assert room.say(done(0, 2, aux=b"zero"), done(1, 2, aux=b"one")) == []
    effects = room.say(Scattered(B))
    assert only(effects, Store) == [Store(b"zero")]
    assert only(effects, CastVote) == [CastVote(True, "")]
    assert (phase_of(room), room.machine.released, state_of(room)) == (Phase.MOVING, False, Receiving.PLACED)
    assert sent(room.say(Decided(True, ""))) == [(0, Complete), (1, Complete)]
    assert (phase_of(room), room.machine.released) == (Phase.DONE, True)
    assert room.machine.next_at() is None


def test_aux_of_the_lowest_rank_wins_whoever_comes_first() -> None:
    room = Room(stop=0)
    assert only(room.say(done(1, aux=b"one"), done(0, aux=b"zero")), Store) == [Store(b"zero")]
    assert only(Room(stop=0).say(done(1, aux=b"one"), done(0)), Store) == [Store(b"one")]
    assert only(Room(stop=0).say(done(1), done(0)), Store) == []


def test_an_aux_row_that_is_awaited_and_never_sent_fails_the_room() -> None:
    """The row would keep what an earlier room left in it."""
    room = Room(stop=0, aux_bytes=9)
    effects = room.say(done(1), done(0))
    assert only(effects, Store) == []
    assert [vote.ok for vote in only(effects, CastVote)] == [False]
    assert isinstance(room.machine.error, IntegrityError)
    assert str(room.machine.error).endswith("an aux row is awaited, and prefill gave none")


def test_prefill_names_the_end_where_decode_left_it_open() -> None:
    room = Room(stop=None)
    room.land(A)
    assert only(room.say(done(1, 1, stop=4), done(0, 1, stop=4)), CastVote) == [CastVote(True, "")]


@pytest.mark.parametrize(("least", "ok"), [(4, True), (5, False)])
def test_prefill_must_not_end_before_the_least_row(least: int, ok: bool) -> None:
    """The rows between would be read as they were before."""
    room = Room(stop=None, least=least)
    room.land(A)
    votes = only(room.say(done(1, 1, stop=4), done(0, 1, stop=4)), CastVote)
    assert [vote.ok for vote in votes] == [ok]
    assert ok or "ends at row 4; decode needs 5 or more" in str(room.machine.error)


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
        (8, [request(0, Segment(4, 8, 1, 1))], ["an empty segment"]),
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
    failed(room, RemoteProtocolError, "room r generation 1", *words)
    assert sent(effects)[-2:] == [(0, Abort), (1, Abort)]


def test_a_segment_that_overlaps_what_has_landed_is_refused() -> None:
    room = Room()
    room.land(A)
    room.say(request(0, Segment(0, 8, 0, 2)))
    failed(room, RemoteProtocolError, "overlaps another segment")


def test_a_rank_that_was_not_elected_is_refused_by_name() -> None:
    """Of these two replicas each sends one layer."""
    latent = CacheSpec.mla(2, 64, "int8")
    rank_plan = RankPlan.build(latent, [shard(latent), shard(latent)], shard(latent))
    other = next(r for r in (0, 1) if Rank(r) not in rank_plan.lease(Segment(0, 4, 0, 1))[0])
    room = Room(begun=False)
    room.say(room.awaited, Introduced((P[0], P[1]), rank_plan), request(other, Segment(0, 4, 0, 1)))
    failed(room, RemoteProtocolError, f"prefill rank {other} was not elected")


def test_prefill_that_has_another_tag_is_an_integrity_error() -> None:
    """Its abort says so; one without a tag, or with ours, is another failure."""
    room = Room()
    effects = room.say(abort(0, b"\x01"))
    failed(room, IntegrityError, "prefill's tag 01 is not 746167")
    tags = [e.frame.tag for e in effects if isinstance(e, Send) and isinstance(e.frame, Abort)]
    assert tags == [b"tag", b"tag"], "it says which room it gives up"
    for tag in (b"", b"tag"):
        room = Room()
        room.say(abort(0, tag))
        failed(room, AbortedError, "prefill rank 0 gave up: engine")


def test_a_writer_above_the_window_waits_and_fails_nothing() -> None:
    """What a room holds of a peer is bounded; a peer with a larger window is only slowed down."""
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
    assert only(room.say(done(0, 8), done(1, 8)), CastVote) == [CastVote(True, "")]
