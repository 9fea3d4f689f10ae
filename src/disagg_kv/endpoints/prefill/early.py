"""Expectations that came before the engine opened their room, or whose page tables are still to come."""

from __future__ import annotations

from collections import Counter, OrderedDict

from attrs import define, field
from msgspec import structs

from ...core import Options
from ...core.wire.frames import Expect, TablePart
from ...core.wire.page_runs import named, total, whole, with_pages
from ...errors import RemoteProtocolError
from ...ids import Epoch, RoomId

SHARE = 4
"""While several peers are known, each takes at most one in this number of places."""


@define(eq=False)
class _Early:
    """What a peer awaits. ``data``: what came of its page tables in parts; ``gap``: where a part was missing.

    ``opened``: its room was open when it came.
    """

    expect: Expect
    until: float
    size: int
    opened: bool
    data: bytearray = field(factory=bytearray)
    gap: int = -1

    @property
    def missing(self) -> bool:
        return len(self.data) < self.size

    def whole(self) -> Expect:
        """With all of its page tables."""
        if not self.size:
            return self.expect
        return structs.replace(self.expect, tables=with_pages(self.expect.tables or (), bytes(self.data)))


class EarlyArrivals:
    """At most ``options.parked``, which name ``options.parked_pages`` pages together: peers decide how large one is.

    One peer takes at most a quarter of either while others are known, so that none keeps the others out.

    Open rooms whose page tables are still to come are apart from these, as their number is that of open rooms. All of
    them together name ``options.parked_pages`` pages, too. One of each peer may always come, so each goes on.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        # Each waits equally long, and one that comes again goes to the end: in the order in which they expire.
        self._waiting: OrderedDict[tuple[RoomId, Epoch], _Early] = OrderedDict()
        self._by_room: dict[RoomId, dict[Epoch, None]] = {}
        self._parked = self._pages = self._opened_pages = 0
        self._held: Counter[Epoch] = Counter()
        self._held_pages: Counter[Epoch] = Counter()
        self._opened: Counter[Epoch] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: object) -> bool:
        return key in self._waiting

    def add(self, expect: Expect, until: float, *, alone: bool, opened: bool = False) -> bool:
        """Keep it, in place of its sender's earlier one for the room; False: there is no space for it.

        If it is the earlier one again, it keeps the page tables that have come.

        Args:
            expect: what a peer awaits.
            until: when it is forgotten; later than all that were added before.
            alone: no other peer is known.
            opened: it waits only for its page tables.
        """
        room, peer = RoomId(expect.room), Epoch(expect.src)
        before = self._pop(room, peer)
        if not (self._may_open(expect, peer) if opened else self._may_park(expect, peer, alone)):
            return False
        size = 0 if whole(expect.tables or ()) else total(expect.tables or ())
        early = _Early(expect, until, size, opened)
        if before is not None and before.expect == expect:
            early.data = before.data
        self._waiting[room, peer] = early
        self._by_room.setdefault(room, {})[peer] = None
        self._count(early, 1)
        return True

    def _may_open(self, expect: Expect, peer: Epoch) -> bool:
        return not self._opened[peer] or self._opened_pages + _pages(expect) <= self._options.parked_pages

    def _may_park(self, expect: Expect, peer: Epoch, alone: bool) -> bool:
        most, most_pages, pages = self._options.parked, self._options.parked_pages, _pages(expect)
        if self._parked >= most or self._pages + pages > most_pages:
            return False
        # The first of a peer may be large.
        held, share = self._held[peer], 1 if alone else SHARE
        many = held >= max(1, most // share)
        return not (held and (many or self._held_pages[peer] + pages > most_pages // share))

    def _count(self, early: _Early, by: int) -> None:
        peer, pages = Epoch(early.expect.src), by * _pages(early.expect)
        if early.opened:
            self._opened_pages += pages
            self._opened[peer] += by
            if not self._opened[peer]:
                del self._opened[peer]
            return
        self._parked += by
        self._pages += pages
        self._held_pages[peer] += pages
        self._held[peer] += by
        if not self._held[peer]:
            del self._held[peer], self._held_pages[peer]

    def lacks(self, room: RoomId, peer: Epoch) -> int | None:
        """From which byte on the page tables of what a peer awaits are still to come; None: none are."""
        found = self._waiting.get((room, peer))
        return len(found.data) if found is not None and found.missing else None

    def put(self, part: TablePart) -> tuple[int, bool] | None:
        """Add a part of page tables, if it is the next one; None: none are awaited.

        Returns how many bytes are there, and whether this shows, for the first time, that the part after them was lost.

        Raises:
            RemoteProtocolError: it has bytes that follow no others, or come after the last.
        """
        found = self._waiting.get((RoomId(part.room), Epoch(part.src)))
        if found is None or found.expect.generation != part.generation or not found.size:
            return None
        there, end = len(found.data), part.offset + len(part.data)
        if end > found.size or part.offset < there < end:
            of = f"bytes {part.offset}-{end} of {found.size} of page tables, after {there}"
            raise RemoteProtocolError(f"the peer sent {of}")
        if part.offset == there:
            found.data += part.data
        lost = part.offset > there != found.gap
        if lost:
            found.gap = there
        return len(found.data), lost

    def pop(self, room: RoomId, peer: Epoch) -> Expect | None:
        """Take out what a peer awaits of a room, whole or not."""
        found = self._pop(room, peer)
        return None if found is None else found.expect

    def _pop(self, room: RoomId, peer: Epoch) -> _Early | None:
        found = self._waiting.pop((room, peer), None)
        if found is None:
            return None
        of_room = self._by_room[room]
        del of_room[peer]
        if not of_room:
            del self._by_room[room]
        self._count(found, -1)
        return found

    def take(self, room: RoomId) -> list[Expect]:
        """Take out everything about a room that is whole, in the order in which it came."""
        ready = [peer for peer in self._by_room.get(room, ()) if self.lacks(room, peer) is None]
        found = [self._pop(room, peer) for peer in ready]
        return [early.whole() for early in found if early is not None]

    def expire(self, now: float) -> None:
        """Forget what has waited for too long."""
        while self._waiting:
            key, early = next(iter(self._waiting.items()))
            if early.until > now:
                return
            self._pop(*key)

    def next_at(self) -> float | None:
        """When the next one is forgotten; None: none waits."""
        return next(iter(self._waiting.values())).until if self._waiting else None

    def check_integrity(self) -> None:
        """Raise AssertionError if places and pages that are taken are not those of what waits."""
        parked = [early.expect for early in self._waiting.values() if not early.opened]
        opened = [early.expect for early in self._waiting.values() if early.opened]
        assert set(self._waiting) == {(room, peer) for room, peers in self._by_room.items() for peer in peers}
        assert (self._parked, self._pages) == (len(parked), sum(map(_pages, parked)))
        assert self._held == Counter(Epoch(expect.src) for expect in parked)
        assert sum(self._held_pages.values()) == self._pages
        assert self._opened_pages == sum(map(_pages, opened))
        assert self._opened == Counter(Epoch(expect.src) for expect in opened)
        assert all(len(early.data) <= early.size for early in self._waiting.values())


def _pages(expect: Expect) -> int:
    return named(expect.tables or ())
