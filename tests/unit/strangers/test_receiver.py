"""A receiver that another project wrote against the Protocol alone: it begins only a few rooms at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation, Fail, PeerInfo, Receiver, Reception, RecoveringReceiver, Report
from disagg_kv.errors import AbortedError, ConfigurationError, DisaggKVError, GeometryError, LocalProtocolError
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import Epoch, GroupId, RoomId
from disagg_kv.rendezvous import Source
from disagg_kv.testing.receiver import ReceiverSuite
from tests.support.rig import Memory, Request, Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
MOST = 2


class QueuedRoom:
    """A room that may have to wait for its turn."""

    def __init__(self, room: RoomId, begin: Callable[[], Reception]) -> None:
        self.room = room
        self.inner: Reception | None = None
        self.seen = Phase.CONNECTING, False
        self._begin = begin
        self._expected: Expectation | None = None
        self._error: DisaggKVError | None = None
        self._report = Report()

    @property
    def phase(self) -> Phase:
        if self.inner is not None:
            return self.inner.phase
        return Phase.CONNECTING if self._error is None else Phase.FAILED

    @property
    def released(self) -> bool:
        return self._error is not None if self.inner is None else self.inner.released

    @property
    def error(self) -> DisaggKVError | None:
        return self._error if self.inner is None else self._error or self.inner.error

    @property
    def report(self) -> Report:
        return self._report if self.inner is None else self.inner.report

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        if any(expectation.held.values()):
            raise ConfigurationError(f"room {self.room.hex()}: this receiver takes no held prefix")
        if self.inner is not None:
            return self.inner.expect(expectation)
        self._expected = expectation
        return {table.group: 0 for table in expectation.pages}

    def abort(self, reason: str) -> None:
        if self.inner is not None:
            self.inner.abort(reason)
        elif self._error is None:
            self._error = AbortedError(f"room {self.room.hex()}: {reason}")

    def start(self) -> None:
        """Its turn has come. What the endpoint says of its arguments ends it."""
        try:
            self.inner = self._begin()
            if self._expected is not None:
                self.inner.expect(self._expected)
        except DisaggKVError as error:
            self._error = error
            self.abort(str(error))


class FewAtOnce:
    """At most ``most`` rooms of a receiver at a time; the others wait in the order in which they were opened."""

    def __init__(self, inner: Receiver, most: int) -> None:
        self.rooms: dict[RoomId, QueuedRoom] = {}
        self._inner = inner
        self._most = most
        self._closed = False

    @property
    def begun(self) -> int:
        return sum(room.inner is not None for room in self.rooms.values())

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> QueuedRoom:
        if self._closed or room in self.rooms:
            raise LocalProtocolError(f"room {room.hex()}: {'closed' if self._closed else 'open already'}")
        times = {"total_s": total_s, "claim_s": claim_s}
        begin = partial(self._inner.open, room, source, tag=tag, **times)
        made = self.rooms[room] = QueuedRoom(room, begin)
        self._admit()
        return made

    def _admit(self) -> None:
        for room in self.rooms.values():
            if self.begun < self._most and room.inner is None and room.error is None:
                room.start()

    def poll(self) -> Sequence[QueuedRoom]:
        self._inner.poll()
        changed = [room for room in self.rooms.values() if room.seen != (room.phase, room.released)]
        for room in changed:
            room.seen = room.phase, room.released
            if room.released:
                del self.rooms[room.room]
        self._admit()
        return changed

    def peers(self) -> Sequence[PeerInfo]:
        return self._inner.peers()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        self._inner.confirm_terminated(epoch)

    def close(self, drain_s: float = 5.0) -> None:
        self._closed = True
        for room in self.rooms.values():
            room.abort("the receiver closes")
        self._inner.close(drain_s)


class TestFewAtOnce(ReceiverSuite):
    """The suite that the library's receivers pass."""

    def receiver(self, inner: Receiver) -> Receiver:
        return FewAtOnce(inner, MOST)


class Requests:
    """Rooms of two prefill ranks for a decode rank whose engine opens them through a receiver."""

    def __init__(self, wrap: Callable[[Receiver, Rig], Receiver], rooms: int) -> None:
        self.rig = Rig(SPEC)
        self.prefills = self.rig.prefill(tp_shards(SPEC, 2), memory=Memory(4, 128))
        self.decodes = self.rig.decode(tp_shards(SPEC, 1), memory=Memory(8, 64))
        self.few = FewAtOnce(wrap(self.decodes[0].endpoint, self.rig), MOST)
        self.most_open = 0
        self.told: list[QueuedRoom] = []
        self.of = [self.begin(f"room {number}") for number in range(rooms)]

    def begin(self, name: str) -> Request:
        """A request that both sides' engines have done all for."""
        one = self.rig.request(name, self.prefills, self.decodes, 37)
        return one.open_through([self.few]).expect(37).open_prefill().send(37).finish()

    def end(self, rooms: int) -> None:
        """Decode's engine polls until it was told of so many released rooms."""

        def turn() -> bool:
            self.told += [room for room in self.few.poll() if room.released]
            self.most_open = max(self.most_open, self.decodes[0].endpoint.open_rooms)
            return len(self.told) == rooms

        self.rig.until(turn)

    def landed(self, of: Sequence[Request]) -> None:
        """These requests have their bytes, and nothing else was written."""
        for one in of:
            one.released().done()
        self.rig.check()
        self.rig.quiet()


def plain(inner: Receiver, rig: Rig) -> Receiver:
    return inner


def recovering(inner: Receiver, rig: Rig) -> Receiver:
    return RecoveringReceiver(inner, Fail(), clock=rig.clock)


@pytest.mark.parametrize("wrap", [plain, recovering])
def test_few_rooms_at_a_time_all_arrive(wrap: Callable[[Receiver, Rig], Receiver]) -> None:
    """In order, over an endpoint or over the library's own layer; each is told of once when it is released."""
    requests = Requests(wrap, 7)
    requests.end(len(requests.of))
    assert [room.room for room in requests.told] == [one.room for one in requests.of]
    requests.landed(requests.of)
    assert requests.most_open == MOST
    assert not requests.few.rooms
    assert [info.state for info in requests.few.peers()] == ["connected", "connected"]


def test_a_room_that_waits_can_be_given_up() -> None:
    """It is released at once, the endpoint never hears of it, and the next one takes its turn."""
    requests = Requests(plain, 4)
    given_up, others = requests.of[2], [*requests.of[:2], requests.of[3]]
    given_up.receives[0].abort("not needed")
    for delivery in given_up.sends:
        delivery.abort("not needed")
    assert isinstance(given_up.receives[0].error, AbortedError)
    assert given_up.receives[0].released
    requests.end(len(requests.of))
    requests.landed(others)


def test_an_argument_that_is_refused_late_ends_its_room_alone() -> None:
    """The endpoint sees what a waiting room awaits when its turn comes."""
    requests = Requests(plain, 2)
    wrong = requests.few.open(RoomId(b"wrong"), Source("P"))
    wrong.expect(Expectation(37, [PageTable(GroupId("kv"), [0])]))
    requests.of.append(requests.begin("last"))
    requests.end(4)
    assert wrong.phase is Phase.FAILED
    assert isinstance(wrong.error, GeometryError)
    requests.landed(requests.of)


def test_closing_ends_the_rooms_that_wait() -> None:
    """And none is opened after it."""
    requests = Requests(plain, 3)
    requests.few.close(0.0)
    waiting = requests.of[2].receives[0]
    assert (waiting.phase, waiting.released) == (Phase.FAILED, True)
    with pytest.raises(LocalProtocolError):
        requests.few.open(RoomId(b"late"), Source("P"))
