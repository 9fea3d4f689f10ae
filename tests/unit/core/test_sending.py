"""A room on a prefill rank, rule by rule."""

from __future__ import annotations

import pytest

from disagg_kv.core import CastVote, Decided, FlowPlan, Gone, Granted, Lost, Phase, Transfer, WriteFailed, Wrote
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import (
    ChunkReady,
    Done,
    Drained,
    Grant,
    Queued,
    Return,
    Returned,
    StagingRequest,
)
from disagg_kv.errors import PeerLostError, RemoteProtocolError
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import LayerId, Rank
from disagg_kv.planning import Limits, RankPlan, Segment
from tests.support.send_room import (
    RETRY,
    A,
    B,
    D,
    Room,
    box,
    frames,
    grant,
    head,
    landed,
    only,
    phase,
    plan,
    sent,
    state,
    transfers,
)


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
    (done,) = frames(room.machine.finish(4, b"aux", 0.0), Done)
    assert (done.stop, done.aux) == (4, b"aux")
    assert room.complete() == [CastVote(True, "")]
    assert not room.machine.released
    assert room.machine.decided(Decided(True, ""), 0.0) == []
    assert (phase(room), room.machine.released, room.machine.closed) == (Phase.DONE, True, True)
    assert room.machine.next_at() is None


def test_what_is_granted_before_its_rows_are_final_can_be_prepared_until_it_is_given_back() -> None:
    room = Room(chunks=1, ready=False)
    room.expect()
    coming = Transfer(D[0], A, 0, 1024, 0)
    assert only(room.say(grant()), Granted) == [Granted(coming)]
    flow = room.machine.flows[D[0]]
    assert (flow.awaits(coming), A in flow.outbound, B in flow.outbound) == (True, True, False)
    assert only(room.ready(1), Transfer) == [coming]
    assert room.begin()
    assert not flow.awaits(coming)
    other = Room(chunks=1, ready=False)
    other.expect()
    other.say(grant())
    other.machine.withdraw(0.0)
    assert not other.machine.flows[D[0]].awaits(coming)
    final = Room(chunks=1)
    final.expect()
    assert only(final.say(grant()), Granted) == []


def test_rows_that_decode_holds_or_does_not_await_are_not_sent() -> None:
    room = Room()
    (request,) = frames(room.expect(given=plan(start=4, stop=6)), StagingRequest)
    assert request.segment == (4, 6, 0, 2, False)
    room = Room(chunks=1)
    room.machine.finish(4, None, 0.0)
    assert sent(room.expect(given=plan(start=4, stop=4))) == [Done]


def test_a_rank_that_was_not_elected_says_done_only() -> None:
    """Both replicas hold the latent; of a single layer and row one of them sends nothing."""
    latent = CacheSpec.mla(1, 64, "int8")
    rank_plan = RankPlan.build(latent, [shard(latent), shard(latent)], shard(latent))
    idle = next(Rank(r) for r in (0, 1) if not rank_plan.part_bytes(Segment(0, 1, 0, 1), Rank(r)))
    room = Room(chunks=0)
    room.add(1)
    assert room.expect(given=FlowPlan(idle, rank_plan, 0, 1, False, Limits(4096, 8192, 4))) == []
    assert sent(room.machine.finish(1, None, 0.0)) == [Done]


def test_requests_notices_and_done_are_repeated_until_answered() -> None:
    room = Room(chunks=1)
    room.expect()
    assert sent(room.machine.tick(0.2)) == [StagingRequest]
    room.say(Queued(**head(), segment=box(A)), grant())
    assert room.machine.tick(5.0) == []
    room.begin()
    room.say(Wrote(A))
    assert sent(room.machine.tick(6.0)) == [ChunkReady]
    room.say(landed())
    room.machine.finish(4, None, 6.0)
    assert sent(room.machine.tick(7.0)) == [Done]


def test_the_window_bounds_what_is_under_way() -> None:
    room = Room(window=1)
    assert len(frames(room.expect(), StagingRequest)) == 1
    room.write()
    assert [f.segment for f in frames(room.say(landed()), StagingRequest)] == [box(B)]


def test_a_request_that_is_answered_landed_is_over() -> None:
    room = Room(chunks=1)
    room.expect()
    room.say(landed())
    assert sent(room.machine.finish(4, None, 0.0)) == [Done]


def test_one_acknowledgement_lists_several_segments() -> None:
    """Those that are not known count, wherever they stand in the list, and the others are over."""
    room = Room()
    room.expect()
    room.say(landed(A, Segment(5, 5, 0, 0), A, B))
    flow = room.machine.flows[D[0]]
    assert (flow.outbound.segments_landed, flow.ignored) == (2, 2)
    assert sent(room.machine.finish(8, None, 0.0)) == [Done]


@pytest.mark.parametrize(
    "event", [grant(Segment(5, 5, 0, 0)), landed(Segment(5, 5, 0, 0)), grant(B), landed(B)], ids=str
)
def test_answers_about_unknown_segments_only_count(event: object) -> None:
    room = Room(chunks=1)
    room.expect()
    assert room.say(event) == []
    assert room.machine.flows[D[0]].ignored == 1


def test_a_repeated_grant_or_acknowledgement_moves_nothing_twice() -> None:
    room = Room(chunks=1)
    room.expect()
    assert transfers(room.say(grant(), grant())) == [A]
    assert room.begin()
    assert not room.begin()
    assert room.say(grant(), landed()) == []
    assert sent(room.say(Wrote(A), grant())) == [ChunkReady]
    room.say(landed(), landed())
    flow = room.machine.flows[D[0]]
    assert flow.outbound.segments_landed == 1


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
    assert not room.begin(A, lease=None)
    assert transfers(room.ready(1)) == [A]
    assert room.begin(A, lease=None)


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
    """A preempted room holds no bytes of the ring; it says so until that is known, and asks afresh."""
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
    assert transfers(room.ready(1)) == []
    assert transfers(room.add(8, start=0, ready=False)) == []
    assert transfers(room.ready(2)) == []
    assert transfers(room.ready(3)) == [A, B]


def test_rows_that_came_by_two_calls_are_final_when_both_are() -> None:
    room = Room(chunks=0)
    room.add(8, ready=False)
    room.expect(given=plan(exposed=True))
    room.machine.withdraw(0.0)
    room.add(2, start=0, ready=False)
    room.add(8, start=2, ready=False)
    assert transfers(room.ready(3)) == []
    assert len(transfers(room.ready(2))) == 1


def test_a_segment_is_final_when_all_its_layers_are() -> None:
    room = Room(chunks=1, ready=False)
    room.expect(given=plan(exposed=True))
    assert transfers(room.ready(1, {LayerId(1)})) == []
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


def test_a_decode_rank_that_is_complete_before_the_room_is_finished_is_needed_no_more() -> None:
    """Also while a copy whose flag it has seen counts as a write."""
    room = Room(chunks=1)
    room.expect()
    room.say(grant())
    assert room.begin()
    assert room.complete() == []
    gone = PeerLostError("gone")
    assert room.say(Lost(D[0], gone), Gone(D[0])) == []
    assert (sent(room.say(Wrote(A))), sent(room.add(8))) == ([ChunkReady], [])
    assert (state(room), phase(room)) == (Sending.MOVING, Phase.MOVING)
    assert room.machine.finish(8, None, 0.0)[-1] == CastVote(True, "")
    assert (state(room), room.machine.flows[D[0]].outbound.segments_landed) == (Sending.COMPLETE, 1)
    room.machine.decided(Decided(True, ""), 0.0)
    assert (phase(room), room.machine.closed) == (Phase.DONE, True)


@pytest.mark.parametrize("granted", [False, True])
def test_a_decode_rank_cannot_be_complete_before_all_submitted_rows_are_written(granted: bool) -> None:
    room = Room(chunks=2)
    room.expect()
    room.write(A)
    if granted:
        room.say(grant(B))
    assert room.complete() == []
    assert room.machine.flows[D[0]].ignored == 1
    room.write(B)
    assert frames(room.machine.finish(8, None, 0.0), Done)
    assert room.complete() == [CastVote(True, "")]
