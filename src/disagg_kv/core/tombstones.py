"""Tombstones of ended rooms: late frames are answered by them, and nothing revives the rooms.

An endpoint numbers its rooms without gaps, so a tombstone takes two bits: whether the room has ended, and whether it
ended well. A room that waits has its own two bits: it is never forgotten because others end.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from attrs import define, field

from ..ids import Epoch, Generation

GENERATIONS = 1 << 20
"""Generations of an epoch that are remembered, from the newest back: more than begin within the time of any room."""

BLOCK = 1 << 12
"""Generations whose bits are kept together."""

PEERS = 2048
"""Epochs that are remembered unless another number is given: those of which a room ended last."""


class RoomOutcome(Enum):
    """How a room ended; ``EVICTED``: it is too old to be known."""

    DONE = "done"
    FAILED = "failed"
    EVICTED = "evicted"


OUTCOMES = (None, RoomOutcome.FAILED, RoomOutcome.DONE)
"""By the two bits of a room how it ended; None: it has not."""


@define
class _Peer:
    """Two bits for each generation of one epoch, by block; a block without a bit is not there."""

    newest: int = 0
    blocks: dict[int, int] = field(factory=dict)


class Tombstones:
    """The outcome of ended rooms, in a bounded number of bytes per epoch.

    Args:
        generations: number remembered of an epoch, from the newest that ended back.
        peers: number of epochs.
    """

    def __init__(self, generations: int = GENERATIONS, peers: int = PEERS) -> None:
        self._generations = generations
        self._peers = peers
        self._known: OrderedDict[Epoch, _Peer] = OrderedDict()

    def remember(self, peer: Epoch, generation: Generation, ended: RoomOutcome) -> None:
        """A room ended; the first outcome stands."""
        known = self._known.setdefault(peer, _Peer())
        self._known.move_to_end(peer)
        while len(self._known) > self._peers:
            self._known.popitem(last=False)
        if generation <= known.newest - self._generations:
            return
        known.newest = max(known.newest, generation)
        if len(known.blocks) > self._generations // BLOCK + 1:
            first = (known.newest - self._generations) // BLOCK
            known.blocks = {block: bits for block, bits in known.blocks.items() if block >= first}
        block, place = divmod(generation, BLOCK)
        before = known.blocks.get(block, 0)
        if before >> 2 * place & 3 == 0:
            known.blocks[block] = before | OUTCOMES.index(ended) << 2 * place

    def outcome(self, peer: Epoch, generation: Generation) -> RoomOutcome | None:
        """How the room ended; None: it has not."""
        known = self._known.get(peer)
        if known is None:
            return None
        if generation <= known.newest - self._generations:
            return RoomOutcome.EVICTED
        block, place = divmod(generation, BLOCK)
        return OUTCOMES[known.blocks.get(block, 0) >> 2 * place & 3]
