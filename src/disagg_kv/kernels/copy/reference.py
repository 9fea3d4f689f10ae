"""The specification of copy: for every entry, the cells of one pool's plane are assigned to those of another's."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import PageMove
from ..tensors import cells_of, read_cells


def copy(moves: Sequence[PageMove]) -> None:
    """Copy or convert the cells that ``moves`` name; any strides, CPU or GPU."""
    for move in moves:
        for i in range(len(move.copy.source.plane)):
            into, there = cells_of(move.target.pool, move.copy.target, move.target.tables, i)
            into[there] = read_cells(move.source.pool, move.copy.source, move.source.tables, i)
