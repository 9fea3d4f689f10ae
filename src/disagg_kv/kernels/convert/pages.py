"""The cells of a pool that is read as another cache, entry by entry, with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import numpy as np

from ...geometry import I64, PageTable, Plane, places
from ...ids import GroupId
from ...memory import U8, PagedMemory, bytes_of, plane_view
from ...planning import StagedLayout
from .cpu import convert_cells

BLOCK = 64 << 10
"""Elements that are converted at once: the arrays between two steps stay in a core's cache."""

Cells = tuple[I64, I64, slice]
"""Page and slot of each row, and the units."""

_views: WeakKeyDictionary[PagedMemory, dict[int, tuple[U8, U8 | None]]] = WeakKeyDictionary()


def blocks(pool: PagedMemory, layout: StagedLayout, tables: Mapping[GroupId, PageTable], i: int) -> Iterator[U8]:
    """The cells of an entry, uint8 ``[rows, units, unit_bytes]``, some rows at a time."""
    number = int(layout.plane[i])
    plane, scales = _view(pool, number)
    page, slot, units = cells_of(pool, layout, tables, i)
    how = pool.site.conversions[number]
    rows = max(1, BLOCK // (plane.shape[3] * max(1, units.stop - units.start)))
    for first in range(0, len(page), rows):
        where = page[first : first + rows], slot[first : first + rows], units
        cells = plane[where]
        yield (
            cells if how is None else convert_cells(cells, how, units.start, None if scales is None else scales[where])
        )


def cells_of(pool: PagedMemory, layout: StagedLayout, tables: Mapping[GroupId, PageTable], i: int) -> Cells:
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
