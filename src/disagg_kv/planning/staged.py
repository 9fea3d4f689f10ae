"""The bytes of one writer's part of a segment, in order, as seen from either side's pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import GeometryError
from ..geometry import CacheSpec, Part, Site
from .base import Segment, StagedLayout


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

    def __init__(self, site: Site, parts: Sequence[Part], spec: CacheSpec) -> None:
        order = {name: i for i, name in enumerate(spec.names())}
        plane_of = {(plane.layer, plane.component): i for i, plane in enumerate(site.planes)}
        rows: list[tuple[int, ...]] = []
        for part in parts:
            for layer in part.layers:
                if (layer, part.component) not in plane_of:
                    raise GeometryError(f"the pool has no plane for layer {layer}, {part.component!r}")
                local = _local(site.shard.units(layer, part.component), part, layer)
                row_bytes = spec.component(layer, part.component).unit_bytes * len(part.units)
                place = (order[part.component], layer, part.units.start)
                what = (plane_of[layer, part.component], local, len(part.units), row_bytes)
                rows.append((*place, *what, part.row_index, part.row_ways))
        table = np.array(sorted(rows), np.int64).reshape(len(rows), 9).T
        self._layer, self._row_bytes, self._index, self._ways = table[1], table[6], table[7], table[8]
        self._plane, self._first_unit, self._units = (table[i].astype(np.int32) for i in (3, 4, 5))

    def layout(self, segment: Segment) -> StagedLayout:
        """Where the bytes of this segment lie; planes of other layers and planes without rows are left out."""
        start = segment.start + segment.rows * self._index // self._ways
        stop = segment.start + segment.rows * (self._index + 1) // self._ways
        keep = (self._layer >= segment.first) & (self._layer < segment.last) & (start < stop)
        start, stop = start[keep], stop[keep]
        ends = np.cumsum((stop - start) * self._row_bytes[keep])
        total = int(ends[-1]) if len(ends) else 0
        offset = np.zeros_like(ends)
        offset[1:] = ends[:-1]
        return StagedLayout(
            self._plane[keep], self._first_unit[keep], self._units[keep], start, stop, offset, nbytes=total
        )


def _local(runs: Sequence[range], part: Part, layer: int) -> int:
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
