"""A receiver that begins a few rooms at once, while others wait; and plausible mistakes in it, one a class."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation, PeerInfo, Receiver, Reception
from disagg_kv.errors import AbortedError, ConfigurationError, DisaggKVError, LocalProtocolError
from disagg_kv.ids import Epoch, GroupId, RoomId
from disagg_kv.rendezvous import Source

MOST = 2
"""Rooms that are begun at once."""


class Delayed:
    """A room, which may wait."""

    def __init__(self, room: RoomId, begin: Callable[[], Reception], ended: Callable[[Delayed], None]) -> None:
        self.room = room
        self.inner: Reception | None = None
        self._begin = begin
        self._ended = ended
        self._error: DisaggKVError | None = None
        self._expectation: Expectation | None = None

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
        return self._error if self.inner is None else self.inner.error

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        if self.inner is not None:
            return self.inner.expect(expectation)
        if self._error is not None or self._expectation is not None:
            raise LocalProtocolError(f"{self.room!r} has ended, or awaits rows")
        if any(expectation.held.values()):
            raise ConfigurationError(f"{self.room!r} waits: it can count no held rows")
        self._expectation = expectation
        return {table.group: 0 for table in expectation.pages}

    def abort(self, reason: str) -> None:
        if self.inner is not None:
            self.inner.abort(reason)
        elif self._error is None:
            self.fail(AbortedError(reason))

    def fail(self, error: DisaggKVError) -> None:
        """It has not begun, and never will."""
        self._error = error
        self._ended(self)

    def begin(self) -> None:
        """Its turn has come."""
        try:
            self.inner = self._begin()
            if self._expectation is not None:
                self.inner.expect(self._expectation)
        except DisaggKVError as error:
            self.fail(error)


class Delaying:
    """See the module. Each mistake overrides one of the methods."""

    def __init__(self, inner: Receiver) -> None:
        self.inner = inner
        self.begun: list[Delayed] = []
        self.waiting: deque[Delayed] = deque()
        self.changed: list[Delayed] = []

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Reception:
        if any(one.room == room for one in self.waiting):
            raise LocalProtocolError(f"{room!r} waits")
        begin = partial(self.inner.open, room, source, tag=tag, total_s=total_s, claim_s=claim_s)
        made = self.room(room, begin)
        if len(self.begun) < MOST:
            made.inner = begin()
            self.begun.append(made)
        else:
            self.waiting.append(made)
        return cast("Reception", made)

    def room(self, room: RoomId, begin: Callable[[], Reception]) -> Delayed:
        """A handle."""
        return Delayed(room, begin, self.ended)

    def ended(self, room: Delayed) -> None:
        """A room that had not begun is over."""
        if room in self.waiting:
            self.waiting.remove(room)
        self.changed.append(room)

    def poll(self) -> Sequence[Reception]:
        changed = self.inner.poll()
        polled = [room for room in self.begun if any(room.inner is one for one in changed)]
        self.begun = [room for room in self.begun if room not in polled or not room.released]
        while self.waiting and len(self.begun) < MOST:
            room = self.next()
            room.begin()
            if room.inner is not None:
                self.begun.append(room)
        polled += self.changed
        self.changed = []
        return cast("Sequence[Reception]", polled)

    def next(self) -> Delayed:
        """The room whose turn it is, which waits no more."""
        return self.waiting.popleft()

    def peers(self) -> Sequence[PeerInfo]:
        return self.inner.peers()

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        self.inner.confirm_terminated(epoch)

    def close(self, drain_s: float = 5.0) -> None:
        self.inner.close(drain_s)
        for room in tuple(self.waiting):
            room.fail(AbortedError("closed"))


class TellsOfNoAbort(Delaying):
    """A room that waits and is given up is forgotten."""

    def ended(self, room: Delayed) -> None:
        self.waiting.remove(room)


class LeavesWaiting(Delaying):
    """``close`` ends what has begun, and forgets what waits."""

    def close(self, drain_s: float = 5.0) -> None:
        self.waiting.clear()
        self.inner.close(drain_s)


class CountsHeld(Delaying):
    """A room that waits counts the rows that its engine says to hold."""

    class Room(Delayed):
        """A room of it."""

        def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
            if self.inner is not None or self.phase is Phase.FAILED or self._expectation is not None:
                return super().expect(expectation)
            self._expectation = expectation
            return {table.group: expectation.held.get(table.group, 0) for table in expectation.pages}

    def room(self, room: RoomId, begin: Callable[[], Reception]) -> Delayed:
        return self.Room(room, begin, self.ended)


class LosesTag(Delaying):
    """A room that waits begins without its tag."""

    def room(self, room: RoomId, begin: Callable[[], Reception]) -> Delayed:
        return Delayed(room, partial(cast("partial[Reception]", begin), tag=b""), self.ended)


class BeginsTwice(Delaying):
    """A room leaves the queue when it has begun, which is looked at too early."""

    def next(self) -> Delayed:
        return self.waiting[0] if self.waiting[0].inner is None else self.waiting.popleft()
