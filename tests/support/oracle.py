"""What should move, worked out cell by cell with sets and loops: slow, obvious, and without the library's helpers.

Only plain attributes of the library's values are read here (``holdings``, ``planes``, ``pages`` ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from disagg_kv.geometry import CacheSpec, Component, PageTable, Shard, Share, Site
from disagg_kv.ids import GroupId
from disagg_kv.planning import Segment, StagedLayout, Writes

Cell = tuple[str, int, int]
"""(component, layer, unit)."""

RowCell = tuple[str, int, int, int]
"""(component, layer, row, unit)."""

Memory = list[npt.NDArray[np.uint8]]
"""One array per buffer of a site."""


def cells(shard: Shard) -> set[Cell]:
    """Everything a shard holds, for one row."""
    return {(h.component, layer, unit) for h in shard.holdings for layer in h.layers for unit in h.units}


def box(shard: Shard, segment: Segment) -> list[RowCell]:
    """Everything a shard needs of a segment, once each."""
    return sorted(
        (component, layer, row, unit)
        for component, layer, unit in cells(shard)
        if segment.first <= layer < segment.last
        for row in range(segment.start, segment.stop)
    )


def component(spec: CacheSpec, layer: int, name: str) -> Component:
    """The component of that name."""
    return next(c for at, cs in spec.layers.items() if at == layer for c in cs if c.name == name)


def needed(spec: CacheSpec, shard: Shard, held: int, stop: int, *, known: bool) -> list[RowCell]:
    """Everything a shard needs of a room of ``stop`` tokens of which it holds ``held``; ``known``: it said the end."""
    found: list[RowCell] = []
    for name, layer, unit in cells(shard):
        of = component(spec, layer, name)
        for row in range(of.rows or stop):
            slid_out = of.window is not None and known and row + of.window < stop
            if of.rows or (row >= held if of.window is None else not slid_out):
                found.append((name, layer, row, unit))
    return sorted(found)


def sent(parts: Iterable[Share], segment: Segment) -> list[RowCell]:
    """Everything that parts say is sent of a segment; what is sent twice is there twice."""
    return sorted(
        (part.component, layer, row, unit)
        for part in parts
        for layer in part.layers
        if segment.first <= layer < segment.last
        for row in _share(segment.start, segment.stop, part.row_index, part.row_ways)
        for unit in part.units
    )


def _share(start: int, stop: int, index: int, ways: int) -> range:
    edges = [start + (stop - start) * i // ways for i in range(ways + 1)]
    return range(edges[index], edges[index + 1])


def unit_bytes(site: Site, layer: int, component: str) -> int:
    """Bytes of one unit of one row."""
    return next(c.unit_bytes for at, cs in site.spec.layers.items() if at == layer for c in cs if c.name == component)


def where(site: Site, tables: Mapping[GroupId, PageTable], cell: RowCell) -> tuple[int, int]:
    """Buffer and byte at which a cell begins."""
    component, layer, row, unit = cell
    plane = next(p for p in site.planes if (p.layer, p.component) == (layer, component))
    group = next(g for g in site.groups if g.id == plane.group)
    held = [u for h in site.shard.holdings if h.component == component and layer in h.layers for u in h.units]
    table = tables[plane.group]
    page = int(table.pages[(row - table.first) // group.rows_per_page])
    slot = (row - table.first) % group.rows_per_page
    return plane.buffer, (
        plane.offset + page * plane.page_stride + slot * plane.row_stride + held.index(unit) * plane.unit_stride
    )


def fresh(site: Site, seed: int) -> Memory:
    """Memory full of noise: what nobody should write keeps it."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, nbytes, np.uint8) for nbytes in site.buffers]


def moved(
    source: Site,
    memory: Memory,
    source_tables: Mapping[GroupId, PageTable],
    target: Site,
    before: Memory,
    target_tables: Mapping[GroupId, PageTable],
    what: Iterable[RowCell],
) -> Memory:
    """The target's memory once exactly these cells have been copied."""
    after = [buffer.copy() for buffer in before]
    for cell in what:
        n = unit_bytes(source, cell[1], cell[0])
        here, at = where(source, source_tables, cell)
        there, to = where(target, target_tables, cell)
        after[there][to : to + n] = memory[here][at : at + n]
    return after


def posted(writes: Writes, memory: Memory, before: Memory) -> tuple[Memory, list[int]]:
    """The target's memory once a batch has been written, and how often each of its bytes was, all buffers in a row."""
    after = [buffer.copy() for buffer in before]
    times = [np.zeros(len(buffer), np.int64) for buffer in before]
    columns = (writes.local, writes.local_off, writes.remote, writes.remote_off, writes.nbytes)
    for local, at, remote, to, n in zip(*(c.tolist() for c in columns), strict=True):
        assert 0 <= at <= at + n <= len(memory[local])
        assert 0 <= to <= to + n <= len(after[remote])
        after[remote][to : to + n] = memory[local][at : at + n]
        times[remote][to : to + n] += 1
    return after, [int(t) for of in times for t in of]


def staged_bytes(site: Site, memory: Memory, tables: Mapping[GroupId, PageTable], layout: StagedLayout) -> bytes:
    """A writer's part of a segment, gathered cell by cell as a layout says."""
    out = np.zeros(layout.nbytes, np.uint8)
    filled = np.zeros(layout.nbytes, np.int64)
    for cell, offset, n in laid_out(site, layout):
        buffer, at = where(site, tables, cell)
        out[offset : offset + n] = memory[buffer][at : at + n]
        filled[offset : offset + n] += 1
    assert (filled == 1).all(), "a staged part has no gap and no byte twice"
    return out.tobytes()


def laid_out(site: Site, layout: StagedLayout) -> Iterator[tuple[RowCell, int, int]]:
    """Each cell of a staged part with its offset and its bytes."""
    for i, number in enumerate(layout.plane.tolist()):
        plane = site.planes[number]
        held = [
            u
            for h in site.shard.holdings
            if h.component == plane.component and plane.layer in h.layers
            for u in h.units
        ]
        n = unit_bytes(site, plane.layer, plane.component)
        first, units = int(layout.first_unit[i]), int(layout.units[i])
        offset = int(layout.offset[i])
        for row in range(int(layout.row_start[i]), int(layout.row_stop[i])):
            for local in range(first, first + units):
                yield (plane.component, plane.layer, row, held[local]), offset, n
                offset += n


def equal(a: Sequence[npt.NDArray[np.uint8]], b: Sequence[npt.NDArray[np.uint8]]) -> bool:
    """True where two memories have the same bytes."""
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
