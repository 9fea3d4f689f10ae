"""Rooms whose two sides missed each other."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TypeVar

from attrs import define, field

from ...ids import Epoch, Generation, RoomId
from ...protocol import Options

K = TypeVar("K")
V = TypeVar("V")
M = TypeVar("M", bound="UnmetRoom | CancelledRoom")


@define
class UnmetRoom:
    """A room that ended before some decode ranks had asked for it."""

    until: float
    reason: str
    answered: set[Epoch] = field(factory=set)


@define
class CancelledRoom:
    """A room that decode gave up before it was opened; ``by``: who says so, and of which of its lives."""

    until: float
    reason: str
    by: dict[Epoch, Generation] = field(factory=dict)


class NegativeCache:
    """Rooms that decode gave up before they were opened, and rooms that ended before it had asked for them. Bounded."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._unmet: OrderedDict[RoomId, UnmetRoom] = OrderedDict()
        self._declined: OrderedDict[RoomId, CancelledRoom] = OrderedDict()

    def decline(self, room: RoomId, reason: str, by: Epoch, generation: Generation, now: float) -> None:
        """A decode rank gave the room up before it was opened."""
        others = self._declined[room].by if room in self._declined else {}
        self._declined[room] = CancelledRoom(now + self._options.total_s, reason, {**others, by: generation})
        self._declined.move_to_end(room)
        bound(self._declined, self._options.parked)

    def awaited(self, room: RoomId, by: Epoch, generation: Generation) -> None:
        """A decode rank awaits the room: that it gave up an earlier life of it says nothing of this one."""
        found = self._declined.get(room)
        if found is not None and found.by.get(by, generation) < generation:
            del found.by[by]
            if not found.by:
                del self._declined[room]

    def declined(self, room: RoomId) -> str | None:
        """Why decode gave the room up, once; None: it did not."""
        found = self._declined.pop(room, None)
        return None if found is None else found.reason

    def miss(self, room: RoomId, reason: str, answered: set[Epoch], now: float) -> None:
        """The room has failed, and only these decode ranks know."""
        if room not in self._unmet:
            self._unmet[room] = UnmetRoom(now + self._options.total_s, reason, answered)
            bound(self._unmet, self._options.parked)

    def unmet(self, room: RoomId) -> UnmetRoom | None:
        """A room that failed before all decode ranks had asked for it."""
        return self._unmet.get(room)

    def met(self, room: RoomId) -> None:
        """A later life of the room has ended: the earlier one is not asked for any more."""
        self._unmet.pop(room, None)

    def expire(self, now: float) -> None:
        """Forget what has been kept for long enough."""
        _expire(self._unmet, now)
        _expire(self._declined, now)

    def next_at(self) -> float | None:
        """When something is forgotten; None: nothing is kept."""
        times = [one.until for one in islice(self._unmet.values(), 1)]
        times += [one.until for one in islice(self._declined.values(), 1)]
        return min(times, default=None)


def _expire(kept: OrderedDict[RoomId, M], now: float) -> None:
    """All are kept equally long, so the oldest comes first."""
    while kept and next(iter(kept.values())).until <= now:
        kept.popitem(last=False)


def bound(remembered: OrderedDict[K, V], most: int) -> None:
    """Forget the oldest beyond ``most``."""
    while len(remembered) > most:
        remembered.popitem(last=False)
