"""The specification of gather, scatter and copy: indexing of planes ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

from ...memory import Buffer, MemoryPool
from ..base import Move, PageMove
from ..tensors import cells_of, read_cells, tensor_of


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy or convert the cells that ``moves`` name into ``staging``; any strides, CPU or GPU."""
    staged = tensor_of(staging)
    for move in moves:
        for i, offset in enumerate(move.layout.offset.tolist()):
            cells = read_cells(pool, move.layout, move.tables, i)
            at = move.base + offset
            staged[at : at + cells.numel()] = cells.reshape(-1)


def scatter(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy ``staging`` into the cells that ``moves`` name; any strides, CPU or GPU."""
    staged = tensor_of(staging)
    for move in moves:
        for i, offset in enumerate(move.layout.offset.tolist()):
            plane, where = cells_of(pool, move.layout, move.tables, i)
            shape = (len(where[0]), int(move.layout.units[i]), plane.shape[3])
            at = move.base + offset
            plane[where] = staged[at : at + shape[0] * shape[1] * shape[2]].view(shape)


def copy(moves: Sequence[PageMove]) -> None:
    """Copy or convert the cells that ``moves`` name; any strides, CPU or GPU."""
    for move in moves:
        for i in range(len(move.copy.source.plane)):
            into, there = cells_of(move.target.pool, move.copy.target, move.target.tables, i)
            into[there] = read_cells(move.source.pool, move.copy.source, move.source.tables, i)
