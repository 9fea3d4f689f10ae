"""A prefill rank is wrong, and its frames contradict its bells: what an engine has concluded stays, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg_kv.core import Phase, RoomFrame
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.wire.frames import ChunkReady, Done, Head, StagingRequest
from disagg_kv.endpoints.decode.room import DecodeRoom
from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.errors import TransportError
from disagg_kv.ids import RoomId
from tests.support.rig import Request, Rig, tp_shards
from tests.unit.endpoints.test_ballots import ROWS, SPEC, begun, look, scene, send, step, watch

DONE, FAILED, MOVING = Phase.DONE, Phase.FAILED, Phase.MOVING


def room_of(request: Request, rank: int) -> DecodeRoom:
    """What an endpoint of decode knows of the room."""
    rooms = request.decodes[rank].endpoint.inspect().rooms
    return next(room for room in rooms.values() if room.key.room == request.room)


def forge(request: Request, rank: int, frame_of: Callable[[Head], RoomFrame]) -> None:
    """A frame of prefill's rank 0 reaches a decode rank."""
    room, loop = room_of(request, rank), request.decodes[rank].endpoint.driver.loop
    loop.side.on_frame(frame_of(room_head(room.machine.writers[0], loop.me.epoch, room.key.room, room.key.generation)))


def piece(head: Head) -> ChunkReady:
    """Fewer rows than the bells will say."""
    return ChunkReady(**head, segment=(0, 4, 0, 2, False), lease=None, sums=None)


def early(head: Head) -> Done:
    """Done after more segments than there are."""
    return Done(**head, stop=ROWS, segments=9, aux=None, lane="shm")


def settled(rig: Rig, request: Request) -> list[Phase]:
    """How decode's ranks have ended."""
    request.finish()
    rig.until(lambda: all(one.released for one in request.receives), "the end")
    request.wanted(0, ROWS)
    rig.check()
    return [look(request, rank) for rank in range(len(request.receives))]


@pytest.mark.parametrize("frame", [piece, early])
def test_the_bell_of_a_single_rank_wins(frame: Callable[[Head], RoomFrame]) -> None:
    rig, request = scene(1)
    forge(request, 0, frame)
    send(request)
    assert look(request, 0) is DONE
    assert settled(rig, request) == [DONE]
    assert request.receives[0].error is None


@pytest.mark.parametrize("frame", [piece, early])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_end_alike_whichever_of_them_got_the_frame(rank: int, frame: Callable[[Head], RoomFrame]) -> None:
    rig, request = scene()
    forge(request, rank, frame)
    send(request)
    assert [look(request, 1), look(request, 0)] == [MOVING, DONE]
    assert settled(rig, request) == [DONE, DONE]


def test_final_records_and_done_name_different_ends() -> None:
    """The room ends as the records say, which the engine has counted rows for."""
    rig = Rig(SPEC)
    sending = rig.prefill(tp_shards(SPEC, 1), strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped")
    rig.wait(0.3)
    request = begun(rig, rig.request("room", sending, decodes, ROWS), stop=None)
    forge(request, 0, lambda head: Done(**head, stop=ROWS - 1, segments=5, aux=None, lane="shm"))
    send(request)
    request.finish()
    for _ in range(4):
        sending[0].endpoint.driver.step()
    assert look(request, 0) is DONE
    rig.until(lambda: request.receives[0].released, "the end")
    assert request.receives[0].phase is DONE
    request.wanted(0, ROWS)


@pytest.mark.parametrize("voted", [False, True])
def test_a_request_for_memory_before_a_vote_and_after_it(voted: bool) -> None:
    """Before it, the request ends the room, whose pages are exposed. After it, the request is answered alone."""
    rig = Rig(SPEC)
    sending = rig.prefill(tp_shards(SPEC, 1), strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="mapped")
    rig.wait(0.3)
    request = begun(rig, rig.request("room", sending, decodes, ROWS), stop=None)
    awaited, _ = room_of(request, 1).machine.listens or pytest.fail("it has bells")
    stray = (ROWS, awaited.most, 0, 2, False)
    if not voted:
        forge(request, 1, lambda head: StagingRequest(**head, segment=stray, ask=1, ready=True))
    send(request)
    request.finish()
    for _ in range(4):
        sending[0].endpoint.driver.step()
    if not voted:
        assert look(request, 1) is FAILED
    else:
        assert (look(request, 1), look(request, 0)) == (MOVING, DONE)
        assert watch(request, 1).voted
        forge(request, 1, lambda head: StagingRequest(**head, segment=stray, ask=1, ready=True))
    rig.until(lambda: {look(request, rank) for rank in (0, 1)} in ({DONE}, {FAILED}), "the end of both")
    assert look(request, 0) is (DONE if voted else FAILED)
    assert not request.decodes[1].observer.counters["errors.unforeseen"]


# A rank that has voted has doubts.


def test_a_follower_that_has_doubts_looks_for_the_decision_of_a_rank_0_that_it_loses() -> None:
    """Rank 0 has decided for all before it counted the vote against the room, and ends: all that live are done."""
    rig, request = scene(4)
    send(request)
    assert {look(request, rank) for rank in (1, 2, 3)} == {MOVING}
    request.receives[1].abort("enough")
    step(request, 1)
    assert look(request, 0) is DONE
    request.decodes[0].crash()
    rig.until(lambda: all(one.observer.counters["peers.lost"] > 0 for one in request.decodes[1:]), "the loss")
    assert [look(request, rank) for rank in (1, 2, 3)] == [DONE] * 3


@pytest.mark.parametrize("decided", [False, True])
def test_a_broken_endpoint_that_has_doubts_keeps_what_words_have_decided(decided: bool) -> None:
    _, request = scene()
    send(request)
    assert look(request, 1) is MOVING
    request.receives[1].abort("enough")
    step(request, 1)
    if decided:
        assert look(request, 0) is DONE
    assert look(request, 1) is MOVING, "its engine comes to no conclusion"
    request.receives[1].break_down(TransportError("the endpoint has failed"))
    assert look(request, 1) is (DONE if decided else FAILED)


def test_rooms_of_one_id_are_found_by_it() -> None:
    """A vote holds the rooms of its id alone."""
    rig, request = scene()
    other = begun(rig, rig.request("other", request.prefills, request.decodes, ROWS))
    side = request.decodes[0].endpoint.driver.loop.side
    assert isinstance(side, DecodeSide)
    bells = side.bells
    assert [room.key.room for room in bells._named(request.room)] == [request.room]
    assert len(bells._named(None)) == 2
    assert bells._named(RoomId(b"another")) == []
    for one in (request, other):
        send(one)
        assert settled(rig, one) == [DONE, DONE]
    assert (bells._named(None), bells._by_id) == ([], {})
