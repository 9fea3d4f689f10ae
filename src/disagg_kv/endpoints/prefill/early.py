"""Expectations that came before the engine opened their room."""

from __future__ import annotations

from collections import Counter, OrderedDict

from ...ids import Epoch, RoomId
from ...protocol import Options
from ...protocol.frames import Expect

SHARE = 4
"""While several peers are known, each takes at most one in this number of places."""


class EarlyArrivals:
    """At most ``options.parked``, which name ``options.parked_pages`` pages together: peers decide how large one is.

    One peer takes at most a quarter of either while others are known, so that none keeps the others out.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        # Each waits equally long, and one that comes again goes to the end: in the order in which they expire.
        self._waiting: OrderedDict[tuple[RoomId, Epoch], tuple[Expect, float]] = OrderedDict()
        self._by_room: dict[RoomId, dict[Epoch, None]] = {}
        self._pages = 0
        self._held: Counter[Epoch] = Counter()
        self._held_pages: Counter[Epoch] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: object) -> bool:
        return key in self._waiting

    def add(self, expect: Expect, until: float, *, alone: bool) -> bool:
        """Keep it, in place of its sender's earlier one for the room; False: there is no space for it.

        Args:
            expect: what a peer awaits.
            until: when it is forgotten; later than all that were added before.
            alone: no other peer is known.
        """
        room, peer = RoomId(expect.room), Epoch(expect.src)
        self.pop(room, peer)
        most, most_pages, pages = self._options.parked, self._options.parked_pages, _pages(expect)
        if len(self._waiting) >= most or self._pages + pages > most_pages:
            return False
        # The first of a peer may be large.
        held, share = self._held[peer], 1 if alone else SHARE
        if held and (held >= max(1, most // share) or self._held_pages[peer] + pages > most_pages // share):
            return False
        self._waiting[room, peer] = (expect, until)
        self._by_room.setdefault(room, {})[peer] = None
        self._count(expect, 1)
        return True

    def _count(self, expect: Expect, by: int) -> None:
        peer, pages = Epoch(expect.src), by * _pages(expect)
        self._pages += pages
        self._held_pages[peer] += pages
        self._held[peer] += by
        if not self._held[peer]:
            del self._held[peer], self._held_pages[peer]

    def pop(self, room: RoomId, peer: Epoch) -> Expect | None:
        """Take out what a peer awaits of a room."""
        found = self._waiting.pop((room, peer), None)
        if found is None:
            return None
        of_room = self._by_room[room]
        del of_room[peer]
        if not of_room:
            del self._by_room[room]
        self._count(found[0], -1)
        return found[0]

    def take(self, room: RoomId) -> list[Expect]:
        """Take out everything about a room, in the order in which it came."""
        found = [self.pop(room, peer) for peer in list(self._by_room.get(room, ()))]
        return [expect for expect in found if expect is not None]

    def expire(self, now: float) -> None:
        """Forget what has waited for too long."""
        while self._waiting:
            key, (_, until) = next(iter(self._waiting.items()))
            if until > now:
                return
            self.pop(*key)

    def next_at(self) -> float | None:
        """When the next one is forgotten; None: none waits."""
        return next(iter(self._waiting.values()))[1] if self._waiting else None


def _pages(expect: Expect) -> int:
    return sum(len(table.pages) // 4 for table in expect.tables or ())
