"""Scatter on the CPU with NumPy."""

from __future__ import annotations

from collections.abc import Sequence

from ...memory import Buffer, MemoryPool, bytes_of
from ..base import Move
from ..pieces import pieces


def scatter(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy ``staging`` into the cells that ``moves`` name."""
    staged = bytes_of(staging)
    for flat, index, where in pieces(pool, moves):
        flat[index] = staged[where].view(flat.dtype)
