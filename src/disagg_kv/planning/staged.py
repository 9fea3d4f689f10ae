"""The bytes of one writer's part of a segment, in order, as seen from either side's pool."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache

import numpy as np
from attrs import field, frozen

from ..errors import GeometryError
from ..geometry import I32, I64, CacheSpec, Extent, Share, Site
from .base import EVERY, RowRange, Segment, StagedLayout

VIEWS = 256
"""Views that are kept, those used last."""

BOXES = 256
"""Runs of layers of which a view remembers the planes; a peer may name many."""

SIZES = 64
"""Sizes of segments that are remembered of each."""

LAYOUTS = 16
"""Segments of which the whole layout is: it is asked for to gather, to sum and to scatter, and by several rooms."""


@frozen(eq=False)
class Planes:
    """What a view has of some layers: a column of its table each, and whether all of it needs the same rows.

    ``before`` are the bytes of one row of all planes before each, ``row_bytes`` those of all; ``low`` to ``high`` are
    the rows of which whole planes are sent (from ``low`` up to ``low``: none). ``sizes`` are numbers of rows of such
    segments, each with where its planes begin and what all its layouts share; ``layouts`` are those of segments.
    """

    plane: I32
    first_unit: I32
    units: I32
    of_row: I64
    index: I64
    ways: I64
    lows: I64
    highs: I64
    before: I64
    row_bytes: int
    low: int
    high: int
    sizes: dict[int, tuple[I64, object]] = field(factory=dict, repr=False)
    layouts: dict[Segment, StagedLayout] = field(factory=dict, repr=False)

    def size(self, rows: int) -> tuple[I64, object]:
        """Of so many rows; remembered, as segments have few sizes."""
        found = self.sizes.get(rows)
        if found is None:
            if len(self.sizes) >= SIZES:
                self.sizes.clear()
            found = self.sizes[rows] = self.before * rows, object()
        return found


ROOMS = 16
"""Rooms, by the rows that decode awaits of them, of which a view with windows remembers its own for each."""


class PartView:
    """What one writer sends to one target, as runs of units in the planes of one of their two pools.

    Both sides get the same offsets from :meth:`layout`: the order of the bytes depends on the parts alone. Immutable,
    so that one view serves every room of a pair of ranks.

    Args:
        site: the pool.
        parts: what the writer was elected to send.
        spec: the whole cache; the order of its components is the order of the bytes.

    Raises:
        GeometryError: the pool lacks a plane, or does not hold a part's units in one run.
    """

    def __init__(self, site: Site, parts: Sequence[Share], spec: CacheSpec) -> None:
        order = {name: i for i, name in enumerate(spec.names())}
        plane_of = {(plane.layer, plane.component): i for i, plane in enumerate(site.planes)}
        rows: list[tuple[int, ...]] = []
        extents: dict[Extent, int] = {}
        for part in parts:
            for layer in part.layers:
                if (layer, part.component) not in plane_of:
                    raise GeometryError(f"the pool has no plane for layer {layer}, {part.component!r}")
                local = _local(site.shard.units(layer, part.component), part, layer)
                component = spec.component(layer, part.component)
                row_bytes = component.unit_bytes * len(part.units)
                extent = extents.setdefault(component.extent, len(extents))
                place = (order[part.component], layer, part.units.start)
                what = (plane_of[layer, part.component], local, len(part.units), row_bytes)
                rows.append((*place, *what, part.row_index, part.row_ways, extent))
        table = np.array(sorted(rows), np.int64).reshape(len(rows), 10).T
        self._layer, self._row_bytes, self._index, self._ways = table[1], table[6], table[7], table[8]
        self._plane, self._first_unit, self._units = (table[i].astype(np.int32) for i in (3, 4, 5))
        self._extents, self._extent = tuple(extents), table[9]
        self._state = np.array([e.rows > 0 for e in self._extents], bool)[self._extent]
        self._slides = spec.slides()
        self._rooms: dict[RowRange, PartView] = {}
        self._bind(EVERY)

    def for_rows(self, rows: RowRange) -> PartView:
        """The same parts in a room of which decode awaits ``rows``; the view itself where that changes nothing."""
        if not self._slides:
            return self
        view = self._rooms.get(rows)
        if view is None:
            view = copy(self)
            view._bind(rows)
            if len(self._rooms) >= ROOMS:
                self._rooms.clear()
            self._rooms[rows] = view
        return view

    def _bind(self, rows: RowRange) -> None:
        bounds = [e.bounds(rows.start, rows.stop) for e in self._extents]
        self._low, self._high = np.array(bounds, np.int64).reshape(len(bounds), 2).T[:, self._extent]
        self._known: dict[tuple[int, int, bool], Planes] = {}

    def planes(self, segment: Segment) -> Planes:
        """The planes of a segment's layers that have its kind of rows; remembered, as few runs of layers are."""
        key = (segment.first, segment.last, segment.state)
        known = self._known.get(key)
        if known is None:
            keep = (self._layer >= segment.first) & (self._layer < segment.last) & (self._state == segment.state)
            of_row, ways, lows, highs = self._row_bytes[keep], self._ways[keep], self._low[keep], self._high[keep]
            ends = np.cumsum(of_row)
            whole = len(ends) > 0 and bool((ways == 1).all())
            known = Planes(
                self._plane[keep],
                self._first_unit[keep],
                self._units[keep],
                of_row,
                self._index[keep],
                ways,
                lows,
                highs,
                ends - of_row,
                int(of_row.sum()),
                int(lows.max()) if whole else 0,
                int(highs.min()) if whole else 0,
            )
            if len(self._known) >= BOXES:
                self._known.clear()
            self._known[key] = known
        return known

    def layout(self, segment: Segment) -> StagedLayout:
        """Where the bytes of this segment lie; planes of other layers and planes without rows are left out."""
        of = self.planes(segment)
        found = of.layouts.get(segment)
        if found is None:
            if len(of.layouts) >= LAYOUTS:
                of.layouts.clear()
            found = of.layouts[segment] = self._layout(of, segment)
        return found

    def _layout(self, of: Planes, segment: Segment) -> StagedLayout:
        if of.low <= segment.start < segment.stop <= of.high:
            rows, start = segment.rows, np.full(len(of.plane), segment.start, np.int64)
            offset, alike = of.size(rows)
            what = of.plane, of.first_unit, of.units, start, start + rows, offset
            return StagedLayout(*what, nbytes=of.row_bytes * rows).one_of(alike)
        low = np.maximum(of.lows, segment.start)
        needed = np.maximum(np.minimum(of.highs, segment.stop) - low, 0)
        start, stop = low + needed * of.index // of.ways, low + needed * (of.index + 1) // of.ways
        keep = start < stop
        start, stop = start[keep], stop[keep]
        nbytes = (stop - start) * of.of_row[keep]
        ends = np.cumsum(nbytes)
        return StagedLayout(
            of.plane[keep], of.first_unit[keep], of.units[keep], start, stop, ends - nbytes, nbytes=int(nbytes.sum())
        )


@lru_cache(VIEWS)
def part_view(site: Site, parts: tuple[Share, ...], spec: CacheSpec) -> PartView:
    """A view that is kept, by value: rooms, rotations and peers that are alike share it. As :class:`PartView`."""
    return PartView(site, parts, spec)


def _local(runs: Sequence[range], part: Share, layer: int) -> int:
    """Number within the plane of the part's first unit."""
    before = 0
    for run in runs:
        if run.start <= part.units.start and part.units.stop <= run.stop:
            return before + part.units.start - run.start
        before += len(run)
    raise GeometryError(
        f"layer {layer}, {part.component!r}: units [{part.units.start}, {part.units.stop}) are not in one of the "
        f"pool's runs {[(run.start, run.stop) for run in runs]}"
    )
