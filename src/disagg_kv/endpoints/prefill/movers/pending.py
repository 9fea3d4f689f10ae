"""Transfers that have not begun, found by room, by segment and by destination without a look at any other.

A transfer that comes again takes the place of the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Generic, TypeVar

from ....core import Transfer
from ....ids import Epoch
from ....planning import Segment

R = TypeVar("R", bound=Hashable)
"""A room."""

K = TypeVar("K", bound=Hashable)
N = TypeVar("N", bound=Hashable)
V = TypeVar("V")


def take_out(table: dict[K, dict[N, V]], key: K, name: N) -> V | None:
    """Take one out of an entry of a table, and the entry with the last of them; None: it is not there."""
    found = table[key].pop(name, None)
    if not table[key]:
        del table[key]
    return found


class PageLines(Generic[R]):
    """Straight to pages: a line per room and destination, which is served in the order in which its transfers came.

    ``of`` has the lines of a room.
    """

    def __init__(self) -> None:
        self.of: dict[R, dict[Epoch, dict[Segment, Transfer]]] = {}

    def add(self, room: R, transfer: Transfer) -> None:
        """It waits from now on."""
        self.of.setdefault(room, {}).setdefault(transfer.to, {})[transfer.segment] = transfer

    def remove(self, room: R, to: Epoch, segment: Segment) -> None:
        """It begins, or is not wanted any more."""
        take_out(self.of[room], to, segment)
        if not self.of[room]:
            del self.of[room]

    def forget(self, room: R) -> None:
        """Nothing of a room is wanted any more."""
        self.of.pop(room, None)

    def lines(self) -> Sequence[tuple[R, Epoch, Sequence[Transfer]]]:
        """Rooms and destinations between which something waits, and what, in order."""
        return [(room, to, tuple(line.values())) for room, lines in self.of.items() for to, line in lines.items()]


class SlotLines(Generic[R]):
    """Through a slot: a line per destination; of their heads the one that came first is first.

    ``of`` has the places of a room's transfers.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._lines: dict[Epoch, dict[tuple[R, Segment], int]] = {}
        self._together: dict[tuple[R, Segment], dict[Epoch, Transfer]] = {}
        self.of: dict[R, dict[tuple[Epoch, Segment], None]] = {}

    def add(self, room: R, transfer: Transfer) -> None:
        """It waits from now on."""
        to, segment = transfer.to, transfer.segment
        self.of.setdefault(room, {})[to, segment] = None
        self._lines.setdefault(to, {}).setdefault((room, segment), next(self._numbers))
        self._together.setdefault((room, segment), {})[to] = transfer

    def remove(self, room: R, to: Epoch, segment: Segment) -> None:
        """It begins, or is not wanted any more."""
        take_out(self.of, room, (to, segment))
        take_out(self._lines, to, (room, segment))
        take_out(self._together, (room, segment), to)

    def forget(self, room: R) -> None:
        """Nothing of a room is wanted any more."""
        for to, segment in list(self.of.get(room, ())):
            self.remove(room, to, segment)

    def first(self, full: Callable[[Epoch], bool]) -> tuple[R, Transfer] | None:
        """The one that came first to a destination that is not full."""
        heads = [(next(iter(line.items())), to) for to, line in self._lines.items() if not full(to)]
        if not heads:
            return None
        (key, _), to = min(heads, key=lambda head: head[0][1])
        return key[0], self._together[key][to]

    def same(self, room: R, segment: Segment) -> list[Transfer]:
        """Those of one segment, in the order in which they came."""
        return list(self._together.get((room, segment), {}).values())
