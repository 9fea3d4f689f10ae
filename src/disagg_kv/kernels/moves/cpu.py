"""Gather and scatter on the CPU with NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...memory import Buffer, MemoryPool, bytes_of
from ..base import Move
from .pieces import pieces


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy the cells that ``moves`` name into ``staging``."""
    staged = bytes_of(staging)
    for flat, index, where in pieces(pool, moves):
        # Any other mode than the default writes straight into ``out``; callers have checked the bounds.
        np.take(flat, index, out=staged[where].view(flat.dtype), mode="clip")


def scatter(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy ``staging`` into the cells that ``moves`` name."""
    staged = bytes_of(staging)
    for flat, index, where in pieces(pool, moves):
        flat[index] = staged[where].view(flat.dtype)
