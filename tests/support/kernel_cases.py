"""Pools of any geometry and calls of any moves, for hypothesis."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from attrs import evolve, frozen
from hypothesis import strategies as st

from disagg_kv.geometry import CacheSpec, Component, Group, PageTable, Plane, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.kernels import Move, PageMove, Pages
from disagg_kv.memory import MappedPool, PagedPool
from disagg_kv.planning import PageCopy
from tests.support.pools import Bytes, adopted, buffer_over, noise, staged_layout


def _components(draw: st.DrawFn) -> list[Component]:
    components = [
        Component(name, "uint8", draw(st.integers(1, 4)), draw(st.integers(1, 9)))
        for name in ("a", "b")[: draw(st.integers(1, 2))]
    ]
    if draw(st.booleans()):  # a state, in slots of as many rows or more
        components[-1] = evolve(components[-1], tokens_per_row=0, rows=draw(st.integers(1, 4)))
    return components


@st.composite
def pools(draw: st.DrawFn) -> tuple[PagedPool, Bytes]:
    """One buffer, one or two page spaces, planes with their axes in any order and gaps between the cells."""
    return _pool(draw, CacheSpec.uniform(1, _components(draw)))


def _pool(draw: st.DrawFn, spec: CacheSpec) -> tuple[PagedPool, Bytes]:
    components = [spec.component(LayerId(0), name) for name in spec.names()]
    groups = [
        Group(GroupId(c.name), c.rows + draw(st.sampled_from([1, 3, 4, 16] if not c.rows else [0, 2])), pages)
        for c in components
        for pages in [draw(st.integers(1, 6))]
    ]
    planes: list[Plane] = []
    end = 0
    for component, group in zip(components, groups, strict=True):
        sizes = {"page": group.pages, "row": component.rows or group.rows_per_page, "unit": component.units}
        strides: dict[str, int] = {}
        extent = component.unit_bytes
        for axis in draw(st.permutations(sorted(sizes))):
            strides[axis] = extent + draw(st.integers(0, 3))
            extent = strides[axis] * (sizes[axis] - 1) + extent
        begin = end + draw(st.integers(0, 5))
        planes.append(
            Plane(LayerId(0), component.name, group.id, 0, begin, strides["page"], strides["row"], strides["unit"])
        )
        end = begin + extent
    memory = noise(end + draw(st.integers(0, 3)), draw(st.integers(0, 9)))
    return adopted(spec, shard(spec), groups, planes, [buffer_over(memory)]), memory


@st.composite
def cases(draw: st.DrawFn) -> tuple[PagedPool, Bytes, list[Move], Bytes]:
    """A pool, its memory, several moves of disjoint cells, and staging for them."""
    pool, memory = draw(pools())
    moves: list[Move] = []
    base = 0
    free = {g.id: list(draw(st.permutations(range(g.pages)))) for g in pool.site.groups}
    for _ in range(draw(st.integers(0, 3))):
        entries: list[tuple[int, int, int, int, int, int]] = []
        tables: dict[GroupId, PageTable] = {}
        nbytes = 0
        for number, plane in enumerate(pool.site.planes):
            group = pool.site.group(plane.group)
            component = pool.site.spec.component(plane.layer, plane.component)
            most = min(1, len(free[group.id])) if component.rows else len(free[group.id])
            count = draw(st.integers(0, most))
            pages = [free[group.id].pop() for _ in range(count)]
            begin = 0 if component.rows else draw(st.integers(0, 2)) * group.rows_per_page
            tables[group.id] = PageTable(group.id, np.array(pages, np.int32), begin)
            if draw(st.booleans()):
                rows = count * (component.rows or group.rows_per_page)
                start, stop = sorted(draw(st.tuples(*[st.integers(0, rows)] * 2)))
                first, last = draw(st.sampled_from(list(combinations(range(component.units + 1), 2))))
                nbytes += draw(st.integers(0, 2))
                entries.append((number, first, last - first, begin + start, begin + stop, nbytes))
                nbytes += (stop - start) * (last - first) * component.unit_bytes
        base += draw(st.integers(0, 3))
        moves.append(Move(staged_layout(entries, nbytes), tables, base))
        base += nbytes
    return pool, memory, moves, noise(base + 1, 99)


@frozen
class CopyCase:
    """Two pools of one cache, with memory of their own, and moves of disjoint cells from one into the other."""

    source: PagedPool
    memory: Bytes
    target: PagedPool
    into: Bytes
    moves: list[PageMove]


@st.composite
def copy_cases(draw: st.DrawFn) -> CopyCase:
    """Any strides, gaps and page sizes on either side; units of a slice begin anywhere in both pools."""
    spec = CacheSpec.uniform(1, _components(draw))
    (source, memory), (target, into) = _pool(draw, spec), _pool(draw, spec)
    sides = (source, target)
    free = [{g.id: list(draw(st.permutations(range(g.pages)))) for g in pool.site.groups} for pool in sides]
    moves: list[PageMove] = []
    for _ in range(draw(st.integers(0, 3))):
        tables: tuple[dict[GroupId, PageTable], ...] = ({}, {})
        entries: tuple[list[tuple[int, int, int, int, int, int]], ...] = ([], [])
        nbytes = 0
        for number, plane in enumerate(source.site.planes):
            component = spec.component(plane.layer, plane.component)
            rows, begins = [], []
            for pool, pages, table in zip(sides, free, tables, strict=True):
                group = pool.site.group(plane.group)
                most = min(1, len(pages[group.id])) if component.rows else len(pages[group.id])
                taken = [pages[group.id].pop() for _ in range(draw(st.integers(0, most)))]
                begin = 0 if component.rows else draw(st.integers(0, 2)) * group.rows_per_page
                table[group.id] = PageTable(group.id, np.array(taken, np.int32), begin)
                rows.append(begin + len(taken) * (component.rows or group.rows_per_page))
                begins.append(begin)
            if max(begins) < min(rows):
                start, stop = sorted(draw(st.tuples(*[st.integers(max(begins), min(rows))] * 2)))
                units = draw(st.integers(1, component.units))
                for side in entries:
                    side.append((number, draw(st.integers(0, component.units - units)), units, start, stop, nbytes))
                nbytes += (stop - start) * units * component.unit_bytes
        copy = PageCopy(*(staged_layout(side, nbytes) for side in entries))
        mapped = MappedPool(target.site, target.buffers)
        moves.append(PageMove(copy, Pages(source, tables[0]), Pages(mapped, tables[1])))
    return CopyCase(source, memory, target, into, moves)
