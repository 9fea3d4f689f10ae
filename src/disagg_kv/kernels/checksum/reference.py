"""The specification of a checksum: for every entry, the sum over its cells, in torch with wrapping 64-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...memory import MemoryPool
from ..base import Move
from ..tensors import read_cells
from .mixing import FIRST, ROW, SECOND, U64, UNIT, WORD_BYTES, keys, places


def checksum(pool: MemoryPool, moves: Sequence[Move]) -> list[U64]:
    """The sum of every entry of every move, uint64 ``[entries]`` each; any strides, CPU or GPU."""
    return [
        np.array(
            [_entry(pool, move, i, int(place)) for i, place in enumerate(places(pool.site, move.layout))], np.uint64
        )
        for move in moves
    ]


def _entry(pool: MemoryPool, move: Move, i: int, place: int) -> int:
    cells = read_cells(pool, move.layout, move.tables, i)
    rows, units = torch.arange(cells.shape[0]), torch.arange(cells.shape[1])
    cells = torch.nn.functional.pad(cells.cpu().long(), (0, -cells.shape[-1] % WORD_BYTES))
    words = sum(cells[..., byte::WORD_BYTES] << 8 * byte for byte in range(WORD_BYTES))
    assert isinstance(words, torch.Tensor)
    hashed = (words * torch.from_numpy(keys(words.shape[-1]).view(np.int64))).sum(-1)
    where = _signed(place) + rows[:, None] * _signed(ROW) + units * _signed(UNIT)
    return int(_mix(where + hashed).sum()) % 2**64


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Towards the low bits, with zeros from above."""
    return (x >> by) & ((1 << 64 - by) - 1)


def _signed(x: int) -> int:
    return x - (x >> 63 << 64)
