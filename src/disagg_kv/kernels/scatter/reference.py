"""The specification of scatter: per entry, assignment to the plane ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

from ...memory import Buffer, MemoryPool
from ..base import Move
from ..tensors import cells_of, tensor_of


def scatter(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy ``staging`` into the cells that ``moves`` name; any strides, CPU or GPU."""
    staged = tensor_of(staging)
    for move in moves:
        for i, offset in enumerate(move.layout.offset.tolist()):
            plane, where = cells_of(pool, move.layout, move.tables, i)
            shape = (len(where[0]), int(move.layout.units[i]), plane.shape[3])
            at = move.base + offset
            plane[where] = staged[at : at + shape[0] * shape[1] * shape[2]].view(shape)
