"""Transfers that have not begun, found by room, by segment and by destination without a look at any other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

from ...core import Transfer
from ...ids import Epoch
from ...planning import Segment

R = TypeVar("R", bound=Hashable)
"""A room."""


class PendingTransfers(Generic[R]):
    """Those through a slot stand in a line per destination; those straight to pages in a line per room and destination.

    A line is served in the order in which its transfers came. Among destinations the transfer that came first is first.
    A transfer that comes again takes the place of the earlier one.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._staged: dict[Epoch, dict[tuple[R, Segment], int]] = {}
        self._together: dict[tuple[R, Segment], dict[Epoch, Transfer]] = {}
        self._direct: dict[tuple[R, Epoch], dict[Segment, Transfer]] = {}
        self._of: dict[R, dict[tuple[Epoch, Segment], None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, room: R, transfer: Transfer) -> None:
        """It waits from now on."""
        to, segment = transfer.to, transfer.segment
        of_room = self._of.setdefault(room, {})
        self._count += (to, segment) not in of_room
        of_room[to, segment] = None
        if transfer.offset is None:
            self._direct.setdefault((room, to), {})[segment] = transfer
            return
        self._staged.setdefault(to, {}).setdefault((room, segment), next(self._numbers))
        self._together.setdefault((room, segment), {})[to] = transfer

    def remove(self, room: R, to: Epoch, segment: Segment) -> None:
        """It begins, or is not wanted any more."""
        of_room = self._of[room]
        del of_room[to, segment]
        if not of_room:
            del self._of[room]
        self._count -= 1
        line = self._direct.get((room, to))
        if line is not None and line.pop(segment, None) is not None:
            if not line:
                del self._direct[room, to]
            return
        del self._staged[to][room, segment]
        if not self._staged[to]:
            del self._staged[to]
        del self._together[room, segment][to]
        if not self._together[room, segment]:
            del self._together[room, segment]

    def forget(self, room: R) -> None:
        """Nothing of a room is wanted any more."""
        for to, segment in list(self._of.get(room, ())):
            self.remove(room, to, segment)

    def first(self, full: Callable[[Epoch], bool]) -> tuple[R, Transfer] | None:
        """Of those through a slot, the one that came first to a destination that is not full."""
        heads = [(next(iter(line.items())), to) for to, line in self._staged.items() if not full(to)]
        if not heads:
            return None
        (key, _), to = min(heads, key=lambda head: head[0][1])
        return key[0], self._together[key][to]

    def same(self, room: R, segment: Segment) -> list[Transfer]:
        """Those of one segment through a slot, in the order in which they came."""
        return list(self._together.get((room, segment), {}).values())

    def lines(self) -> Sequence[tuple[R, Epoch]]:
        """Rooms and destinations between which something waits that goes straight to pages."""
        return tuple(self._direct)

    def line(self, room: R, to: Epoch) -> Sequence[Transfer]:
        """All of such a line, in order."""
        return tuple(self._direct[room, to].values())

    def direct(self, room: R, to: Epoch) -> Iterator[Transfer]:
        """The first of such a line, again and again until the line is empty; the caller removes each or stops."""
        while line := self._direct.get((room, to)):
            yield next(iter(line.values()))
