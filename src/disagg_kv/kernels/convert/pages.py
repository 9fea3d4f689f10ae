"""Gather, copy and checksum of a pool that is read as another cache, entry by entry, with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from ...geometry import I64, PageTable, Plane, places
from ...ids import GroupId
from ...memory import U8, Buffer, MemoryPool, PagedMemory, bytes_of, plane_view
from ...planning import StagedLayout
from ..base import Move, PageMove
from ..checksum.cpu import hashed, placed
from ..checksum.mixing import ROW, U64, mix
from ..checksum.mixing import places as first_places
from .cpu import convert_cells

BLOCK = 64 << 10
"""Elements that are converted at once: the arrays between two steps stay in a core's cache."""

Cells = tuple[I64, I64, slice]
"""Page and slot of each row, and the units."""

_views: WeakKeyDictionary[PagedMemory, dict[int, tuple[U8, U8 | None]]] = WeakKeyDictionary()


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Convert the cells that ``moves`` name into ``staging``."""
    staged = bytes_of(staging)
    for move in moves:
        for i, offset in enumerate(move.layout.offset.tolist()):
            at = move.base + offset
            for cells in _blocks(pool, move.layout, move.tables, i):
                staged[at : at + cells.size] = cells.reshape(-1)
                at += cells.size


def copy(move: PageMove) -> None:
    """Convert the cells that a move names."""
    source, target = move.source, move.target
    for i, number in enumerate(move.copy.target.plane.tolist()):
        into = plane_view(target.pool.site, target.pool.buffers, number)
        page, slot, units = _cells_of(target.pool, move.copy.target, target.tables, i)
        row = 0
        for cells in _blocks(source.pool, move.copy.source, source.tables, i):
            into[page[row : row + len(cells)], slot[row : row + len(cells)], units] = cells
            row += len(cells)


def checksum(pool: MemoryPool, moves: Sequence[Move]) -> list[U64]:
    """The sums of cells after their conversion: of every entry of every move, uint64 ``[entries]`` each."""
    return [_sums(pool, move) for move in moves]


def _sums(pool: MemoryPool, move: Move) -> U64:
    sums = np.zeros(len(move.layout.plane), np.uint64)
    for i, begin in enumerate(first_places(pool.site, move.layout)):
        row = 0
        for cells in _blocks(pool, move.layout, move.tables, i):
            # Modulo 2^64, of which NumPy warns where it computes with single numbers.
            first = np.uint64((int(begin) + row * int(ROW)) % (1 << 64))
            where = placed(*cells.shape[:2]) + first
            values = mix(where.reshape(-1) + hashed(cells.reshape(-1, cells.shape[2])))
            sums[i : i + 1] += values.sum(dtype=np.uint64)
            row += len(cells)
    return sums


def _blocks(pool: PagedMemory, layout: StagedLayout, tables: Mapping[GroupId, PageTable], i: int) -> Iterator[U8]:
    """The cells of an entry, uint8 ``[rows, units, unit_bytes]``, some rows at a time."""
    number = int(layout.plane[i])
    plane, scales = _view(pool, number)
    page, slot, units = _cells_of(pool, layout, tables, i)
    how = pool.site.conversions[number]
    rows = max(1, BLOCK // (plane.shape[3] * max(1, units.stop - units.start)))
    for first in range(0, len(page), rows):
        where = page[first : first + rows], slot[first : first + rows], units
        cells = plane[where]
        yield (
            cells if how is None else convert_cells(cells, how, units.start, None if scales is None else scales[where])
        )


def _cells_of(pool: PagedMemory, layout: StagedLayout, tables: Mapping[GroupId, PageTable], i: int) -> Cells:
    """The index of an entry's cells in its plane ``[pages, rows of a page, units, unit_bytes]``."""
    plane = pool.site.planes[int(layout.plane[i])]
    rows = int(layout.row_start[i]), int(layout.row_stop[i])
    first = int(layout.first_unit[i])
    page, slot = places(tables[plane.group], pool.site.page_rows(plane), *rows)
    return page, slot, slice(first, first + int(layout.units[i]))


def _view(pool: PagedMemory, number: int) -> tuple[U8, U8 | None]:
    """A plane, and that of its scales where they are read."""
    known = _views.setdefault(pool, {})
    if number not in known:
        view, how = plane_view(pool.site, pool.buffers, number), pool.site.conversions[number]
        scales = None if how is None or how.scales is None else _scales(pool, how.scales, view.shape)
        known[number] = view, scales
    return known[number]


def _scales(pool: PagedMemory, plane: Plane, shape: tuple[int, ...]) -> U8:
    strides = (plane.page_stride, plane.row_stride, plane.unit_stride, 1)
    return np.ndarray((*shape[:3], 4), np.uint8, bytes_of(pool.buffers[plane.buffer]), plane.offset, strides)
