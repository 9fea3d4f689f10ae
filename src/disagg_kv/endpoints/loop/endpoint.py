"""The base of both endpoints: rooms by name, changes for the engine, peers, and the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, islice
from typing import Generic, Literal, TypeVar
from weakref import WeakValueDictionary

from attrs import evolve

from ... import arguments
from ...core import Alone, Phase, RoomKey
from ...errors import DisaggKVError, LocalProtocolError, text_of
from ...ids import Epoch, Generation, RoomId, room_name
from ..handle import ChangeQueue, RoomHandle
from ..peers.handshake import EndpointInfo
from ..status import EndpointStatus, PeerInfo, RoomInfo, Usage
from .construction import Parts, helpers
from .driver import Driver
from .event_loop import EventLoop
from .side import Side

H = TypeVar("H", bound=RoomHandle)
S = TypeVar("S", bound=Side)


class UsedIds(Generic[H]):
    """The handles of rooms, by id, and the ids that were used last. The engine's thread alone changes them.

    A room that is not released keeps its id while its handle lives. Of other ids the last ``most`` are remembered. The
    protocol copes with an older id that is used again: the ranks of the instance agree on the new room, or it fails.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: OrderedDict[RoomId, None] = OrderedDict()
        self._handles: WeakValueDictionary[RoomId, H] = WeakValueDictionary()

    def check(self, room: RoomId) -> None:
        """Raise unless a room may be opened under this id.

        Raises:
            LocalProtocolError: the id was used before.
        """
        last = self._handles.get(room)
        if last is not None and not last.released:
            raise LocalProtocolError(f"{room_name(room)} is open already")
        if room in self._used:
            raise LocalProtocolError(
                f"{room_name(room)} was used already; a retry has its own id, see disagg_kv.endpoints.attempt_id"
            )

    def add(self, room: RoomId, handle: H) -> None:
        """A room is opened."""
        self._handles[room] = handle
        self._used[room] = None
        if len(self._used) > self._most:
            self._used.popitem(last=False)

    def get(self, room: RoomId) -> H | None:
        """The handle of a room, while the engine has it."""
        return self._handles.get(room)

    def handles(self) -> list[H]:
        """From any thread: every handle that the engine still has."""
        return [handle for ref in self._handles.valuerefs() if (handle := ref()) is not None]


class Endpoint(ABC, Generic[H, S]):
    """Holds the loop, the thread that steps it, and the handles of one rank.

    Args:
        parts: the arguments of the constructor, checked.
        me: how the endpoint introduces itself.
        side: creates the side, prefill or decode, from the loop and the queue that takes changed handles.
    """

    def __init__(
        self,
        parts: Parts,
        me: EndpointInfo,
        side: Callable[[EventLoop, ChangeQueue[H]], S],
    ) -> None:
        self._pool = parts.pool
        self._options = parts.options
        self._generations = count(1)
        self._ids: UsedIds[H] = UsedIds(parts.options.tombstones)
        self._changes: ChangeQueue[H] = ChangeQueue()

        def build(loop: EventLoop) -> S:
            self._side = side(loop, self._changes)
            return self._side

        environment = parts.environment
        self._loop = EventLoop(
            me,
            parts.channel,
            parts.rendezvous,
            parts.options,
            parts.observer,
            environment.clock,
            environment.sleep,
            partial(helpers, environment),
            build,
        )
        name = f"disagg_kv {me.instance}/{me.rank}"
        self.driver = Driver(self._loop, name, self._break_down, thread=environment.thread, engine=environment.engine)

    def __repr__(self) -> str:
        return arguments.brief(self, self._text)

    def _text(self) -> str:
        me, rooms = self._loop.me, self._rooms().total()
        return f"{arguments.shown(me.instance)} rank {me.rank}: {self._state()}, {rooms} rooms not released"

    def _state(self) -> Literal["open", "closed", "broken"]:
        if self.driver.broken is not None:
            return "broken"
        return "closed" if self.driver.closed else "open"

    @property
    def decides_alone(self) -> bool:
        """Whether ranks of its instance may see different outcomes of a room."""
        return len(self._loop.me.shards) > 1 and self._loop.me.verdict is Alone

    @property
    def closed(self) -> bool:
        """True once ``close`` has begun: no other call is accepted any more."""
        return self.driver.closed

    def poll(self) -> Sequence[H]:
        """Return the rooms whose ``phase`` or ``released`` changed since the last call.

        An engine calls it once per step. There is one entry per room, whose ``phase`` and ``released`` stay as they are
        until the next call.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
        """
        self._loop.home.check()
        self.driver.drive()
        if self.driver.broken is not None:
            raise self.driver.broken
        return self._changes.take()

    def wait(self, timeout_s: float) -> bool:
        """Advance the endpoint on the calling thread until ``poll`` has something; False: it had nothing in that time.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
        """
        wanted = arguments.seconds(timeout_s, "timeout_s", zero=True)
        if self.driver.broken is not None:
            raise self.driver.broken
        return self.driver.wait(wanted, lambda: bool(self._changes) or self.driver.broken is not None)

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``poll`` has something to return or to raise.

        ``select``, ``epoll`` and asyncio's ``add_reader`` take the endpoint as it is.

        It is created by the first call; without one it costs nothing. ``poll`` makes it unreadable, and may return
        nothing after all. Only wait for it: do not read or close it. It stays open as long as the endpoint object
        exists, also after ``close``.

        Raises:
            LocalProtocolError: this is a forked child of the process that has the endpoint.
        """
        self._loop.home.check()
        descriptor = self._changes.fileno()
        if self.driver.broken is not None:  # perhaps before the endpoint's thread could see the descriptor
            self._changes.wake_engine()
        return descriptor

    def peers(self) -> Sequence[PeerInfo]:
        """Return every peer that is connected or still holds memory here. Any thread may call it."""
        return self._loop.sessions.listed()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """Declare that the process of a peer has ended: evidence that memory held for it may be reused.

        Args:
            epoch: the peer's epoch, as in :class:`~disagg_kv.endpoints.PeerInfo`; or its 32 hex digits.

        Raises:
            UnknownNameError: no such epoch is known; the message lists those that hold memory here.
        """
        named = epoch if isinstance(epoch, str) else Epoch(arguments.epoch(epoch))
        self.driver.check("confirm_terminated")
        found = self._loop.sessions.find(named)
        self.driver.post(partial(self._loop.confirm_terminated, found), "confirm_terminated")

    def close(self, drain_s: float = 5.0) -> None:
        """Abort the open rooms, wait at most ``drain_s`` seconds for writes in flight, and stop.

        Peers learn it at once, and a second call is harmless. Pages that a write may still read then stay unreleased.

        Raises:
            LocalProtocolError: this is a forked child of the process that has the endpoint; nothing is closed.
            TransportError: the transport could not be closed; everything else is closed.
        """
        self.driver.close(drain_s)
        self._changes.show_live()

    @property
    def open_rooms(self) -> int:
        """Rooms that are still kept: open ones, and ended ones that wait for evidence or a last answer."""
        return self._side.open_rooms

    def _rooms(self) -> Counter[Phase]:
        """By phase, the rooms that are not released. From any thread."""
        states = (handle.state for handle in self._ids.handles())
        return Counter(phase for phase, released in states if not released)

    def usage(self) -> Usage:
        """Return rooms by phase, staging memory and links. Any thread may call it."""
        peers = self._loop.peers
        most = int(min(peers.budget.most, self._options.peers))
        return evolve(self._memory(), rooms=self._rooms(), links=len(peers), links_most=most)

    @abstractmethod
    def _memory(self) -> Usage:
        """What it keeps in its ring or slots, without rooms and links. From any thread."""

    def status(self, rooms: int) -> EndpointStatus:
        """Return its state, memory, peers, and at most ``rooms`` rooms. Any thread may call it, after ``close`` too."""
        me, now = self._loop.me, self._loop.clock()
        most = arguments.count(rooms, "rooms")
        live = (handle for handle in self._ids.handles() if not handle.state[1])
        found = tuple(_shown(handle, now) for handle in islice(live, most))
        peers = tuple(self.peers())
        return EndpointStatus(me.role, me.instance, me.rank, me.address, self._state(), self.usage(), found, peers)

    def inspect(self) -> S:
        """What it knows, live, for tests and for the simulator, which look at it between two steps and change nothing.

        Call it on the thread that steps the endpoint.
        """
        return self._side

    def _new_key(self, room: RoomId) -> RoomKey:
        """The key of a room that may be opened now.

        Raises:
            LocalProtocolError: the id was used before.
            SupersededError: another process has taken the place of this rank.
        """
        self._ids.check(room)
        if (superseded := self._loop.ranks.superseded) is not None:
            raise superseded.about(room_name(room))
        return RoomKey(room, Generation(next(self._generations)))

    def _break_down(self, error: DisaggKVError) -> None:
        """Endpoint's thread, at its end: rooms that have not ended fail, if the engine still has their handles."""
        self._changes.break_down(self._ids.handles(), error)


def _shown(handle: RoomHandle, now: float) -> RoomInfo:
    """A room, from any thread."""
    report, error = handle.report, handle.error
    age_s = None if report.opened is None else max(0.0, now - report.opened)
    why = "" if error is None else text_of(error)
    return RoomInfo(handle.room, handle.state[0], age_s, report.path, report.nbytes, report.segments, why)
