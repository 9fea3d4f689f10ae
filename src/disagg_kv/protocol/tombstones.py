"""What is remembered of ended rooms, so that late frames are answered and nothing revives them.

An endpoint numbers its rooms without gaps, so that what is known of them takes two bits each: whether a room has ended,
and whether it ended well. A room that waits has its own two bits: it is never forgotten because others end.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from attrs import define, field

from ..ids import Epoch, Generation

GENERATIONS = 1 << 20
"""Generations of a life that are remembered, from the newest back: more than begin within the time of any room."""

BLOCK = 1 << 12
"""Generations whose bits are kept together."""

PEERS = 2048
"""Lives that are remembered, those of which a room ended last: more than are known at a time."""


class RoomOutcome(Enum):
    """How a room ended; ``EVICTED``: it is no longer known whether and how."""

    DONE = "done"
    FAILED = "failed"
    EVICTED = "evicted"


@define
class _Life:
    """Bits of the generations of one life, by block; a block without a bit is not there."""

    newest: int = 0
    over: dict[int, int] = field(factory=dict)
    done: dict[int, int] = field(factory=dict)


class Tombstones:
    """The outcome of ended rooms, in a bounded number of bytes per life.

    Args:
        generations: how many are remembered of a life, from the newest that ended back.
        peers: of how many lives.
    """

    def __init__(self, generations: int = GENERATIONS, peers: int = PEERS) -> None:
        self._generations = generations
        self._peers = peers
        self._lives: OrderedDict[Epoch, _Life] = OrderedDict()

    def remember(self, peer: Epoch, generation: Generation, ended: RoomOutcome) -> None:
        """A room ended; the first outcome stands."""
        life = self._lives.setdefault(peer, _Life())
        self._lives.move_to_end(peer)
        while len(self._lives) > self._peers:
            self._lives.popitem(last=False)
        if generation <= life.newest - self._generations:
            return
        life.newest = max(life.newest, generation)
        if len(life.over) > self._generations // BLOCK + 1:
            first = (life.newest - self._generations) // BLOCK
            for old in [block for block in life.over if block < first]:
                del life.over[old]
                life.done.pop(old, None)
        block, bit = divmod(generation, BLOCK)
        before = life.over.get(block, 0)
        if before >> bit & 1 == 0:
            life.over[block] = before | 1 << bit
            if ended is RoomOutcome.DONE:
                life.done[block] = life.done.get(block, 0) | 1 << bit

    def outcome(self, peer: Epoch, generation: Generation) -> RoomOutcome | None:
        """How the room ended; None: it has not."""
        life = self._lives.get(peer)
        if life is None:
            return None
        if generation <= life.newest - self._generations:
            return RoomOutcome.EVICTED
        block, bit = divmod(generation, BLOCK)
        if life.over.get(block, 0) >> bit & 1 == 0:
            return None
        return RoomOutcome.DONE if life.done.get(block, 0) >> bit & 1 else RoomOutcome.FAILED

    @property
    def blocks(self) -> int:
        """Blocks of bits that are kept: each takes ``BLOCK / 8`` bytes at most, twice."""
        return sum(len(life.over) for life in self._lives.values())
