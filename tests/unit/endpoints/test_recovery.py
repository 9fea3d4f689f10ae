"""A prefill that fails a request is replaced, or not, as the engine chose; pages are never given to two prefills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import (
    Attempt,
    Expectation,
    Fail,
    PeerInfo,
    RecoveringReceiver,
    Recovery,
    Report,
    Retry,
    attempt_id,
)
from disagg_kv.errors import (
    AbortedError,
    ConfigurationError,
    DeadlineError,
    DisaggKVError,
    LocalProtocolError,
    PeerLostError,
)
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import Epoch, GroupId, RoomId
from disagg_kv.rendezvous import Source
from disagg_kv.testing import FakeClock
from tests.support.rig import Decodes, Prefills, Request, Rig, put, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
QUICK = Options(silence_s=5.0, closed_s=1.0, total_s=60.0)
ROOM = RoomId(b"room")


class Held:
    """A reception that the test moves."""

    def __init__(self, room: RoomId) -> None:
        self.room = room
        self.phase = Phase.CONNECTING
        self.released = False
        self.error: DisaggKVError | None = None
        self.report = Report()
        self.aborted = ""

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        """Nothing is held."""
        return {}

    def abort(self, reason: str) -> None:
        """Noted."""
        self.aborted = reason


class Stub:
    """A receiver of such rooms."""

    def __init__(self) -> None:
        self.rooms: list[Held] = []
        self.refuse = self.closed = False
        self.confirmed: list[Epoch | str] = []

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        silence_s: float | None = None,
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Held:
        """One more, unless it is told to refuse."""
        if self.refuse:
            raise ConfigurationError("no more rooms")
        self.rooms.append(Held(room))
        return self.rooms[-1]

    def poll(self) -> Sequence[Held]:
        """All of them."""
        return self.rooms

    def peers(self) -> Sequence[PeerInfo]:
        """None."""
        return ()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """Noted."""
        self.confirmed.append(epoch)

    def close(self, drain_s: float = 5.0) -> None:
        """Noted."""
        self.closed = True


class World:
    """Two prefill instances and a decode instance with a policy on each rank."""

    def __init__(self, policy: Recovery, tp: int = 1) -> None:
        self.rig = Rig(SPEC, options=QUICK)
        self.first: Prefills = self.rig.prefill(tp_shards(SPEC, 2), "P", strategy="staged", slot_bytes=512)
        self.second: Prefills = self.rig.prefill(tp_shards(SPEC, 1), "Q", strategy="staged", slot_bytes=512)
        self.decodes: Decodes = self.rig.decode(tp_shards(SPEC, tp), strategy="staged")
        self.ends = [RecoveringReceiver(m.endpoint, policy, options=QUICK, clock=self.rig.clock) for m in self.decodes]
        self.tables = [m.take(24) for m in self.decodes]
        self.truth = self.rig.truth(24)
        self.rooms = [end.open(ROOM, Source("P")) for end in self.ends]
        for room, table in zip(self.rooms, self.tables, strict=True):
            room.expect(Expectation(24, [table]))

    def send(self, prefills: Prefills, name: str, stop: int = 24, attempt: int = 1) -> Request:
        """A prefill instance computes the request and hands it over, or the first rows of it."""
        request = self.rig.request("room", prefills, self.decodes, 24, name, attempt)
        request.truth = self.truth
        request.open_prefill().send(stop)
        return request.finish() if stop == 24 else request

    def until(self, phase: Phase) -> None:
        """Poll until every rank has ended so and is released."""

        def good() -> bool:
            for end in self.ends:
                end.poll()
            return all(room.released for room in self.rooms)

        self.rig.until(good, "the room")
        assert {room.phase for room in self.rooms} == {phase}, [str(room.error) for room in self.rooms]

    def check(self) -> None:
        """Decode's pools hold the request and nothing else."""
        for member, table in zip(self.decodes, self.tables, strict=True):
            put(member.want, table, 0, 24, self.truth)
        for member in self.decodes:
            member.check()


@pytest.mark.parametrize("tp", [1, 2])
def test_another_prefill_sends_what_a_killed_one_did_not(tp: int) -> None:
    """The request completes with its own bytes, on every rank; the second attempt begins after the release."""
    asked: list[Attempt] = []

    def place(failed: Attempt) -> Source:
        asked.append(failed)
        return Source("Q")

    world = World(Retry(place), tp)
    world.send(world.first, "P", 12)
    world.rig.until(lambda: all(room.report.nbytes for room in world.rooms), "a part of it")
    for member in world.first:
        member.crash()
    world.send(world.second, "Q", attempt=2)
    world.until(Phase.DONE)
    second = attempt_id(ROOM, 2)
    assert [(a.number, a.source, a.room, a.next_id) for a in asked] == [(1, Source("P"), ROOM, second)] * tp
    assert {room.room for room in world.rooms} == {ROOM}
    assert any(isinstance(a.error, PeerLostError) for a in asked)
    assert {(room.attempts, room.source, room.error) for room in world.rooms} == {(2, Source("Q"), None)}
    world.check()
    assert all(not end.poll() for end in world.ends)


def test_without_a_policy_of_its_own_the_first_failure_is_the_rooms() -> None:
    world = World(Fail())
    world.send(world.first, "P", 12)
    world.first[0].crash()
    world.until(Phase.FAILED)
    (room,) = world.rooms
    assert isinstance(room.error, PeerLostError)
    assert room.attempts == 1


def test_a_request_for_a_prefill_that_is_known_to_be_dead_fails_fast() -> None:
    """From the second on: within the time that a broken connection may take to come back, not after the silence."""
    world = World(Fail())
    world.send(world.first, "P", 12)
    world.rig.until(lambda: world.rooms[0].report.nbytes > 0, "a part of it")
    for member in world.first:
        member.crash()
    world.until(Phase.FAILED)
    began = world.rig.clock()
    (end,) = world.ends
    again = end.open(RoomId(b"again"), Source("P"))
    world.rooms = [again]
    world.until(Phase.FAILED)
    assert isinstance(again.error, PeerLostError)
    assert world.rig.clock() - began < QUICK.closed_s + 0.5 < QUICK.silence_s


def test_attempts_are_bounded() -> None:
    """And the last error is the room's."""
    world = World(Retry(lambda failed: Source("P"), attempts=2))
    for member in world.first:
        member.crash()
    world.until(Phase.FAILED)
    (room,) = world.rooms
    assert room.attempts == 2
    assert isinstance(room.error, PeerLostError)
    with pytest.raises(ConfigurationError, match="attempts must be at least 1, not 0"):
        Retry(lambda failed: None, attempts=0)


def test_nobody_left_to_send_it_ends_the_room() -> None:
    world = World(Retry(lambda failed: None))
    for member in world.first:
        member.crash()
    world.until(Phase.FAILED)
    assert world.rooms[0].attempts == 1


def test_the_rooms_time_counts_over_all_attempts() -> None:
    """It is over before a further attempt could begin."""
    rig = Rig(SPEC, options=QUICK)
    (member,) = rig.decode(tp_shards(SPEC, 1))
    asked: list[int] = []

    def place(failed: Attempt) -> Source:
        asked.append(failed.number)
        return Source("nobody")

    end = RecoveringReceiver(member.endpoint, Retry(place, 1000), options=QUICK, clock=rig.clock)
    room = end.open(ROOM, Source("nobody"), total_s=12.0)
    rig.until(lambda: bool(end.poll()) and room.released, "the end")
    assert room.phase is Phase.FAILED
    assert isinstance(room.error, DeadlineError)
    assert rig.clock() < 14.0


def test_what_the_engine_gives_up_is_not_sent_again() -> None:
    """Whether an attempt is under way, or the next one is about to begin."""
    world = World(Retry(lambda failed: Source("Q")))
    (room,) = world.rooms
    room.abort("changed my mind")
    world.until(Phase.FAILED)
    assert isinstance(room.error, AbortedError)
    assert room.attempts == 1


def test_an_attempt_begins_only_when_the_one_before_has_given_the_pages_back() -> None:
    """Until then it is neither failed nor released for the engine, which may still give it up."""
    clock = FakeClock()
    inner = Stub()
    end = RecoveringReceiver(inner, Retry(lambda failed: Source("Q")), clock=clock)
    room = end.open(ROOM, Source("P"))
    inner.rooms[0].phase, inner.rooms[0].error = Phase.FAILED, PeerLostError("gone")
    assert end.poll() == []
    assert (room.phase, room.released, room.error, len(inner.rooms)) == (Phase.CONNECTING, False, None, 1)
    room.abort("enough")
    assert isinstance(room.error, AbortedError)
    assert end.poll() == [room]
    inner.rooms[0].released = True
    assert end.poll() == [room]
    assert (room.released, len(inner.rooms)) == (True, 1)


def test_an_attempt_that_cannot_begin_ends_the_room_and_time_may_run_out_meanwhile() -> None:
    for late, wanted in ((0.0, ConfigurationError), (1e6, DeadlineError)):
        clock, inner = FakeClock(), Stub()
        end = RecoveringReceiver(inner, Retry(lambda failed: Source("Q")), clock=clock)
        room = end.open(ROOM, Source("P"))
        inner.rooms[0].phase, inner.rooms[0].error = Phase.FAILED, PeerLostError("gone")
        end.poll()
        clock.advance(late)
        inner.rooms[0].released, inner.refuse = True, True
        assert end.poll() == [room]
        assert isinstance(room.error, wanted)
        assert room.released


def test_a_room_is_open_once_and_awaited_once() -> None:
    inner = Stub()
    end = RecoveringReceiver(inner, Fail())
    room = end.open(ROOM, Source("P"))
    with pytest.raises(LocalProtocolError, match="open already"):
        end.open(ROOM, Source("P"))
    room.expect(Expectation(None, []))
    with pytest.raises(LocalProtocolError, match="called already"):
        room.expect(Expectation(None, []))
    end.confirm_terminated(Epoch(bytes(16)))
    assert (inner.confirmed, room.report) == ([bytes(16)], inner.rooms[0].report)
    end.close(0.0)
    assert (inner.closed, inner.rooms[0].aborted) == (True, "the endpoint closes")


def test_a_policy_that_raises_ends_its_room_alone() -> None:
    """What became of the other rooms is told by the same call."""

    class Broken:
        def again(self, failed: Attempt) -> Source | None:
            if failed.room == ROOM:
                raise OSError("no router")
            return None

    stub = Stub()
    receiver = RecoveringReceiver(stub, Broken(), clock=FakeClock())
    rooms = [receiver.open(room, Source("P")) for room in (RoomId(b"first"), ROOM, RoomId(b"last"))]
    for held in stub.rooms:
        held.phase, held.released, held.error = Phase.FAILED, True, AbortedError("gone")
    assert receiver.poll() == rooms
    assert [str(room.error) for room in rooms] == [
        "gone",
        f"room {ROOM.decode()}: the policy failed after attempt 1: no router",
        "gone",
    ]
    assert all(room.released for room in rooms)


def test_each_attempt_has_an_id_of_its_own() -> None:
    """No two requests have one in common; an id that is too long is refused before anything begins."""
    requests = [RoomId(name) for name in (b"r", b"r~", b"r~attempt", b"x" * 48)]
    ids = [attempt_id(request, number) for request in requests for number in (1, 2, 3, 10, 22, 10**6)]
    assert len(set(ids)) == len(ids)
    assert all(1 <= len(room) <= 64 for room in ids)
    assert [attempt_id(request, 1) for request in requests] == requests
    assert attempt_id(RoomId(b"x" * 64), 1) == b"x" * 64
    for request, number, why in (
        (b"x" * 49, 2, "at most 48"),
        (b"x" * 65, 1, "room id"),
        (b"", 1, "room id"),
        (b"r", 0, "attempt"),
        (attempt_id(RoomId(b"r"), 2), 2, "later attempt itself"),
        (attempt_id(RoomId(b"r"), 2), 1, "later attempt itself"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            attempt_id(RoomId(request), number)
    stub = Stub()
    with pytest.raises(ConfigurationError, match="at most 48"):
        RecoveringReceiver(stub, Fail()).open(RoomId(b"x" * 49), Source("P"))
    assert not stub.rooms


def test_every_attempt_opens_the_id_that_its_policy_was_given() -> None:
    asked: list[RoomId] = []

    def place(failed: Attempt) -> Source:
        asked.append(failed.next_id)
        return Source("Q")

    stub = Stub()
    end = RecoveringReceiver(stub, Retry(place, 3), clock=FakeClock())
    end.open(ROOM, Source("P"))
    for _ in range(3):
        held = stub.rooms[-1]
        held.phase, held.released, held.error = Phase.FAILED, True, PeerLostError("gone")
        end.poll()
    assert [held.room for held in stub.rooms] == [ROOM, *asked]
    assert asked == [attempt_id(ROOM, 2), attempt_id(ROOM, 3)]
