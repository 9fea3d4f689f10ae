"""Expectations that came before the engine opened their room."""

from __future__ import annotations

from collections import Counter, OrderedDict

from attrs import frozen

from ...core import Options
from ...core.wire.frames import Expect
from ...core.wire.page_runs import named
from ...ids import Epoch, RoomId

SHARE = 4
"""While several peers are known, each takes at most one in this number of places."""


@frozen(eq=False)
class _Early:
    """What a peer awaits, and when that is forgotten."""

    expect: Expect
    until: float


class EarlyArrivals:
    """At most ``options.parked``, which name ``options.parked_pages`` pages together: peers decide how large one is.

    One peer takes at most a quarter of either while others are known, so that none keeps the others out.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        # Each waits equally long, and one that comes again goes to the end: in the order in which they expire.
        self._waiting: OrderedDict[tuple[RoomId, Epoch], _Early] = OrderedDict()
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
        if not self._may_park(expect, peer, alone):
            return False
        self._waiting[room, peer] = _Early(expect, until)
        self._by_room.setdefault(room, {})[peer] = None
        self._count(expect, 1)
        return True

    def _may_park(self, expect: Expect, peer: Epoch, alone: bool) -> bool:
        most, most_pages, pages = self._options.parked, self._options.parked_pages, _pages(expect)
        if len(self) >= most or self._pages + pages > most_pages:
            return False
        # The first of a peer may be large.
        held, share = self._held[peer], 1 if alone else SHARE
        many = held >= max(1, most // share)
        return not (held and (many or self._held_pages[peer] + pages > most_pages // share))

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
        self._count(found.expect, -1)
        return found.expect

    def take(self, room: RoomId) -> list[Expect]:
        """Take out everything about a room, in the order in which it came."""
        found = [self.pop(room, peer) for peer in list(self._by_room.get(room, ()))]
        return [expect for expect in found if expect is not None]

    def expire(self, now: float) -> None:
        """Forget what has waited for too long."""
        while self._waiting:
            key, early = next(iter(self._waiting.items()))
            if early.until > now:
                return
            self.pop(*key)

    def next_at(self) -> float | None:
        """When the next one is forgotten; None: none waits."""
        return next(iter(self._waiting.values())).until if self._waiting else None

    def check_integrity(self) -> None:
        """Raise AssertionError if places and pages that are taken are not those of what waits."""
        parked = [early.expect for early in self._waiting.values()]
        assert set(self._waiting) == {(room, peer) for room, peers in self._by_room.items() for peer in peers}
        assert self._pages == sum(map(_pages, parked))
        assert self._held == Counter(Epoch(expect.src) for expect in parked)
        assert sum(self._held_pages.values()) == self._pages


def _pages(expect: Expect) -> int:
    return named(expect.tables or ())
