"""Gather on the CPU with NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...memory import U8, Buffer, MemoryPool, bytes_of
from ..base import Move, converts
from ..convert.pages import blocks
from ..pieces import pieces


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy or convert the cells that ``moves`` name into ``staging``."""
    staged = bytes_of(staging)
    if converts(pool):
        _converted(pool, moves, staged)
        return
    for flat, index, where in pieces(pool, moves):
        # Any other mode than the default writes straight into ``out``; callers have checked the bounds.
        np.take(flat, index, out=staged[where].view(flat.dtype), mode="clip")


def _converted(pool: MemoryPool, moves: Sequence[Move], staged: U8) -> None:
    for move in moves:
        for i, offset in enumerate(move.layout.offset.tolist()):
            at = move.base + offset
            for cells in blocks(pool, move.layout, move.tables, i):
                staged[at : at + cells.size] = cells.reshape(-1)
                at += cells.size
