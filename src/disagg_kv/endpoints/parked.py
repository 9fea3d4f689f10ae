"""Expectations that came before the engine opened their room."""

from __future__ import annotations

from collections import OrderedDict

from ..ids import Epoch, RoomId
from ..protocol import Options
from ..protocol.frames import Expect


class Parked:
    """At most ``options.parked``, which name ``options.parked_pages`` pages together: peers decide how large one is."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._waiting: OrderedDict[tuple[RoomId, Epoch], tuple[Expect, float]] = OrderedDict()
        self._pages = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, expect: Expect, until: float) -> bool:
        """Keep it, instead of what its sender said of the room before; False: there is no space for it."""
        room, peer = RoomId(expect.room), Epoch(expect.src)
        self.pop(room, peer)
        full = len(self._waiting) >= self._options.parked
        if full or self._pages + _pages(expect) > self._options.parked_pages:
            return False
        self._waiting[room, peer] = (expect, until)
        self._pages += _pages(expect)
        return True

    def pop(self, room: RoomId, peer: Epoch) -> Expect | None:
        """Take out what a peer awaits of a room."""
        found = self._waiting.pop((room, peer), None)
        if found is None:
            return None
        self._pages -= _pages(found[0])
        return found[0]

    def take(self, room: RoomId) -> list[Expect]:
        """Take out everything about a room, in the order in which it came."""
        found = [self.pop(*key) for key in list(self._waiting) if key[0] == room]
        return [expect for expect in found if expect is not None]

    def expire(self, now: float) -> None:
        """Forget what has waited for too long."""
        for key in [key for key, (_, until) in self._waiting.items() if until <= now]:
            self.pop(*key)


def _pages(expect: Expect) -> int:
    return sum(len(table.pages) // 4 for table in expect.tables or ())
