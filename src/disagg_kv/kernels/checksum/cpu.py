"""Checksums on the CPU with NumPy, in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from ...memory import U8, MemoryPool
from ..base import Move
from ..moves.pieces import Run, runs
from .mixing import ROW, U64, UNIT, keys, mix, places

BLOCK = 256 << 10
"""Bytes that are copied together and summed at once."""


def checksum(pool: MemoryPool, moves: Sequence[Move]) -> list[U64]:
    """The sum of every entry of every move, uint64 ``[entries]`` each."""
    return [_move(pool, move) for move in moves]


def _move(pool: MemoryPool, move: Move) -> U64:
    layout, site = move.layout, pool.site
    begin = places(site, layout)
    sums = np.zeros(len(begin), np.uint64)
    held = [site.planes[number] for number in layout.plane.tolist()]
    unit_bytes = [site.spec.component(plane.layer, plane.component).unit_bytes for plane in held]
    for run in runs(pool, move):
        stop = run.first + len(run.places)
        edges = [i for i in range(run.first + 1, stop) if unit_bytes[i] != unit_bytes[i - 1]]
        for first, last in zip([run.first, *edges], [*edges, stop], strict=True):
            rows, units = int(layout.row_stop[first] - layout.row_start[first]), int(layout.units[first])
            if rows:
                _add(sums[first:last], begin[first:last], run, first - run.first, rows, units, unit_bytes[first])
    return sums


def _add(sums: U64, begin: U64, run: Run, skip: int, rows: int, units: int, unit_bytes: int) -> None:
    """Sum entries of ``rows`` rows of ``units`` cells each; skip the run's first ``skip`` entries."""
    where = placed(rows, units)
    index = run.index.reshape(rows, -1)
    for entry, entries, first, last in _blocks(len(sums), rows, units * unit_bytes):
        at = run.places[skip + entry : skip + entry + entries]
        wanted = (at[:, None] + index[first:last].reshape(-1)).reshape(-1)
        cells: U8 = np.take(run.flat, wanted, mode="clip").view(np.uint8).reshape(-1, unit_bytes)
        inputs = hashed(cells).reshape(entries, -1) + where[first:last].reshape(-1)
        values = mix(inputs + begin[entry : entry + entries, None])
        sums[entry : entry + entries] += values.sum(axis=1, dtype=np.uint64)


def placed(rows: int, units: int) -> U64:
    """The place of every cell relative to the first cell, ``[rows, units]``."""
    row = np.arange(rows, dtype=np.uint64)[:, None] * np.uint64(ROW)
    return row + np.arange(units, dtype=np.uint64) * np.uint64(UNIT)


def _blocks(entries: int, rows: int, row_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Whole entries (the first, how many) while several fit a block, else runs of one entry's rows (first, last)."""
    most = max(1, BLOCK // row_bytes)
    together = max(1, most // rows)
    for entry in range(0, entries, together):
        for first in range(0, rows, most):
            yield entry, min(together, entries - entry), first, min(first + most, rows)


def hashed(cells: U8) -> U64:
    """The keyed sum of every cell's words ``[cells]``, two words at a time.

    ``even * k + odd * l`` is ``both * k + odd * (l - 2^32 * k)``: one product reads eight bytes as they are.
    """
    padding = -cells.shape[1] % 8
    if padding:
        filled = np.zeros((len(cells), cells.shape[1] + padding), np.uint8)
        filled[:, :-padding] = cells
        cells = filled
    both = cells.view(np.uint64)
    even, odd = _factors(both.shape[1])
    found: U64 = np.einsum("ij,j->i", both, even) + np.einsum("ij,j->i", both >> np.uint64(32), odd)
    return found


@cache
def _factors(pairs: int) -> tuple[U64, U64]:
    each = keys(2 * pairs)
    return each[0::2].copy(), each[1::2] - (each[0::2] << np.uint64(32))
