"""What every :class:`~disagg_kv.endpoints.Receiver` must do: a suite to inherit.

::

    class TestMine(ReceiverSuite):
        def receiver(self, inner):
            return MyReceiver(inner)

``inner`` is a decode endpoint of this process. The suite also steps a prefill endpoint, or lets it stand still.
Needs pytest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest

from ..channels import Hub, InprocChannel
from ..core import Options, Phase
from ..endpoints import DecodeEndpoint, Delivery, Environment, Expectation, PrefillEndpoint, Receiver, Reception
from ..endpoints.decode.handle import ReceptionHandle
from ..errors import (
    AbortedError,
    ConfigurationError,
    DisaggKVError,
    GeometryError,
    LocalProtocolError,
    UnknownNameError,
)
from ..geometry import CacheSpec, PageTable, shard
from ..ids import KV, Epoch, RoomId
from ..memory import U8, PagedPool, bytes_of
from ..rendezvous import Source, StaticRendezvous
from ..transports import InprocTransport
from .pair import wait

SPEC = CacheSpec.kv(2, 4, 8, "float16")
PAGE_SIZE, ROWS = 16, 40
"""A request has ``ROWS`` rows in three pages."""

STILL_S = 0.1
"""Seconds for which a test watches that nothing happens."""

SOON_S = 0.3
"""The time of a room that is to run out of it."""

FINAL = (Phase.DONE, Phase.FAILED)


class Noting(DecodeEndpoint):
    """A decode endpoint that notes how rooms are opened: ``begun`` has the arguments of each call."""

    begun: list[tuple[RoomId, Source, dict[str, Any]]]

    def open(self, room: RoomId, source: Source, **limits: Any) -> ReceptionHandle:
        """See :meth:`~disagg_kv.endpoints.api.Receiver.open`."""
        self.begun.append((room, source, limits))
        return super().open(room, source, **limits)


class Exchange:
    """A receiver under test over a decode endpoint, and a prefill endpoint that is stepped by ``work``.

    Args:
        wrap: makes the receiver.
        timeout_s: how long anything may take.
        rooms: for which there are pages.
    """

    def __init__(self, wrap: Callable[[Receiver], Receiver], timeout_s: float, rooms: int = 4) -> None:
        self.pages = 3 * rooms
        hub, where, options = Hub(), StaticRendezvous(), Options(silence_s=60.0, total_s=60.0, retry_s=0.02)
        self.source, self.target = (
            PagedPool.allocate(SPEC, shard(SPEC), pages=self.pages, page_size=PAGE_SIZE) for _ in range(2)
        )
        for buffer in self.source.buffers:
            bytes_of(buffer)[:] = np.random.default_rng(1).integers(0, 256, buffer.nbytes, np.uint8)
        self.sender = PrefillEndpoint(
            self.source, transport=InprocTransport(), channel=InprocChannel(hub, "P"), rendezvous=where, instance="P",
            options=options, environment=Environment(thread=False, engine=False),
        )  # fmt: skip
        self.inner = Noting(
            self.target, transport=InprocTransport(), channel=InprocChannel(hub, "D"), rendezvous=where, instance="D",
            strategy="slice", options=options, ring_bytes=1 << 16,
        )  # fmt: skip
        self.inner.begun = []
        self.receiver = wrap(self.inner)
        self.timeout_s = timeout_s
        self.opened: list[Reception] = []
        self.released: list[Reception] = []
        self.steps_prefill = True
        self._names = count()

    def open(self, source: str = "P", **limits: Any) -> Reception:
        """A new room; ``poll`` may return it from now on."""
        name = RoomId(b"room %d" % next(self._names))
        self.opened.append(self.receiver.open(name, Source(source), **limits))
        assert self.opened[-1].room == name
        return self.opened[-1]

    def expecting(self, source: str = "P", **limits: Any) -> Reception:
        """A new room, which awaits its rows."""
        room = self.open(source, **limits)
        room.expect(Expectation(ROWS, self.tables(room)))
        return room

    def tables(self, room: Reception) -> list[PageTable]:
        """The pages of a room, the same on both sides."""
        first = 3 * int(room.room.split()[1])
        return [PageTable(KV, [first + 2, first, first + 1])]

    def fill(self, begins: int) -> None:
        """Open as many rooms as are begun at once, which await their rows; the next one waits."""
        for _ in range(begins):
            self.expecting()

    def wait(self, **limits: Any) -> Reception:
        """A new room that waits."""
        room = self.open(**limits)
        assert not self.begins(room), "begins is smaller than the number of rooms that are begun at once"
        assert (room.phase, room.released, room.error) == (Phase.CONNECTING, False, None)
        return room

    def begins(self, room: Reception) -> list[list[Any]]:
        """The arguments of each time that the endpoint was asked to open the room."""
        return [more for name, *more in self.inner.begun if name == room.room]

    def deliver(self, room: Reception, tag: bytes = b"") -> Delivery:
        """Prefill opens the room, and hands over all of it."""
        delivery = self.sender.open(room.room, tag=tag)
        delivery.send_chunk(ROWS, self.tables(room))
        delivery.finish(ROWS)
        return delivery

    def step(self) -> None:
        """A step of prefill, unless it stands still."""
        if self.steps_prefill:
            self.sender.driver.step()
            self.sender.poll()

    def poll(self) -> None:
        """The engine polls: it gets rooms of its own, and no room twice."""
        polled = list(self.receiver.poll())
        assert all(any(one is room for room in self.opened) for one in polled), "poll returned what open has not"
        assert len({id(one) for one in polled}) == len(polled), "poll returned a room twice in one call"
        self.released += [one for one in polled if one.released]

    def work(self) -> None:
        """Both sides go on."""
        self.step()
        self.poll()

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Work until ``done()``."""
        wait(done, self.work, self.timeout_s, what)

    def over(self, *rooms: Reception) -> None:
        """``poll`` returns these rooms once they are released, and then nothing more."""
        self.until(
            lambda: all(any(one is room for one in self.released) for room in rooms), "poll to return released rooms"
        )
        assert all(room.phase in FINAL for room in rooms)
        self.poll()  # what had changed while the last call looked
        before = len(self.released)
        self.watch(lambda: len(self.released) == before, "poll returns released rooms again")

    def watch(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Work for a while, in which something stays true."""
        until = time.monotonic() + STILL_S
        while time.monotonic() < until:
            self.work()
            assert holds(), otherwise
            time.sleep(0.001)

    def bytes_of(self, pool: PagedPool, room: Reception) -> list[U8]:
        """The rows of a room in one of the two pools, plane by plane."""
        of = self.tables(room)[0].pages
        size = pool.site.planes[0].row_stride
        found = []
        for plane in pool.site.planes:
            memory = bytes_of(pool.buffers[plane.buffer])
            at = plane.offset + of * plane.page_stride
            rows = np.concatenate([memory[a : a + PAGE_SIZE * size] for a in at.tolist()])
            found.append(rows[: ROWS * size])
        return found

    def arrived(self, room: Reception) -> bool:
        """Whether all bytes of a room are in its pages."""
        pairs = zip(self.bytes_of(self.source, room), self.bytes_of(self.target, room), strict=True)
        return all(np.array_equal(sent, found) for sent, found in pairs)

    def stuck(self) -> Reception:
        """A room whose prefill stands still while it may write to the room's pages."""
        room = self.expecting()
        delivery = self.sender.open(room.room)
        self.until(lambda: delivery.held is not None, "prefill to learn of the room")
        self.steps_prefill = False
        return room

    def close(self) -> None:
        """Whatever the test has left."""
        self.receiver.close(0.0)
        self.inner.close(0.0)
        self.sender.close(0.0)


class ReceiverSuite:
    """Promises of a receiver. Subclasses give ``receiver``; test methods are inherited.

    A test opens at most two rooms at a time: a receiver may refuse others. With ``begins``, more of them, which wait.
    """

    begins: ClassVar[int | None] = None
    """How many rooms the receiver begins at once, at least two, while others wait; None: it lets no room wait."""

    timeout_s: ClassVar[float] = 10.0
    """How long a room may take whose bytes have arrived, in seconds."""

    def receiver(self, inner: Receiver) -> Receiver:
        """The receiver under test, over an endpoint that it owns from now on."""
        raise NotImplementedError

    @pytest.fixture
    def two(self) -> Iterator[Exchange]:
        """A prefill endpoint, and the receiver over a decode endpoint."""
        made = Exchange(self.receiver, self.timeout_s, 2 + (self.begins or 2))
        try:
            yield made
        finally:
            made.close()

    @pytest.fixture
    def full(self, two: Exchange) -> Exchange:
        """The same, with as many rooms as are begun at once."""
        if self.begins is None:
            pytest.skip("begins is None: no room waits")
        two.fill(self.begins)
        return two

    # A room that is served.

    def test_rooms_are_carried(self, two: Exchange) -> None:
        """All bytes are there once a room is DONE, and poll returns the object that open returned."""
        rooms = [two.open() for _ in range(2)]
        for room in rooms:
            assert (room.phase in FINAL, room.released, room.error) == (False, False, None)
            assert room.expect(Expectation(ROWS, two.tables(room))) == {KV: 0}
            two.deliver(room)
        two.over(*rooms)
        for room in rooms:
            assert (room.phase, room.released, room.error) == (Phase.DONE, True, None)
            assert two.arrived(room)
            assert room.report.nbytes == sum(len(rows) for rows in two.bytes_of(two.target, room))

    def test_poll_loses_nothing(self, two: Exchange) -> None:
        """However long the engine does not poll, ``poll`` returns every room that ended meanwhile."""
        rooms = [two.expecting() for _ in range(2)]
        deliveries = [two.deliver(room) for room in rooms]
        wait(lambda: all(one.released for one in deliveries), two.step, two.timeout_s, "prefill to send the rooms")
        two.over(*rooms)
        assert all(two.arrived(room) for room in rooms)

    def test_an_end_is_final(self, two: Exchange) -> None:
        """A room that is DONE stays so, whatever the engine says of it later."""
        room = two.expecting()
        two.deliver(room)
        two.over(room)
        room.abort("too late")
        two.watch(lambda: (room.phase, room.released) == (Phase.DONE, True), "an abort has changed a room that is DONE")

    # A room that is given up.

    def test_a_room_that_awaits_nothing_yet_can_be_given_up(self, two: Exchange) -> None:
        """It fails with an AbortedError and is released, prefill learns of it, and the others go on."""
        room, other = two.open(), two.expecting()
        room.abort("not needed")
        room.abort("not needed")
        delivery = two.deliver(room)
        two.deliver(other)
        two.over(room, other)
        assert room.phase is Phase.FAILED
        assert isinstance(room.error, AbortedError)
        assert other.phase is Phase.DONE
        two.until(lambda: delivery.phase is Phase.FAILED and delivery.released, "prefill to learn that it is given up")

    def test_released_waits_for_the_last_write(self, two: Exchange) -> None:
        """As long as prefill may write to the pages of a failed room, it is not released; nothing is written after."""
        room = two.stuck()
        room.abort("not needed")
        two.until(lambda: room.phase is Phase.FAILED, "the room to fail")
        assert isinstance(room.error, AbortedError)
        two.watch(lambda: not room.released, "released although prefill may write to the pages")
        two.steps_prefill = True
        two.over(room)
        before = two.bytes_of(two.target, room)
        two.watch(lambda: True, "")
        assert all(map(np.array_equal, before, two.bytes_of(two.target, room)))

    def test_an_operator_confirms_an_end(self, two: Exchange) -> None:
        """``peers`` names the process that holds pages; once its end is confirmed the room is released."""
        room = two.stuck()
        room.abort("not needed")
        two.until(lambda: any(room.room in peer.rooms for peer in two.receiver.peers()), "peers to name the room")
        (peer,) = (peer for peer in two.receiver.peers() if room.room in peer.rooms)
        with pytest.raises(UnknownNameError):
            two.receiver.confirm_terminated(Epoch(b"unknown here...."))
        two.receiver.confirm_terminated(peer.epoch.hex())
        two.over(room)

    # A room that waits.

    def test_a_room_that_waits_begins_once_and_unchanged(self, full: Exchange) -> None:
        """Once a room before it has ended; until then its id is taken."""
        first, *others = full.opened
        limits = {"tag": b"mine", "total_s": 51.0, "claim_s": 52.0}
        room = full.wait(**limits)
        with pytest.raises(LocalProtocolError):
            full.receiver.open(room.room, Source("P"))
        assert room.expect(Expectation(ROWS, full.tables(room))) == {KV: 0}
        full.deliver(room, b"mine")
        full.deliver(first)
        full.until(lambda: room.released, "the room that waited to be carried")
        for other in others:
            full.deliver(other)
        full.over(first, room, *others)
        assert (room.phase, room.error) == (Phase.DONE, None)
        assert full.arrived(room)
        assert full.begins(room) == [[Source("P"), limits]], "a room that waited is not opened once, as it was given"

    def test_a_room_that_waits_counts_no_held_rows(self, full: Exchange) -> None:
        """Only the endpoint knows which rows count, and it has not begun: held rows are refused."""
        room = full.wait()
        with pytest.raises(ConfigurationError):
            room.expect(Expectation(ROWS, full.tables(room), held={KV: PAGE_SIZE}))

    def test_a_room_that_waits_can_be_given_up(self, full: Exchange) -> None:
        """It is released although no other room ends, poll returns it, and it never begins."""
        others, rooms = list(full.opened), [full.wait(), full.wait()]
        rooms[0].expect(Expectation(ROWS, full.tables(rooms[0])))
        for room in rooms:
            room.abort("not needed")
            room.abort("not needed")
        full.over(*rooms)
        for other in others:
            full.deliver(other)
        full.over(*others)
        for room in rooms:
            assert isinstance(room.error, AbortedError)
            assert not full.begins(room), "a room that was given up has begun"

    def test_close_ends_rooms_that_wait(self, full: Exchange) -> None:
        """They have failed and are released, and the next poll returns them."""
        rooms = [full.wait(), full.wait()]
        rooms[0].expect(Expectation(ROWS, full.tables(rooms[0])))
        full.receiver.close(0.0)
        full.poll()
        for room in rooms:
            assert (room.phase, room.released) == (Phase.FAILED, True), "close leaves a room that waits"
            assert any(one is room for one in full.released), "poll does not return a room that waited at close"
            assert isinstance(room.error, DisaggKVError)
            with pytest.raises(LocalProtocolError):
                room.expect(Expectation(ROWS, full.tables(room)))

    # A room that nothing comes for.

    def test_a_room_without_prefill_ends(self, two: Exchange) -> None:
        """Its time is ``total_s``: it fails, and is released."""
        nowhere, unserved = two.expecting("nowhere", total_s=SOON_S), two.expecting(total_s=SOON_S)
        two.over(nowhere, unserved)
        for room in (nowhere, unserved):
            assert room.phase is Phase.FAILED
            assert isinstance(room.error, DisaggKVError)

    # Arguments.

    def test_what_cannot_be_opened_is_refused(self, two: Exchange) -> None:
        """By ``open``, or by the room's error; the rooms that are open are not touched."""
        room = two.open()
        with pytest.raises(LocalProtocolError):
            two.receiver.open(room.room, Source("P"))
        for name, total_s in ((b"", None), (b"x" * 65, None), (b"late", -1.0)):
            try:
                refused = two.receiver.open(RoomId(name), Source("P"), total_s=total_s)
            except ConfigurationError:
                continue
            two.opened.append(refused)
            two.over(refused)
            assert isinstance(refused.error, ConfigurationError)
        room.expect(Expectation(ROWS, two.tables(room)))
        two.deliver(room)
        two.over(room)
        assert room.phase is Phase.DONE

    def test_pages_that_are_not_there_are_refused(self, two: Exchange) -> None:
        """By ``expect``, or by the room's error."""
        room = two.open()
        try:
            room.expect(Expectation(ROWS, [PageTable(KV, [two.pages])]))
        except GeometryError:
            room.abort("refused")
            two.over(room)
        else:
            two.over(room)
            assert isinstance(room.error, GeometryError)
        assert room.phase is Phase.FAILED

    def test_a_room_awaits_one_thing(self, two: Exchange) -> None:
        """A second ``expect`` is refused, and the first one holds."""
        room = two.expecting()
        with pytest.raises(LocalProtocolError):
            room.expect(Expectation(ROWS, two.tables(room)))
        two.deliver(room)
        two.over(room)
        assert two.arrived(room)

    # The end.

    def test_close_ends_all_rooms(self, two: Exchange) -> None:
        """Also one that awaits nothing yet, by the next poll; then nothing begins, and what is harmless stays so."""
        awaits, idle = two.expecting(), two.open()
        two.receiver.close(0.0)
        two.poll()
        for room in (awaits, idle):
            assert room.phase is Phase.FAILED
            assert isinstance(room.error, DisaggKVError)
            room.abort("too late")
        with pytest.raises(LocalProtocolError):
            two.receiver.open(RoomId(b"late"), Source("P"))
        with pytest.raises(LocalProtocolError):
            idle.expect(Expectation(ROWS, two.tables(idle)))
        two.receiver.peers()
        two.receiver.close(0.0)
