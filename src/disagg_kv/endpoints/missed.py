"""Rooms whose two sides missed each other."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from attrs import define, field

from ..ids import Epoch, RoomId
from ..protocol import Options

K = TypeVar("K")
V = TypeVar("V")


@define
class Unmet:
    """A room that ended before some decode ranks had asked for it."""

    until: float
    reason: str
    answered: set[Epoch] = field(factory=set)


class Missed:
    """Rooms that decode gave up before they were opened, and rooms that ended before it had asked for them. Bounded."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._unmet: OrderedDict[RoomId, Unmet] = OrderedDict()
        self._declined: OrderedDict[RoomId, tuple[str, float]] = OrderedDict()

    def decline(self, room: RoomId, reason: str, now: float) -> None:
        """Decode gave the room up before it was opened."""
        self._declined[room] = (reason, now + self._options.total_s)
        bound(self._declined, self._options.parked)

    def declined(self, room: RoomId) -> str | None:
        """Why decode gave the room up, once; None: it did not."""
        found = self._declined.pop(room, None)
        return None if found is None else found[0]

    def miss(self, room: RoomId, reason: str, answered: set[Epoch], now: float) -> None:
        """The room has failed, and only these decode ranks know."""
        if room not in self._unmet:
            self._unmet[room] = Unmet(now + self._options.total_s, reason, answered)
            bound(self._unmet, self._options.parked)

    def unmet(self, room: RoomId) -> Unmet | None:
        """A room that failed before all decode ranks had asked for it."""
        return self._unmet.get(room)

    def met(self, room: RoomId) -> None:
        """A later life of the room has ended: the earlier one is not asked for any more."""
        self._unmet.pop(room, None)

    def expire(self, now: float) -> None:
        """Forget what has been kept for long enough."""
        for name in [n for n, u in self._unmet.items() if u.until <= now]:
            del self._unmet[name]
        for name in [n for n, (_, until) in self._declined.items() if until <= now]:
            del self._declined[name]


def bound(remembered: OrderedDict[K, V], most: int) -> None:
    """Forget the oldest beyond ``most``."""
    while len(remembered) > most:
        remembered.popitem(last=False)
