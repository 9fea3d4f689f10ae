"""The bytes of one writer's part of a segment, in order, as seen from either side's pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
from attrs import frozen

from ..errors import GeometryError
from ..geometry import I32, I64, Extent, PageTable, Share, Site
from ..ids import GroupId
from .base import EVERY, RowRange, Segment, StagedLayout
from .cache import PlanCache


@frozen(eq=False)
class Planes:
    """What a view has of some layers: a column of its table each, and whether all of it needs the same rows.

    ``before`` are the bytes of one row of all planes before each, ``row_bytes`` those of all; ``low`` to ``high`` are
    the rows of which whole planes are sent (from ``low`` up to ``low``: none).
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


class PartView:
    """What one writer sends to one target, as runs of units in the planes of one of their two pools.

    Both sides get the same offsets from :meth:`layout`: the order of the bytes depends on the parts alone. Immutable,
    so that one view serves every room of a pair of ranks.

    Args:
        site: the pool.
        parts: what the writer was elected to send. The order of the components in the pool's spec is that of the bytes.

    Raises:
        GeometryError: the pool lacks a plane, or does not hold a part's units in one run.
    """

    def __init__(self, site: Site, parts: Sequence[Share]) -> None:
        spec = site.spec
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
        self._rooms: PlanCache[RowRange, PartView] = PlanCache()
        self._bind(EVERY)

    def for_rows(self, rows: RowRange) -> PartView:
        """The same parts in a room of which decode awaits ``rows``; the view itself where that changes nothing."""
        if not self._slides:
            return self
        view = self._rooms.get(rows)
        if view is None:
            view = copy(self)
            view._bind(rows)
            self._rooms.keep(rows, view)
        return view

    def _bind(self, rows: RowRange) -> None:
        bounds = [e.bounds(rows.start, rows.stop) for e in self._extents]
        self._low, self._high = np.array(bounds, np.int64).reshape(len(bounds), 2).T[:, self._extent]
        self._planes: PlanCache[tuple[int, int, bool], Planes] = PlanCache()
        self._layouts: PlanCache[Segment, StagedLayout] = PlanCache()

    def planes(self, segment: Segment) -> Planes:
        """The planes of a segment's layers that have its kind of rows; remembered, as few runs of layers are."""
        key = (segment.first, segment.last, segment.state)
        known = self._planes.get(key)
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
            self._planes.keep(key, known)
        return known

    def layout(self, segment: Segment) -> StagedLayout:
        """Where the bytes of this segment lie; planes of other layers and planes without rows are left out."""
        found = self._layouts.get(segment)
        return self._layouts.keep(segment, self._layout(self.planes(segment), segment)) if found is None else found

    def _layout(self, of: Planes, segment: Segment) -> StagedLayout:
        if of.low <= segment.start < segment.stop <= of.high:
            rows, start = segment.rows, np.full(len(of.plane), segment.start, np.int64)
            what = of.plane, of.first_unit, of.units, start, start + rows, of.before * rows
            return StagedLayout(*what, nbytes=of.row_bytes * rows).one_of((of, rows))
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


def check_pages(site: Site, layout: StagedLayout, tables: Mapping[GroupId, PageTable]) -> None:
    """Raise a :class:`GeometryError` if a row of a layout lies in the null page of its group."""
    for group in site.groups:
        if group.null_page is not None and group.id in tables:
            there = [i for i, number in enumerate(layout.plane.tolist()) if site.planes[number].group == group.id]
            if there:
                rows = int(layout.row_start[there].min()), int(layout.row_stop[there].max())
                tables[group.id].check(group, *rows)


def check_tables(site: Site, layout: StagedLayout, tables: Mapping[GroupId, PageTable]) -> None:
    """Raise a :class:`GeometryError` unless page tables have all rows of a layout, in pages that their groups have."""
    rows: dict[GroupId, tuple[int, int]] = {}
    if len(site.groups) == 1 and len(layout.plane):
        rows[site.groups[0].id] = int(layout.row_start.min()), int(layout.row_stop.max())
    else:
        columns = layout.plane.tolist(), layout.row_start.tolist(), layout.row_stop.tolist()
        for number, start, stop in zip(*columns, strict=True):
            group = site.planes[number].group
            low, high = rows.get(group, (start, stop))
            rows[group] = min(low, start), max(high, stop)
    for name, (start, stop) in rows.items():
        if name not in tables:
            raise GeometryError(f"no page table for group {name!r}; there are {sorted(tables)}")
        tables[name].check(site.group(name), start, stop)


_views: PlanCache[tuple[Site, tuple[Share, ...]], PartView] = PlanCache()


def part_view(site: Site, parts: tuple[Share, ...]) -> PartView:
    """The view of these values: rotations and peers that are alike share it. As :class:`PartView`."""
    key = site, parts
    return _views.get(key) or _views.keep(key, PartView(site, parts))


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
