"""The specification of gather: for every entry, indexing of the plane ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

from ...memory import Buffer, MemoryPool
from ..base import Move
from ..tensors import read_cells, tensor_of


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy or convert the cells that ``moves`` name into ``staging``; any strides, CPU or GPU."""
    staged = tensor_of(staging)
    for move in moves:
        for i, offset in enumerate(move.layout.offset.tolist()):
            cells = read_cells(pool, move.layout, move.tables, i)
            at = move.base + offset
            staged[at : at + cells.numel()] = cells.reshape(-1)
