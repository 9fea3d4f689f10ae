"""What peers say of rooms that are not open here is answered, and kept for a while in a bounded number of places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from msgspec import structs

from disagg_kv.core import Options, Phase, RoomFrame, RoomKey, RoomOutcome, Send, Tombstones
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.wire import frames as f
from disagg_kv.endpoints.arrivals import PLACE, Absent, Arrivals
from disagg_kv.endpoints.peers.session import PeerSession
from disagg_kv.errors import AbortedError, SupersededError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, Generation, RoomId
from disagg_kv.trace import Recorder
from tests.support.every_frame import few_about
from tests.support.rig import Rig, tp_shards

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

SPEC = CacheSpec.kv(2, 4, 8, "float16")
A, B, US = (Epoch(bytes([n] * 16)) for n in (1, 2, 9))
ROOM, OTHER, THIRD = (RoomId(name) for name in (b"a", b"b", b"c"))
LATE = Generation(5)

Answers = dict[type[RoomFrame], type[RoomFrame]]
REFUSES: Answers = {f.Expect: f.Abort, f.Abort: f.Drained}
PARKS: Answers = {f.Expect: f.Expected, f.Abort: f.Drained}
ACKNOWLEDGES: Answers = {f.Abort: f.Abort, f.Drained: f.DrainedAck}
ANSWERS: dict[tuple[str, Absent | RoomOutcome], Answers] = {
    ("prefill", Absent.OPEN): PARKS,
    ("prefill", Absent.NEW): PARKS,
    ("prefill", Absent.PARKED): PARKS,
    ("prefill", Absent.OVER): REFUSES,
    ("prefill", RoomOutcome.DONE): REFUSES,
    ("prefill", RoomOutcome.FAILED): REFUSES,
    ("prefill", RoomOutcome.EVICTED): REFUSES,
    ("decode", Absent.NEW): ACKNOWLEDGES,
    ("decode", RoomOutcome.DONE): ACKNOWLEDGES
    | {f.StagingRequest: f.Landed, f.ChunkReady: f.Landed, f.Done: f.Complete},
    ("decode", RoomOutcome.FAILED): ACKNOWLEDGES
    | dict.fromkeys((f.Expected, f.StagingRequest, f.Return, f.ChunkReady, f.Done), f.Abort),
    ("decode", RoomOutcome.EVICTED): ACKNOWLEDGES,
}
"""By role and state: the answer to a frame; other frames get none."""
MET: dict[str, set[type[RoomFrame]]] = {
    "prefill": {f.Queued, f.Grant, f.Landed, f.Complete, f.DrainedAck, f.Returned, f.Expect, f.Abort},
    "decode": {f.Expected, f.StagingRequest, f.Return, f.ChunkReady, f.Done, f.Drained, f.Abort},
}
"""The frames that each role gets."""


@define
class Loop:
    """As much of an endpoint's loop as arrivals need; it is its own identity, and the other ranks of its instance."""

    role: str = "prefill"
    options: Options = field(factory=Options)
    epoch: Epoch = US
    now: float = 0.0
    there: Collection[Epoch] = (A, B)
    tombstones: Tombstones = field(factory=Tombstones)
    observer: Recorder = field(factory=Recorder)
    sent: list[Send] = field(factory=list)
    superseded: SupersededError | None = None

    @property
    def me(self) -> Loop:
        return self

    @property
    def ranks(self) -> Loop:
        return self

    def all_there(self) -> list[PeerSession]:
        hello = dict.fromkeys(f.Hello.__struct_fields__)
        return [PeerSession(f.Hello(**{**hello, "src": epoch}), 0.0, True) for epoch in self.there]  # type: ignore[arg-type]

    def remember(self, epochs: Sequence[Epoch], key: RoomKey, ended: RoomOutcome) -> None:
        for epoch in epochs:
            self.tombstones.remember(epoch, key.generation, ended)


def arrivals(loop: Loop, opened: Collection[RoomId] = ()) -> Arrivals:
    return Arrivals(loop, loop.sent.append, opened)  # type: ignore[arg-type]


def expect(room: RoomId = ROOM, peer: Epoch = A, nbytes: int = 0, tag: bytes = b"", generation: int = 1) -> f.Expect:
    """Of one page table."""
    tables = (f.WireTable("", 0, nbytes // 4, 0, bytes(nbytes)),)
    head = room_head(peer, US, room, Generation(generation))
    return f.Expect(**head, start=0, stop=8, path="slice", tag=tag, tables=tables)


def abort(room: RoomId = ROOM, peer: Epoch = A, reason: str = "over", tag: bytes = b"", generation: int = 1) -> f.Abort:
    return f.Abort(**room_head(peer, US, room, Generation(generation)), reason=reason, tag=tag)


def answers(loop: Loop) -> list[tuple[Epoch, type[RoomFrame]]]:
    """Those that were sent since the last look."""
    found = [(send.to, type(send.frame)) for send in loop.sent]
    loop.sent.clear()
    return found  # type: ignore[return-value]


def parks(kept: Arrivals, loop: Loop, frame: f.Expect) -> bool:
    """Whether an expectation is kept: its sender learns that."""
    kept.answer(frame)
    kept.check_integrity()
    return answers(loop) == [(Epoch(frame.src), f.Expected)]


def in_state(role: str, state: Absent | RoomOutcome) -> tuple[Loop, Arrivals]:
    """A loop that knows of a room of A what the state says."""
    loop = Loop(role, tombstones=Tombstones(generations=2 if state is RoomOutcome.EVICTED else 64))
    kept = arrivals(loop, {ROOM} if state is Absent.OPEN else ())
    if state is Absent.PARKED:
        kept.answer(expect(generation=int(LATE)))
    elif state is Absent.OVER:
        kept.answer(abort(peer=B))
    elif state in (RoomOutcome.DONE, RoomOutcome.FAILED):
        loop.tombstones.remember(A, LATE, RoomOutcome(state.value))
    elif state is RoomOutcome.EVICTED:
        loop.tombstones.remember(A, Generation(LATE + 9), RoomOutcome.DONE)
    loop.sent.clear()
    return loop, kept


@pytest.mark.parametrize(("role", "state"), ANSWERS, ids=str)
def test_every_frame_about_a_room_that_is_not_here_gets_its_answer(role: str, state: Absent | RoomOutcome) -> None:
    """And nothing else; what gets none is counted, unless the room is known to have ended."""
    for frame in few_about(room_head(A, US, ROOM, LATE), *MET[role]):
        loop, kept = in_state(role, state)
        if state is not Absent.OVER or isinstance(frame, f.Expect | f.Abort):
            assert kept.state(frame) is state
        kept.answer(frame)
        kept.check_integrity()
        wanted = ANSWERS[role, state].get(type(frame))
        assert answers(loop) == ([] if wanted is None else [(A, wanted)]), frame
        counted = wanted is None and state not in (RoomOutcome.DONE, RoomOutcome.FAILED)
        assert loop.observer.counters["frames.unknown_room"] == counted


@pytest.mark.parametrize("state", [Absent.NEW, Absent.PARKED, Absent.OVER])
def test_a_room_that_was_given_up_or_refused_is_not_revived(state: Absent | RoomOutcome) -> None:
    _, kept = in_state("prefill", state)
    kept.answer(abort(generation=int(LATE)))
    assert kept.state(expect(generation=int(LATE))) is RoomOutcome.FAILED
    kept.refuse(expect(OTHER, generation=7), "no")
    assert kept.state(expect(OTHER, generation=7)) is RoomOutcome.FAILED


def test_one_that_comes_again_takes_the_place_of_the_earlier_one() -> None:
    loop = Loop(options=Options(parked=1, silence_s=5.0))
    kept = arrivals(loop)
    assert parks(kept, loop, expect())
    loop.now, again = 4.0, structs.replace(expect(), generation=9)
    assert parks(kept, loop, again)
    loop.now = 8.0
    kept.tick()
    assert kept.parked(ROOM) == [again]
    kept.forget(ROOM, A)
    kept.forget(ROOM, A)
    assert not kept.parked(ROOM)
    assert parks(kept, loop, expect(OTHER))


def test_number_and_bytes_are_bounded_and_are_free_again() -> None:
    loop = Loop(options=Options(parked=4, silence_s=5.0), there=(A,))
    kept = arrivals(loop)
    assert parks(kept, loop, expect(ROOM, nbytes=2 * PLACE))
    assert not parks(kept, loop, expect(OTHER, nbytes=PLACE)), "too many bytes"
    assert parks(kept, loop, expect(THIRD))
    assert not parks(kept, loop, expect(OTHER)), "too many of them"
    assert loop.observer.counters["frames.not_parked"] == 2
    assert kept.next_at() == 5.0
    loop.now = 5.0
    kept.tick()
    kept.check_integrity()
    assert kept.next_at() is None
    assert parks(kept, loop, expect(OTHER, nbytes=3 * PLACE))
    assert not parks(kept, loop, expect(THIRD, nbytes=4 * PLACE)), "more than there can be"


def test_one_peer_takes_a_quarter_while_others_are_known() -> None:
    loop = Loop(options=Options(parked=8))
    kept = arrivals(loop)
    assert parks(kept, loop, expect(RoomId(b"1"), nbytes=3 * PLACE)), "the first of a peer may be large"
    assert not parks(kept, loop, expect(RoomId(b"2")))
    assert [parks(kept, loop, expect(RoomId(b"%d" % n), B)) for n in (3, 4, 5)] == [True, True, False]
    kept.forget(RoomId(b"1"), A)
    assert [parks(kept, loop, expect(RoomId(b"%d" % n))) for n in (6, 7, 8)] == [True, True, False]


def test_a_room_that_is_over_gives_its_place_to_one_that_is_awaited() -> None:
    """The oldest first; what is awaited gives its place to none."""
    loop = Loop(options=Options(parked=2), there=(A,))
    kept = arrivals(loop)
    for number, room in enumerate((ROOM, OTHER, THIRD)):
        kept.answer(abort(room, reason=room.decode(), generation=number))
    kept.check_integrity()
    reasons = [kept.reason(room, b"") for room in (ROOM, OTHER, THIRD)]
    assert reasons == [None, "decode gave up: b", "decode gave up: c"]
    answers(loop)
    assert [parks(kept, loop, expect(RoomId(b"%d" % n), generation=9)) for n in range(3)] == [True, True, False]
    kept.answer(abort(ROOM, B))
    assert kept.reason(ROOM, b"") is None


def test_the_first_reason_stands_until_it_expires() -> None:
    loop = Loop(options=Options(total_s=10.0))
    kept = arrivals(loop)
    kept.answer(abort(reason="one"))
    loop.now = 5.0
    kept.answer(abort(peer=B, reason="two"))
    assert (kept.reason(ROOM, b""), kept.reason(OTHER, b"")) == ("decode gave up: one", None)
    loop.now = 10.0
    kept.tick()
    assert (kept.reason(ROOM, b""), kept.next_at()) == ("decode gave up: two", 15.0)


def test_a_reason_counts_for_its_own_tag_and_for_rooms_without_one() -> None:
    """What an instance with another tag gave up is another request's: whoever awaits that goes on waiting."""
    loop = Loop()
    kept = arrivals(loop)
    assert parks(kept, loop, expect(peer=B, tag=b"y"))
    kept.answer(abort(reason="a stray", tag=b"x"))
    assert answers(loop) == [(A, f.Drained)]
    found = [kept.reason(ROOM, tag) for tag in (b"y", b"x", b"")]
    assert found == [None, *["decode gave up: a stray"] * 2]
    kept.over(f.Abort(**room_head(US, US, ROOM, Generation(1)), reason="ours"))
    assert answers(loop) == [(B, f.Abort)]
    assert kept.reason(ROOM, b"y") == "ours"


def test_what_is_parked_has_not_ended_though_its_number_is_forgotten() -> None:
    loop, kept = in_state("prefill", Absent.PARKED)
    loop.tombstones = Tombstones(generations=2)
    loop.tombstones.remember(A, Generation(100), RoomOutcome.DONE)
    assert kept.state(expect(generation=int(LATE))) is Absent.PARKED
    assert kept.state(expect(OTHER, generation=int(LATE))) is RoomOutcome.EVICTED


@pytest.mark.parametrize("world", [1, 2])
def test_every_decode_rank_that_asks_for_such_a_room_is_refused_at_once(world: int) -> None:
    """Also a rank that asks long after the others."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, world))
    rig.request("warm", prefills, decodes, 8).start().landed()
    request = rig.request("room", prefills, decodes, 8).open_prefill().open_decode()
    request.sends[0].abort("the user went away")
    rig.until(lambda: request.sends[0].released, "prefill's end")
    rig.wait(20.0)
    began = rig.clock()
    request.expect()
    rig.until(lambda: all(handle.released for handle in request.receives), "decode's end")
    assert rig.clock() - began < 2.0
    assert {handle.phase for handle in request.receives} == {Phase.FAILED}
    assert any("the user went away" in str(handle.error) for handle in request.receives)
    assert isinstance(request.sends[0].error, AbortedError)
    rig.quiet()


def test_a_room_of_a_rank_that_was_replaced_is_refused() -> None:
    """Its engine opens no room any more, so nothing is parked."""
    loop = Loop(superseded=SupersededError("P", 0, "elsewhere"))
    one = arrivals(loop)
    one.answer(expect())
    (sent,) = loop.sent
    assert isinstance(sent.frame, f.Abort)
    assert "lives elsewhere" in sent.frame.reason
    assert one.parked(ROOM) == []


def test_an_abort_that_is_repeated_keeps_the_room_over() -> None:
    """Prefill's thread is late, so decode says again that it has given up: prefill learns why as it opens the room."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 8).start().landed()
    request = rig.request("room", prefills, decodes, 8).open_decode()
    request.receives[0].abort("nobody reads it")
    prefills[0].frozen = True
    rig.wait(1.0)
    prefills[0].frozen = False
    rig.wait(1.0)
    request.open_prefill()
    rig.wait(0.1)
    assert request.sends[0].phase is Phase.FAILED
    assert "nobody reads it" in str(request.sends[0].error)
