"""Ranks of a decode instance agree by words of shared memory that a room has succeeded, before any frame says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.decode import bells
from disagg_kv.endpoints.decode.ballots import NOTHING, SLOT_BYTES, Ballot
from disagg_kv.endpoints.decode.bells import BellWatch
from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.endpoints.peers.shared_words import HostWords
from disagg_kv.errors import AbortedError, PeerLostError, RegistrationError, TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch
from disagg_kv.memory import Buffer
from disagg_kv.transports import InprocTransport, ShmTransport
from disagg_kv.transports.bells import SLOT_WORDS, HostBells
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
ROWS = 9


def scene(
    ranks: int = 2, *, options: Options | None = None, memory: Memory | None = None, prefills: int = 1
) -> tuple[Rig, Request]:
    """A room whose ranks know each other, and of which nothing was sent yet."""
    rig = Rig(SPEC, options=options or Options())
    of = memory or Memory()
    sending = rig.prefill(tp_shards(SPEC, prefills), memory=of, strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, ranks), memory=of, strategy="mapped")
    rig.wait(0.3)
    request = begun(rig, rig.request("room", sending, decodes, ROWS))
    return rig, request


def begun(rig: Rig, request: Request, stop: int | None = ROWS, aux: int | None = None) -> Request:
    """All ranks have opened it, and know that of each other."""
    request.open_decode().expect(stop, aux=aux).open_prefill()
    rig.until(lambda: all(one.phase is Phase.MOVING for one in request.receives), "every rank to have opened it")
    rig.wait(0.3)
    return request


def send(request: Request, turns: int = 4) -> None:
    """Prefill's threads go on alone: their words reach decode's boards, and no frame its threads."""
    request.send(ROWS)
    for _, member in itertools.product(range(turns), request.prefills):
        member.endpoint.driver.step()


def look(request: Request, rank: int) -> Phase:
    """An engine looks."""
    return request.receives[rank].phase


def step(request: Request, rank: int) -> None:
    """The thread of a decode endpoint makes a step."""
    request.decodes[rank].endpoint.driver.step()


def settle(rig: Rig, request: Request) -> None:
    """Everybody goes on, and everything ends well."""
    request.finish().landed()
    assert [handle.error for handle in request.handles] == [None] * len(request.handles)
    rig.quiet()


def watch(request: Request, rank: int) -> BellWatch:
    """What an engine knows of the room."""
    (room,) = request.decodes[rank].endpoint.inspect().rooms.values()
    assert room.watch is not None
    return room.watch


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", [InprocTransport, ShmTransport])
def test_engines_of_several_ranks_agree_before_their_threads(
    transport: Callable[[], InprocTransport], ranks: int
) -> None:
    """Followers vote, rank 0 decides, followers hear that; threads do their bookkeeping later."""
    rig, request = scene(ranks, memory=Memory(transport=transport))
    send(request)
    assert look(request, 0) is Phase.MOVING
    for rank in range(1, ranks):
        assert look(request, rank) is Phase.MOVING
        assert look(request, 0) is (Phase.MOVING if rank < ranks - 1 else Phase.DONE)
    assert [look(request, rank) for rank in range(ranks)] == [Phase.DONE] * ranks
    assert not any(handle.released for handle in request.receives)
    assert all(handle.report.bells for handle in request.receives)
    request.wanted(0, ROWS)
    rig.check()
    settle(rig, request)


def test_a_vote_alone_is_no_end() -> None:
    """A follower that has voted is not done, nor is rank 0 before its own rows are there."""
    rig, request = scene(2, prefills=2)
    for member, handle, table in zip(request.prefills, request.sends, request.pages(0, ROWS), strict=True):
        handle.send_chunk(ROWS, member.pages(table))
    for _ in range(4):
        request.prefills[1].endpoint.driver.step()  # the rows of decode's rank 1
    assert [look(request, 1), look(request, 0), look(request, 1)] == [Phase.MOVING] * 3
    assert watch(request, 1).voted
    for _ in range(4):
        request.prefills[0].endpoint.driver.step()
    assert [look(request, 0), look(request, 1)] == [Phase.DONE] * 2
    settle(rig, request)


def test_ranks_agree_on_a_room_with_aux_data_and_an_open_end() -> None:
    """Final records show the end on each rank, and each engine has stored its aux data before it votes or decides."""
    rig = Rig(SPEC)
    sending, decodes = (
        rig.prefill(tp_shards(SPEC, 1), strategy="mapped"),
        rig.decode(tp_shards(SPEC, 2), strategy="mapped"),
    )
    rig.wait(0.3)
    request = begun(rig, rig.request("room", sending, decodes, ROWS), stop=None, aux=2)
    sending[0].pool.write_aux(1, b"eightbyt")
    send(request)
    assert [look(request, 1), look(request, 0), look(request, 1)] == [Phase.MOVING] * 3
    request.finish(aux=1)
    for _ in range(4):
        sending[0].endpoint.driver.step()
    assert [look(request, 1), look(request, 0), look(request, 1)] == [Phase.MOVING, Phase.DONE, Phase.DONE]
    assert [member.pool.read_aux(2) for member in decodes] == [b"eightbyt"] * 2
    request.landed()
    assert all(handle.report.bells for handle in request.receives)
    rig.quiet()


def test_an_abort_before_the_decision_fails_the_room_on_all_ranks() -> None:
    """A follower withdraws its vote by a frame, and rank 0 counts that."""
    rig, request = scene()
    send(request)
    assert look(request, 1) is Phase.MOVING
    request.receives[1].abort("enough")
    for rank in (1, 0):
        step(request, rank)
    assert [look(request, 0), look(request, 1)] == [Phase.FAILED, Phase.MOVING]
    assert isinstance(request.receives[0].error, AbortedError)
    request.failed()
    rig.quiet()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_after_the_decision_comes_too_late(rank: int) -> None:
    """On rank 0, and on a follower that has not heard the decision yet."""
    rig, request = scene()
    send(request)
    assert [look(request, 1), look(request, 0)] == [Phase.MOVING, Phase.DONE]
    request.receives[rank].abort("too late")
    for one in (1, 0):
        step(request, one)
    assert [look(request, 0), look(request, 1)] == [Phase.DONE] * 2
    settle(rig, request)


def test_a_follower_that_loses_rank_0_looks_for_its_decision_first() -> None:
    """Rank 0 has decided, and ends; the follower's engine has not looked since."""
    rig, request = scene()
    send(request)
    assert [look(request, 1), look(request, 0)] == [Phase.MOVING, Phase.DONE]
    request.decodes[0].crash()
    follower = request.receives[1]
    rig.until(lambda: request.decodes[1].observer.counters["peers.lost"] > 0, "the loss")
    assert (look(request, 1), follower.error) == (Phase.DONE, None)


def test_a_follower_that_has_voted_fails_with_rank_0() -> None:
    """As it does where its vote was a frame: no decision is known."""
    rig, request = scene()
    send(request)
    assert look(request, 1) is Phase.MOVING
    request.decodes[0].crash()
    rig.until(lambda: look(request, 1) is Phase.FAILED, "the loss")
    assert "rank 0" in str(request.receives[1].error)


@pytest.mark.parametrize("decided", [False, True])
def test_rank_0_and_a_follower_that_ends(decided: bool) -> None:
    """After its vote, and before or after the decision."""
    rig, request = scene()
    send(request)
    assert look(request, 1) is Phase.MOVING
    if decided:
        assert look(request, 0) is Phase.DONE
    request.decodes[1].crash()
    rig.until(lambda: request.decodes[0].observer.counters["peers.lost"] > 0, "the loss")
    for _ in range(2):
        step(request, 0)
    assert look(request, 0) is (Phase.DONE if decided else Phase.FAILED)


def test_a_broken_endpoint_keeps_what_words_have_decided() -> None:
    """Also a follower's, whose engine has not looked since; one that has only voted fails."""
    for decided in (False, True):
        _, request = scene()
        send(request)
        assert look(request, 1) is Phase.MOVING
        if decided:
            assert look(request, 0) is Phase.DONE
        request.receives[1].break_down(TransportError("the endpoint has failed"))
        assert look(request, 1) is (Phase.DONE if decided else Phase.FAILED)


# Every interleaving.


@contextmanager
def interrupted(at: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """Before the ``at``-th step of engines that others see, another thread acts. Gives the number of such steps."""
    seen = [0]
    inside = [False]

    def wrap(method: Any) -> Any:
        def stepped(*args: Any) -> Any:
            if not inside[0]:
                seen[0] += 1
                if seen[0] == at:
                    inside[0] = True
                    act()
                    inside[0] = False
            return method(*args)

        return stepped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bells._Claim, "take", wrap(bells._Claim.take))
        patch.setattr(Ballot, "ring", wrap(Ballot.ring))
        patch.setattr(Ballot, "heard", wrap(Ballot.heard))
        yield seen


def steps_of(request: Request, ranks: str) -> None:
    """Threads of decode's endpoints make steps, one after the other."""
    for rank in ranks:
        step(request, int(rank))


def released(request: Request) -> bool:
    """Whether the room is over on all decode ranks."""
    return all(one.released for one in request.receives)


@pytest.mark.parametrize("looks", ["10", "101", "010"])
@pytest.mark.parametrize("threads", ["0", "1", "10", "01"])
@pytest.mark.parametrize("aborts", [0, 1])
def test_engines_and_threads_never_disagree(looks: str, threads: str, aborts: int) -> None:
    """Threads handle an abort before every step of the engines that they can see: no outcome changes, or differs."""
    at = steps = 1
    while at <= steps + 1:
        rig, request = scene()
        send(request)
        request.receives[aborts].abort("in between")
        seen: list[list[Phase]] = [[], []]
        with interrupted(at, partial(steps_of, request, threads)) as counted:
            for rank in map(int, looks):
                seen[rank].append(look(request, rank))
        steps = max(steps, counted[0])
        steps_of(request, "1010")
        for rank in (0, 1, 0, 1):
            seen[rank].append(look(request, rank))
        request.finish()
        rig.until(partial(released, request), "the end")
        for rank in (0, 1):
            seen[rank].append(look(request, rank))
        ends = {phases[-1] for phases in seen}
        assert len(ends) == 1, (at, seen)
        for phases in seen:
            known = [phase for phase in phases if phase in (Phase.DONE, Phase.FAILED)]
            assert len(set(known)) == 1, (at, seen)
        at += 1


def test_an_engine_decides_nothing_while_votes_are_counted() -> None:
    """It looks after its thread has held it, and before the vote against the room is counted."""
    _, request = scene()
    send(request)
    assert look(request, 1) is Phase.MOVING
    side = request.decodes[0].endpoint.driver.loop.side
    with side.deciding(request.room):
        assert look(request, 0) is Phase.MOVING
    assert look(request, 0) is Phase.DONE


def test_an_engine_decides_nothing_once_its_rank_has_doubts() -> None:
    """Between the event and the vote against the room that follows from it."""
    _, request = scene()
    send(request)
    request.finish()
    for _ in range(4):  # rank 0's rows are placed by frames, and the room waits for the other rank
        step(request, 0)
        request.prefills[0].endpoint.driver.step()
    assert look(request, 1) is Phase.MOVING
    request.receives[0].abort("doubts")
    side, seen = request.decodes[0].endpoint.driver.loop.side, list[Phase]()
    assert isinstance(side, DecodeSide)
    cast = side._cast

    def looks(*args: Any) -> None:
        seen.append(look(request, 0))
        cast(*args)

    side._cast = looks  # type: ignore[method-assign, assignment]
    step(request, 0)
    assert seen[0] is Phase.MOVING
    assert Phase.DONE not in seen
    assert look(request, 0) is Phase.FAILED


# Which rooms have ballots.


def test_ranks_say_why_their_words_are_not_open() -> None:
    """Then no bells are named to prefill either."""

    def refuse(self: HostWords, epoch: Epoch, place: bytes) -> HostBells:
        raise PeerLostError("its words are gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostWords, "open", refuse)
        rig, request = scene()
    for member in request.decodes:
        (sibling,) = (peer for peer in member.endpoint.peers() if peer.instance == "D")
        assert sibling.no_bells == "its words are gone"
        (room,) = member.endpoint.inspect().rooms.values()
        assert room.bells == ()
    request.send(ROWS)
    settle(rig, request)
    assert not any(handle.report.bells for handle in request.receives)


def test_ranks_without_a_board_have_no_words() -> None:
    """They say so of each other."""
    rig, request = scene(options=Options(bells=0))
    for member in request.decodes:
        (sibling,) = (peer for peer in member.endpoint.peers() if peer.instance == "D")
        assert sibling.no_bells == "this rank has no words for other ranks"
    request.send(ROWS)
    settle(rig, request)


def test_ranks_that_the_host_gives_no_memory_agree_by_frames() -> None:
    """They say why, and the endpoint is there all the same."""

    def refuse(self: HostWords, epoch: Epoch, nbytes: int) -> tuple[Buffer, bytes]:
        raise RegistrationError("memfd_create: not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostWords, "make", refuse)
        rig, request = scene()
    for member in request.decodes:
        (sibling,) = (peer for peer in member.endpoint.peers() if peer.instance == "D")
        assert sibling.no_bells == "this rank has no words for other ranks: memfd_create: not permitted"
    request.send(ROWS)
    settle(rig, request)
    assert not any(handle.report.bells for handle in request.receives)


def test_rooms_one_after_the_other_use_the_same_slot_with_new_values() -> None:
    """What is left of an earlier room is no vote on a later one."""
    rig, request = scene(options=Options(bells=1))
    for name in ("b", "c", None):
        send(request)
        assert [look(request, 0), look(request, 1), look(request, 0), look(request, 1)] == [
            Phase.MOVING, Phase.MOVING, Phase.DONE, Phase.DONE,
        ]  # fmt: skip
        settle(rig, request)
        if name is not None:
            for member, table in zip(request.decodes, request.taken, strict=True):
                member.give(table)
            request.prefills[0].give(request.given[0][0])
            request = begun(rig, rig.request(name, request.prefills, request.decodes, ROWS))


def test_the_words_of_another_life_are_no_vote() -> None:
    """A follower's next life opens a room with the same number in its life."""
    rig, first = scene(options=Options(bells=1))
    send(first)
    assert look(first, 1) is Phase.MOVING
    first.decodes[1].crash()
    prefills = first.prefills
    rig.decodes[1:] = rig.decode(tp_shards(SPEC, 2), memory=Memory(), strategy="mapped", only=[1])
    rig.until(lambda: all(handle.released for handle in first.receives[:1]), "the end of the first room")
    rig.wait(5.0)
    second = begun(rig, rig.request("second", prefills, rig.decodes, ROWS))
    send(second)
    assert look(second, 0) is Phase.MOVING
    assert look(second, 1) is Phase.MOVING
    assert [look(second, 0), look(second, 1)] == [Phase.DONE] * 2


def test_words_of_two_followers_and_rooms_have_slots_of_their_own() -> None:
    """Each follower its part of rank 0's words; rooms of one follower take its slots in turn."""
    _, request = scene(4, options=Options(bells=4))
    send(request)
    ballots = [watch(request, rank).ballot for rank in range(4)]
    assert all(isinstance(one, Ballot) for one in ballots)
    first = ballots[0]
    assert first is not None
    taken = {word.slot for word in first.awaited}
    assert {slot // 4 for slot in taken} == {0, 1, 2}
    for follower in ballots[1:]:
        assert follower is not None
        ((array, vote),), (decision,) = follower.rings, follower.awaited
        assert vote in first.awaited
        assert decision in {word for _, word in first.rings}
        assert vote.slot < array.buffer.nbytes // SLOT_BYTES == 12
    assert SLOT_BYTES == SLOT_WORDS * 8


def test_words_of_a_process_that_has_ended_are_not_opened() -> None:
    words, epoch = HostWords(), Epoch(b"e" * 16)
    memory, place = words.make(epoch, 4 * SLOT_BYTES)
    array = words.open(epoch, place)
    array.ring(3, 7, NOTHING)
    with pytest.raises(PeerLostError):
        words.open(Epoch(b"f" * 16), place)
    with pytest.raises(TransportError):
        array.ring(4, 7, NOTHING)
    del memory
    with pytest.raises(PeerLostError):
        words.open(epoch, place)
