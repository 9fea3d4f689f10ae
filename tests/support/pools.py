"""Pools full of random bytes, staging buffers, and what a kernel should do said byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from disagg_kv.geometry import CacheSpec, Group, Plane, Shard, Site
from disagg_kv.ids import GroupId
from disagg_kv.kernels import Move
from disagg_kv.memory import Buffer, PagedPool
from disagg_kv.planning import StagedLayout

KV = GroupId("kv")

Bytes = npt.NDArray[np.uint8]


def noise(nbytes: int, seed: int) -> Bytes:
    """Random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def buffer_over(memory: Bytes) -> Buffer:
    """A buffer that lies in an array."""
    return Buffer(memory.ctypes.data, memory.nbytes, owner=memory)


def over(pool: PagedPool, memory: Bytes) -> PagedPool:
    """A pool of the same geometry as a pool of one buffer, but in ``memory``, whose every byte the caller can see."""
    site = pool.site
    return PagedPool(site, (buffer_over(memory),))


def adopted(
    spec: CacheSpec, held: Shard, groups: Sequence[Group], planes: Sequence[Plane], buffers: Sequence[Buffer]
) -> PagedPool:
    """A pool over memory that is there."""
    return PagedPool(Site(spec, held, groups, planes, [b.nbytes for b in buffers]), buffers)


def staged_layout(entries: Sequence[tuple[int, int, int, int, int, int]], nbytes: int) -> StagedLayout:
    """A layout from rows of (plane, first unit, units, first row, end row, offset)."""
    columns = np.array(entries, np.int64).reshape(-1, 6).T
    small = [c.astype(np.int32) for c in columns[:3]]
    return StagedLayout(small[0], small[1], small[2], columns[3], columns[4], columns[5], nbytes)


def copies(pool: PagedPool, moves: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
    """Every unit that the moves name as (byte in the pool's only buffer, byte in staging, bytes), one at a time."""
    for move in moves:
        of = move.layout
        for i in range(len(of.plane)):
            plane: Plane = pool.site.planes[int(of.plane[i])]
            rows_per_page = next(g for g in pool.site.groups if g.id == plane.group).rows_per_page
            unit_bytes = pool.site.spec.component(plane.layer, plane.component).unit_bytes
            table = move.tables[plane.group]
            at = move.base + int(of.offset[i])
            for row in range(int(of.row_start[i]), int(of.row_stop[i])):
                page = int(table.pages[(row - table.first) // rows_per_page])
                slot = (row - table.first) % rows_per_page
                for unit in range(int(of.first_unit[i]), int(of.first_unit[i]) + int(of.units[i])):
                    cell = plane.offset + page * plane.page_stride + slot * plane.row_stride + unit * plane.unit_stride
                    yield cell, at, unit_bytes
                    at += unit_bytes
