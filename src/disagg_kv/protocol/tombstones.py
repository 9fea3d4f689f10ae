"""What is remembered of ended rooms, so that late frames are answered and nothing revives them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum

from ..ids import Epoch, Generation, RoomId


class Ended(Enum):
    """How a room ended; ``EVICTED``: it is no longer known how."""

    DONE = "done"
    FAILED = "failed"
    EVICTED = "evicted"


class Tombstones:
    """The outcome of ended rooms, a bounded number per peer epoch.

    Generations only grow, so a room that is neither live nor remembered, at or below the highest generation
    forgotten, must be an old one.
    """

    def __init__(self, limit: int, peers: int = 1024) -> None:
        self._limit = limit
        self._peers = peers
        self._ended: OrderedDict[Hashable, OrderedDict[tuple[RoomId, Generation], Ended]] = OrderedDict()
        self._forgotten: dict[Hashable, int] = {}

    def remember(self, peer: Epoch, room: RoomId, generation: Generation, ended: Ended) -> None:
        """A room ended; the first outcome stands."""
        mine = self._ended.setdefault(peer, OrderedDict())
        self._ended.move_to_end(peer)
        mine.setdefault((room, generation), ended)
        if len(mine) > self._limit:
            (_, oldest), _ = mine.popitem(last=False)
            self._forgotten[peer] = max(self._forgotten.get(peer, 0), oldest)
        if len(self._ended) > self._peers:
            gone, _ = self._ended.popitem(last=False)
            self._forgotten.pop(gone, None)

    def outcome(self, peer: Epoch, room: RoomId, generation: Generation) -> Ended | None:
        """How the room ended; None: it is not known to have been."""
        mine = self._ended.get(peer)
        known = None if mine is None else mine.get((room, generation))
        if known is None and generation <= self._forgotten.get(peer, -1):
            return Ended.EVICTED
        return known

    def __len__(self) -> int:
        return sum(len(mine) for mine in self._ended.values())
