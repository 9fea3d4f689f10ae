"""An exhaustive small grid for copies from pages into pages, on any device, and the check against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from attrs import frozen

from disagg_kv.geometry import CacheSpec, PageTable, Site, read_as, shard
from disagg_kv.kernels import Kernels, PageMove, Pages, ReferenceKernels
from disagg_kv.memory import ConvertedPool, Layout, MappedPool, PagedMemory, PagedPool
from disagg_kv.planning import PageCopy
from tests.support.kernel_grid import ALIGNMENTS, buffer_on, content_of, placed
from tests.support.pools import KV, noise, staged_layout

Kind = tuple[Layout, bool, int]
"""Order inside a page, whether K and V are fused, tokens of a page."""


@frozen
class _Part:
    """One move, before its pools have memory: the number of its target, and what goes from where to where."""

    target: int
    copy: PageCopy
    read: PageTable
    written: PageTable


@frozen
class CopyGrid:
    """Geometries, and one call into all targets with every slice of heads times whole, partial and single pages.

    Args:
        source: the pool that is read.
        spec: as which cache.
        targets: the pools that are written, of this spec; each move has pages of its own.
        parts: of one call.
    """

    source: PagedPool
    spec: CacheSpec
    targets: Sequence[PagedPool]
    parts: Sequence[_Part]

    @classmethod
    def of(
        cls, source: Kind, targets: Sequence[Kind], alignment: int, slices: Iterable[tuple[int, int, int]]
    ) -> CopyGrid:
        """The grid for three heads, K and V of different dims; slices are first head here, there, and how many."""
        dtype, k_dim, v_dim = ALIGNMENTS[alignment]
        spec = CacheSpec.kv(1, 3, k_dim, dtype, v_head_dim=v_dim)
        return cls.between(source, targets, (spec, spec), slices)

    @classmethod
    def between(
        cls,
        source: Kind,
        targets: Sequence[Kind],
        specs: tuple[CacheSpec, CacheSpec],
        slices: Iterable[tuple[int, int, int]],
    ) -> CopyGrid:
        """The same for two specs, of which the first is read as the second."""
        slices, (own, spec) = list(slices), specs
        parts: list[_Part] = []
        made: list[PagedPool] = []
        most = 0
        for number, kind in enumerate(targets):
            rows = sorted(_rows(source[2], kind[2]))
            each = -(-max(stop for _, stop in rows) // kind[2])
            pool = _pool(kind, spec, each * len(rows) * len(slices) + 3)
            (group,) = pool.site.groups
            read = read_as(_pool(source, own, 1).site, spec)
            free = list(np.random.default_rng(number).permutation(group.pages))
            for first, into, units in slices:
                for start, stop in rows:
                    most = max(most, -(-stop // source[2]))
                    pages = PageTable(KV, [free.pop() for _ in range(each)], kind[2] if start >= kind[2] else 0)
                    begin = source[2] if start >= source[2] else 0
                    copy = _copy(read, pool.site, (first, into, units), (start, stop))
                    parts.append(_Part(number, copy, PageTable(KV, [0], begin), pages))
            made.append(pool)
        pool = _pool(source, own, most + 2)
        order = np.random.default_rng(source[2]).permutation(most + 2)
        shuffled = [_Part(p.target, p.copy, PageTable(KV, order, p.read.first), p.written) for p in parts]
        return cls(pool, spec, made, shuffled)


def _rows(page: int, other: int) -> set[tuple[int, int]]:
    """Whole pages, single rows, and rows that cross the edges of pages on either side."""
    tokens, low, high = 2 * max(page, other) + 1, min(page, other), max(page, other)
    return {(0, tokens), (0, 1), (high - 1, high + 1), (max(low - 1, 1), tokens - 1)}


def _pool(kind: Kind, spec: CacheSpec, pages: int) -> PagedPool:
    layout, fused, page_size = kind
    return PagedPool.allocate(spec, shard(spec), pages=pages, page_size=page_size, layout=layout, fused=fused)


def _copy(source: Site, target: Site, heads: tuple[int, int, int], rows: tuple[int, int]) -> PageCopy:
    """The same rows of all components; of one with fewer units what there is of the slice."""
    there = {(plane.layer, plane.component): number for number, plane in enumerate(target.planes)}
    ours: list[tuple[int, int, int, int, int, int]] = []
    theirs: list[tuple[int, int, int, int, int, int]] = []
    for number, plane in enumerate(source.planes):
        held = target.spec.component(plane.layer, plane.component).units
        first, into, units = min(heads[0], held - 1), min(heads[1], held - 1), min(heads[2], held)
        ours.append((number, first, units, *rows, 0))
        theirs.append((there[plane.layer, plane.component], into, units, *rows, 0))
    return PageCopy(staged_layout(ours, 1), staged_layout(theirs, 1))


def _moves(parts: Sequence[_Part], source: PagedMemory, targets: Sequence[PagedPool]) -> Iterator[PageMove]:
    mapped = [MappedPool(one.site, one.buffers) for one in targets]
    for part in parts:
        yield PageMove(part.copy, Pages(source, {KV: part.read}), Pages(mapped[part.target], {KV: part.written}))


def check_copy(kernels: Kernels, grid: CopyGrid, device: str, shifts: tuple[int, int] = (0, 0)) -> None:
    """Compare with the reference, every byte of all pools; what is not a target keeps its poison.

    Args:
        kernels: under test.
        grid: geometries and moves.
        device: where.
        shifts: bytes by which the source and the targets lie off their alignment.
    """
    converts = grid.spec != grid.source.site.spec
    content = noise(grid.source.site.buffers[0], 1)
    if converts:
        # Rows of zeros have no scale of their own.
        content[: len(content) // 8] = 0
    own = placed(grid.source, buffer_on(device, content, shifts[0]))
    source = ConvertedPool(own, grid.spec) if converts else own
    written: list[list[bytes]] = []
    for one in (kernels, ReferenceKernels()):
        targets = [
            placed(pool, buffer_on(device, noise(pool.site.buffers[0], 2 + number), shifts[1]))
            for number, pool in enumerate(grid.targets)
        ]
        event = one.copy(list(_moves(grid.parts, source, targets)), None)
        if event is not None:
            event.synchronize()
        written.append([content_of(pool.buffers[0]).tobytes() for pool in targets])
    assert written[0] == written[1]
    for number, found in enumerate(written[0]):
        assert found != noise(len(found), 2 + number).tobytes(), "nothing was copied"
    assert np.array_equal(content_of(own.buffers[0]), content)
