"""Checksums equal their description, add up over any cut of the cache, and show what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Component, Holding, PageTable, Shard, elect, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.kernels import CpuKernels, Kernels, Move, ReferenceKernels
from disagg_kv.kernels.checksum.mixing import places
from disagg_kv.memory import Layout, PagedPool
from disagg_kv.planning import PartView, Segment
from tests.support.checksums import cell_sum, expected_sums, total
from tests.support.kernel_cases import cases
from tests.support.pools import KV, Bytes, staged_layout
from tests.support.rig import put
from tests.support.worlds import World, worlds

ON_CPU: list[Kernels] = [CpuKernels(), ReferenceKernels()]
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
ROWS = 24


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
@given(case=cases())
def test_sums_are_what_the_description_says_and_nothing_is_written(
    kernels: Kernels, case: tuple[PagedPool, Bytes, list[Move], Bytes]
) -> None:
    """Any strides, gaps, page sizes, tables, unit sizes and moves, against a loop over bytes."""
    pool, memory, moves, _ = case
    before = memory.copy()
    sums = kernels.checksum(pool, moves, None)
    assert sums.event is None
    assert [of.tolist() for of in sums.read()] == expected_sums(pool, memory, moves)
    assert np.array_equal(memory, before)


def _filled(
    spec: CacheSpec, held: Shard, page_size: int, layout: Layout, seed: int, rows: int
) -> tuple[PagedPool, PageTable]:
    """A rank's pool with a room in pages of its own order; the room's bytes depend on the spec and the seed alone."""
    pages = -(-rows // page_size)
    pool = PagedPool.allocate(spec, held, pages=pages + 1, page_size=page_size, layout=layout)
    rng = np.random.default_rng(seed)
    truth: dict[tuple[int, str], Bytes] = {
        (layer, c.name): rng.integers(0, 256, (rows, c.units, c.unit_bytes), np.uint8)
        for layer, components in spec.layers.items()
        for c in components
    }
    table = PageTable(KV, np.random.default_rng(page_size).permutation(pages + 1)[:pages].astype(np.int32))
    put(pool, table, 0, rows, truth)
    return pool, table


def _sum(pool: PagedPool, table: PageTable, view: PartView, segments: Sequence[Segment]) -> int:
    tables: Mapping[GroupId, PageTable] = {KV: table}
    moves = [Move(view.layout(segment), tables, 0) for segment in segments]
    return total([of.tolist() for of in CpuKernels().checksum(pool, moves, None).read()])


@settings(max_examples=60)
@given(
    world=worlds(),
    page_sizes=st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([1, 4, 16])),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    edges=st.lists(st.integers(1, ROWS - 1), max_size=3, unique=True).map(sorted),
    rotation=st.integers(0, 5),
)
def test_partial_sums_add_up_to_the_whole_cache_however_it_is_cut(
    world: World, page_sizes: tuple[int, int], layouts: tuple[Layout, Layout], edges: list[int], rotation: int
) -> None:
    """TP, PP, replicas, page sizes, layouts, segments: what writers sum equals what targets sum equals one pool's."""
    spec = world.spec
    layers = tuple(spec.layers)
    cuts = [0, *edges, ROWS]
    segments = [Segment(a, b, layer, layer + 1) for a, b in pairwise(cuts) for layer in layers]
    sources = [_filled(spec, held, page_sizes[0], layouts[0], 5, ROWS) for held in world.writers]
    for held in world.targets:
        target, table = _filled(spec, held, page_sizes[1], layouts[1], 5, ROWS)
        sent = arrived = 0
        for parts, (pool, pages) in zip(elect(spec, world.writers, held, rotation), sources, strict=True):
            sent += _sum(pool, pages, PartView(pool.site, parts), segments)
            arrived += _sum(target, table, PartView(target.site, parts), segments)
        whole = elect(spec, [shard(spec)], held)[0]
        single, rows = _filled(spec, shard(spec), 5, "NHD", 5, ROWS)
        of_whole = _sum(single, rows, PartView(single.site, whole), [Segment(0, ROWS, layers[0], layers[-1] + 1)])
        assert sent % 2**64 == arrived % 2**64 == of_whole


SPEC = CacheSpec.kv(2, 4, 6, "float16")


def _room() -> tuple[PagedPool, PageTable, int]:
    pool, table = _filled(SPEC, shard(SPEC), 4, "NHD", 9, ROWS)
    return pool, table, _all(pool, table)


def _all(pool: PagedPool, table: PageTable) -> int:
    parts = elect(SPEC, [pool.site.shard], pool.site.shard)[0]
    return _sum(pool, table, PartView(pool.site, parts), [Segment(0, ROWS, 0, 2)])


@given(
    plane=st.integers(0, 3),
    row=st.integers(0, ROWS - 1),
    unit=st.integers(0, 3),
    byte=st.integers(0, 11),
    by=st.integers(1, 255),
)
def test_any_wrong_byte_shows(plane: int, row: int, unit: int, byte: int, by: int) -> None:
    """A change of one word always changes the sum."""
    pool, table, before = _room()
    pool.view(plane)[table.pages[row // 4], row % 4, unit, byte] ^= by
    assert _all(pool, table) != before


@given(cells=st.lists(st.tuples(*[st.integers(0, n - 1) for n in (4, ROWS, 4)]), min_size=2, max_size=2, unique=True))
def test_any_two_cells_exchanged_show(cells: list[tuple[int, int, int]]) -> None:
    """Rows, heads, layers, K and V: whichever two cells change places."""
    pool, table, before = _room()
    (one, other) = [(pool.view(plane), (table.pages[row // 4], row % 4, unit)) for plane, row, unit in cells]
    kept = one[0][one[1]].copy()
    one[0][one[1]] = other[0][other[1]]
    other[0][other[1]] = kept
    assert _all(pool, table) != before


def test_whole_rows_heads_layers_and_components_exchanged_show() -> None:
    """Systematic exchanges: every row of two heads, every cell of two layers, K for V, rows one further on."""
    pool, table, before = _room()
    k0, v0, k1, v1 = (pool.view(n) for n in range(4))
    assert [p.component for p in pool.site.planes] == ["k", "v", "k", "v"]
    found = {before}
    exchanges: list[tuple[list[Bytes], Callable[[Bytes], Bytes]]] = [
        ([k0, v0, k1, v1], lambda x: x[:, :, [1, 0, 2, 3]]),
        ([k0], lambda x: x[:, :, [0, 1, 3, 2]]),
        ([k1], lambda x: x[:, [1, 0, 2, 3]]),
        ([v0, v1], lambda x: np.roll(x, 1, axis=1)),
        ([v1], lambda x: x[np.roll(np.arange(len(x)), 1)]),
    ]
    for views, change in exchanges:
        kept = [view.copy() for view in views]
        for view in views:
            view[...] = change(view.copy())
        found.add(_all(pool, table))
        for view, was in zip(views, kept, strict=True):
            view[...] = was
    for one, other in ((k0, v0), (k0, k1), (v0, v1)):
        kept = [one.copy(), other.copy()]
        one[...], other[...] = kept[1], kept[0]
        found.add(_all(pool, table))
        one[...], other[...] = kept
    assert _all(pool, table) == before
    assert len(found) == 1 + len(exchanges) + 3


def test_stale_cells_show() -> None:
    """What a page held for another room is not taken for this one's, in one cell or in all."""
    pool, table, before = _room()
    other, others = _filled(SPEC, shard(SPEC), 4, "NHD", 10, ROWS)
    assert _all(other, others) != before
    pool.view(2)[table.pages[3], 1, 2] = other.view(2)[others.pages[3], 1, 2]
    assert _all(pool, table) != before


def test_sign_bits_flipped_in_pairs_show() -> None:
    """What a sum of eight-byte words times odd keys cannot see: two of their top bits."""
    zeros = bytes(256)
    seen = {cell_sum(zeros, 0, "k", 0, 0)}
    for first in range(7, 64, 8):
        for second in range(first + 8, 64, 8):
            data = bytearray(zeros)
            data[first], data[second] = 0x80, 0x80
            seen.add(cell_sum(bytes(data), 0, "k", 0, 0))
    assert len(seen) == 1 + 28


def test_units_of_several_runs_keep_their_numbers() -> None:
    """A rank that holds heads 4, 5 and 1 has the sums that one with all heads has for those."""
    layers = frozenset({LayerId(0)})
    held = Shard((Holding("latent", layers, range(4, 6)), Holding("latent", layers, range(1, 2))))
    spec = CacheSpec.uniform(1, [Component("latent", "uint8", 8, 3)])
    sums = []
    for of, units in ((held, [0, 1, 2]), (shard(spec), [4, 5, 1])):
        pool, table = _filled(spec, of, 4, "NHD", 3, 8)
        moves = [Move(staged_layout([(0, unit, 1, 0, 8, 0)], 24), {KV: table}, 0) for unit in units]
        sums.append([of.tolist() for of in CpuKernels().checksum(pool, moves, None).read()])
    assert sums[0] == sums[1]
    with pytest.raises(GeometryError, match="units 1 to 2 of a plane are not in one of its runs"):
        places(PagedPool.allocate(spec, held, pages=1, page_size=1).site, staged_layout([(0, 1, 2, 0, 1, 0)], 6))


def test_many_rows_and_many_layers_are_summed_in_blocks() -> None:
    """Entries larger than a block, and blocks of many entries, K and V of other widths in between."""
    for layers, rows, dims in ((1, 5000, (64, 64)), (40, 3, (8, 5)), (3, 900, (48, 100))):
        spec = CacheSpec.kv(layers, 2, dims[0], "bfloat16", v_head_dim=dims[1])
        pool, table = _filled(spec, shard(spec), 16, "NHD", 1, rows)
        view = PartView(pool.site, elect(spec, [shard(spec)], shard(spec))[0])
        moves = [Move(view.layout(Segment(0, rows, 0, layers)), {KV: table}, 0)]
        found = [of.tolist() for kernels in ON_CPU for of in kernels.checksum(pool, moves, None).read()]
        assert found[0] == found[1]
        assert len(set(found[0])) == 2 * layers


def test_the_kernels_wait_for_the_event() -> None:
    """What the event writes is what is summed."""
    pool, table, _ = _room()

    class Happens:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            pool.view(0)[...] = 7

    move = Move(staged_layout([(0, 1, 1, 2, 3, 0)], 12), {KV: table}, 0)
    for kernels in ON_CPU:
        pool.view(0)[...] = 0
        found = kernels.checksum(pool, [move], Happens()).read()
        assert [of.tolist() for of in found] == [[cell_sum(b"\7" * 12, 0, "k", 2, 1)]]
