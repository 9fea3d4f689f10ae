"""Exact test whether two planes of one pool share a byte.

A plane is a lattice of runs: pages, rows and units by their strides, and the bytes of a unit. Adjacent axes are joined,
so a packed plane is one run. The test compares the outermost axes of two lattices. Each pair of blocks whose extents
meet has a distance, and equal distances have equal answers. In a fused layout the page strides are equal, so a pool has
few distances, whatever its number of pages.

Groups may be overlaid: they share one space of page ids, and a page belongs to one of them at a time. Then planes of
two groups may share bytes, but only page ``p`` of the one with page ``p`` of the other. A slot of states is such a
page, too. vLLM's hybrid cache manager allocates groups like this (``get_kv_cache_config_from_groups`` in vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ..errors import GeometryError
from .layout import Plane, Site


@frozen
class Lattice:
    """Runs of bytes: ``axes`` are (stride, count), largest stride first; each stride covers the axes inside it."""

    axes: tuple[tuple[int, int], ...]
    run: int

    @classmethod
    def of(cls, axes: Sequence[tuple[int, int]], run: int) -> Lattice:
        """Join the axes that touch.

        Args:
            axes: strides in bytes, and counts, in any order.
            run: contiguous bytes at each place.
        """
        joined: list[tuple[int, int]] = []
        for stride, count in sorted(axis for axis in axes if axis[1] > 1):
            if not joined and stride == run:
                run *= count
            elif joined and stride == joined[-1][0] * joined[-1][1]:
                joined[-1] = (joined[-1][0], joined[-1][1] * count)
            else:
                joined.append((stride, count))
        return cls(tuple(reversed(joined)), run)

    @property
    def extent(self) -> int:
        """Bytes from the first to behind the last."""
        return self.run + sum(stride * (count - 1) for stride, count in self.axes)

    def outer(self) -> tuple[int, int]:
        """Stride and count of the outermost axis; of a single run its length, and 1."""
        return self.axes[0] if self.axes else (self.run, 1)

    def inner(self) -> Lattice:
        """One block of the outermost axis."""
        return Lattice(self.axes[1:], self.run)


def meet(one: Lattice, other: Lattice, distance: int) -> bool:
    """Whether two lattices share a byte, if ``other`` begins ``distance`` bytes after ``one``."""
    if not -other.extent < distance < one.extent:
        return False
    if not one.axes and not other.axes:
        return True
    blocks = one.inner(), other.inner()
    return any(meet(*blocks, apart) for apart in _distances(one, other, distance))


def _distances(one: Lattice, other: Lattice, distance: int) -> list[int]:
    """The distances of all pairs of blocks of the outermost axes whose extents meet."""
    (stride, count), (step, times) = one.outer(), other.outer()
    low, high = -other.inner().extent + 1, one.inner().extent - 1
    if stride == step:
        # Blocks i and j are apart by distance + (j - i) * stride.
        least, most = max(1 - count, -((distance - low) // stride)), min(times - 1, (high - distance) // stride)
        return [distance + apart * stride for apart in range(least, most + 1)]
    begins = distance - np.arange(count, dtype=np.int64) * stride
    first = np.maximum(0, -((begins - low) // step))
    last = np.minimum(times - 1, (high - begins) // step)
    pairs = np.maximum(0, last - first + 1)
    place = np.arange(int(pairs.sum()), dtype=np.int64) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    apart: list[int] = np.unique(np.repeat(begins + first * step, pairs) + place * step).tolist()
    return apart


def check_planes(site: Site) -> None:
    """Raise a :class:`GeometryError` if two planes share a byte, in one group or in two.

    Planes of two groups that are overlaid may share bytes of the same page.

    Args:
        site: a site that ``Site.check`` has accepted: no plane overlaps itself.
    """
    lattices = [_lattice(site, plane) for plane in site.planes]
    order = sorted(range(len(lattices)), key=lambda i: (site.planes[i].buffer, site.planes[i].offset))
    open_: list[int] = []
    for number in order:
        plane = site.planes[number]
        open_ = [
            other
            for other in open_
            if site.planes[other].buffer == plane.buffer
            and site.planes[other].offset + lattices[other].extent > plane.offset
        ]
        for other in open_:
            before = site.planes[other]
            if site.overlaid and before.group != plane.group:
                _check_overlaid(site, before, plane)
            elif meet(lattices[other], lattices[number], plane.offset - before.offset):
                raise GeometryError(f"{_name(before)} and {_name(plane)} share bytes of buffer {plane.buffer}")
        open_.append(number)


def _check_overlaid(site: Site, one: Plane, other: Plane) -> None:
    """Raise a :class:`GeometryError` if planes share bytes of pages with different ids, or at other strides."""
    if _place(site, one) == _place(site, other):
        return  # page p of both is the same memory, and no plane overlaps itself
    pages = site.group(one.group).pages, site.group(other.group).pages
    apart = other.offset - one.offset
    if one.page_stride != other.page_stride:
        crosses = meet(_lattice(site, one), _lattice(site, other), apart)
    else:
        page, stride = (_page(site, one), _page(site, other)), one.page_stride
        least = max(1 - pages[0], -((apart + page[1].extent) // stride))
        most = min(pages[1] - 1, (page[0].extent - apart) // stride)
        crosses = any(meet(*page, apart + ids * stride) for ids in range(least, most + 1) if ids)
    if crosses:
        raise GeometryError(
            f"{_name(one)} and {_name(other)} share bytes of buffer {one.buffer}, but not page by page: overlaid "
            "groups have pages at one stride, and share those of the same id only"
        )


def _place(site: Site, plane: Plane) -> tuple[int, ...]:
    """Where page ``p`` of a plane lies, for every ``p``."""
    component = site.spec.component(plane.layer, plane.component)
    units = sum(len(run) for run in site.shard.units(plane.layer, plane.component))
    strides = (plane.offset, plane.page_stride, plane.row_stride, plane.unit_stride)
    return (*strides, site.page_rows(plane), units, component.unit_bytes)


def _axes(site: Site, plane: Plane) -> list[tuple[int, int]]:
    """Rows and units of a page."""
    units = sum(len(run) for run in site.shard.units(plane.layer, plane.component))
    return [(plane.row_stride, site.page_rows(plane)), (plane.unit_stride, units)]


def _page(site: Site, plane: Plane) -> Lattice:
    return Lattice.of(_axes(site, plane), site.spec.component(plane.layer, plane.component).unit_bytes)


def _lattice(site: Site, plane: Plane) -> Lattice:
    axes = [*_axes(site, plane), (plane.page_stride, site.group(plane.group).pages)]
    return Lattice.of(axes, site.spec.component(plane.layer, plane.component).unit_bytes)


def _name(plane: Plane) -> str:
    return f"layer {plane.layer}, {plane.component!r} (group {plane.group!r}, from byte {plane.offset})"
