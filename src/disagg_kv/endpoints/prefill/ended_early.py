"""Ids of rooms that ended before both sides had met: the side that comes later with such an id is refused."""

from __future__ import annotations

from collections import OrderedDict

from ...ids import RoomId
from ...protocol import Options
from ..runtime.bounded import bound


class EndedEarly:
    """Why such a room is over, for ``total_s``. Bounded: beyond ``options.parked`` the oldest are forgotten.

    Decode gave the room up before prefill opened it, or the room failed here before every decode rank had asked for it.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rooms: OrderedDict[RoomId, tuple[float, str]] = OrderedDict()

    def add(self, room: RoomId, reason: str, now: float) -> None:
        """The room is over; the first reason stands."""
        if room not in self._rooms:
            self._rooms[room] = (now + self._options.total_s, reason)
            bound(self._rooms, self._options.parked)

    def reason(self, room: RoomId) -> str | None:
        """Why the room is over; None: it is not known to be."""
        found = self._rooms.get(room)
        return None if found is None else found[1]

    def expire(self, now: float) -> None:
        """Forget rooms that were kept for long enough; all are kept equally long."""
        while (until := self.next_at()) is not None and until <= now:
            self._rooms.popitem(last=False)

    def next_at(self) -> float | None:
        """When a room is forgotten; None: none is kept."""
        return next(iter(self._rooms.values()))[0] if self._rooms else None
