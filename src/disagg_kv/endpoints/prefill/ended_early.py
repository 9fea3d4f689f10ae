"""Ids of rooms that ended before both sides had met: the side that comes later with such an id is refused."""

from __future__ import annotations

from collections import OrderedDict

from ...core import Options
from ...core.base import tags_differ
from ...ids import RoomId
from ..bounded import bound

TAGS = 4
"""Tags of one room that are remembered."""


class EndedEarly:
    """Why such a room is over, for ``total_s``. Bounded: beyond ``options.parked`` the oldest are forgotten.

    Decode gave the room up before prefill opened it, or the room failed here before every decode rank had asked for it.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rooms: OrderedDict[RoomId, tuple[float, dict[bytes, str]]] = OrderedDict()

    def add(self, room: RoomId, reason: str, now: float, tag: bytes = b"") -> None:
        """The room is over, for those with this tag or without one; the first reason of each tag stands."""
        if room not in self._rooms:
            self._rooms[room] = (now + self._options.total_s, {})
            bound(self._rooms, self._options.parked)
        reasons = self._rooms[room][1]
        if len(reasons) < TAGS:
            reasons.setdefault(tag, reason)

    def reason(self, room: RoomId, tag: bytes) -> str | None:
        """Why the room is over; None: it is not known to be."""
        _, reasons = self._rooms.get(room, (0.0, {}))
        return next((reason for other, reason in reasons.items() if not tags_differ(tag, other)), None)

    def expire(self, now: float) -> None:
        """Forget rooms that were kept for long enough; all are kept equally long."""
        while (until := self.next_at()) is not None and until <= now:
            self._rooms.popitem(last=False)

    def next_at(self) -> float | None:
        """When a room is forgotten; None: none is kept."""
        return next(iter(self._rooms.values()))[0] if self._rooms else None
