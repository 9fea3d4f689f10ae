"""Pages as a flat array of equal pieces: what makes gather one ``take`` and scatter one assignment per plane.

A piece is as long as the plane's strides allow: normally all units of a row that are wanted, if the units of a row lie
side by side, else one unit. NumPy copies each with one ``memcpy``; nothing depends on alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ..geometry import I64, PageTable
from ..memory import MemoryPool, bytes_of
from .base import Move

Pieces = npt.NDArray[np.void]
"""Elements of ``nbytes`` opaque bytes each."""


@frozen
class _Shape:
    """How one entry breaks into pieces; equal shapes under one page table have equal indices.

    The strides count in pieces of ``nbytes``; ``runs`` runs of ``length`` pieces make the units of a row.
    """

    start: int
    stop: int
    rows_per_page: int
    page_stride: int
    row_stride: int
    run_stride: int
    runs: int
    length: int
    nbytes: int

    def index(self, table: PageTable) -> I64:
        """The place of every piece, in staging order, counted from the first unit's first piece of page 0."""
        row = np.arange(self.start - table.first, self.stop - table.first)
        page, slot = np.divmod(row, self.rows_per_page)
        of_row = table.pages[page] * np.int64(self.page_stride) + slot * self.row_stride
        of_run = np.arange(self.runs)[:, None] * self.run_stride + np.arange(self.length)
        index: I64 = (of_row[:, None] + of_run.reshape(-1)).reshape(-1)
        return index


def pieces(pool: MemoryPool, moves: Sequence[Move]) -> Iterator[tuple[Pieces, I64, slice]]:
    """For every entry of every move: a plane's pieces, the index of those wanted, and their bytes in staging."""
    for move in moves:
        # The layers of a model nearly always share one shape and one table, so one index serves them all.
        indices: dict[tuple[str, _Shape], I64] = {}
        layout = move.layout
        for number, first, units, start, stop, offset in zip(
            layout.plane.tolist(),
            layout.first_unit.tolist(),
            layout.units.tolist(),
            layout.row_start.tolist(),
            layout.row_stop.tolist(),
            layout.offset.tolist(),
            strict=True,
        ):
            flat, shape = _entry(pool, number, first, units, start, stop)
            key = (pool.site.planes[number].group, shape)
            if key not in indices:
                indices[key] = shape.index(move.tables[key[0]])
            at = move.base + offset
            index = indices[key]
            yield flat, index, slice(at, at + len(index) * shape.nbytes)


def _entry(pool: MemoryPool, number: int, first: int, units: int, start: int, stop: int) -> tuple[Pieces, _Shape]:
    """The pieces of the plane ``number`` from its unit ``first`` on, and how the entry breaks into them."""
    plane = pool.site.planes[number]
    group = pool.site.group(plane.group)
    unit_bytes = pool.site.spec.component(plane.layer, plane.component).unit_bytes
    side_by_side = plane.unit_stride == unit_bytes
    runs, run = (1, units * unit_bytes) if side_by_side else (units, unit_bytes)
    run_stride = 0 if side_by_side else plane.unit_stride
    row_stride = plane.row_stride if group.rows_per_page > 1 else 0
    nbytes = math.gcd(plane.page_stride, row_stride, run_stride, run)
    last = (group.pages - 1) * plane.page_stride + (group.rows_per_page - 1) * row_stride
    flat: Pieces = np.ndarray(
        ((last + (runs - 1) * run_stride + run) // nbytes,),
        np.dtype((np.void, nbytes)),
        bytes_of(pool.buffers[plane.buffer]),
        plane.offset + first * plane.unit_stride,
    )
    strides = (plane.page_stride // nbytes, row_stride // nbytes, run_stride // nbytes)
    return flat, _Shape(start, stop, group.rows_per_page, *strides, runs, run // nbytes, nbytes)
