"""Moving head slices between pages and a contiguous staging buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen

from ..geometry import PageTable
from ..ids import GroupId
from ..memory import Buffer, Event, MemoryPool
from ..planning import StagedLayout


@frozen
class Move:
    """One writer's part of one segment between one pool's pages and staging.

    Args:
        layout: which rows and units of which planes, and where in the part.
        tables: the room's pages, per group.
        base: byte in the staging buffer at which the part begins.
    """

    layout: StagedLayout
    tables: Mapping[GroupId, PageTable]
    base: int


class Kernels(Protocol):
    """Gather and scatter for one kind of memory. Bit exact: bytes outside the target are never touched.

    Callers have checked page tables and bounds; kernels look at neither.
    """

    name: str

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        """Copy pages into staging: all moves in one launch, after ``after``. None: it is done already."""
        ...

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Copy staging into pages: all moves in one launch. None: it is done already."""
        ...
