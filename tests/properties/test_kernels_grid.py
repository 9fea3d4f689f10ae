"""The NumPy kernels against the reference, bit for bit, over an exhaustive small grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from disagg_kv.geometry import CacheSpec, PageTable, Plane, Shard, shard
from disagg_kv.kernels import CpuKernels, Move, ReferenceKernels
from disagg_kv.memory import Layout, PagedPool
from tests.support.convert_grid import cases
from tests.support.copy_grid import CopyGrid, Kind, check_copy
from tests.support.pools import KV, adopted, buffer_over, noise, over, staged_layout

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
CAST = {1: "uint8", 2: "float16", 4: "int32"}
PAGES = 7


def _misplaced(pool: PagedPool, shift: int) -> tuple[Shard, tuple[Plane, ...], int]:
    """The pool's planes, all of them ``shift`` bytes further on; and the bytes that they need."""
    site = pool.site
    planes = tuple(
        Plane(p.layer, p.component, p.group, 0, p.offset + shift, p.page_stride, p.row_stride, p.unit_stride)
        for p in site.planes
    )
    return site.shard, planes, site.buffers[0] + shift


def _moves(heads: int, page_size: int, unit_bytes: tuple[int, int]) -> Iterator[tuple[list[Move], int]]:
    """All slices of heads x whole, partial and single pages, in shuffled page order; and the staging they need."""
    tokens = 3 * page_size
    rows = {(0, tokens), (0, 1), (page_size - 1, page_size + 1), (1, tokens - 1), (page_size, 2 * page_size)}
    pages = np.random.default_rng(heads * page_size).permutation(PAGES)[:4]
    for (first, last), (start, stop) in itertools.product(itertools.combinations(range(heads + 1), 2), sorted(rows)):
        units = last - first
        sizes = [(stop - start) * units * b for b in unit_bytes]
        entries = [(0, first, units, start, stop, 0), (1, first, units, start, stop, sizes[0])]
        layout = staged_layout(entries, sum(sizes))
        for begin in (0, page_size):
            if begin <= start:
                yield [Move(layout, {KV: PageTable(KV, pages, begin)}, 13)], 13 + layout.nbytes + 5


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_kernels_equal_the_reference_on_every_byte_of_both_buffers_and_in_every_sum(
    layout: Layout, fused: bool, page_size: int, itemsize: int
) -> None:
    """Head slices, partial pages, NHD, HND, fused, K != V, every item size, odd storage offsets."""
    cpu, reference = CpuKernels(), ReferenceKernels()
    for heads, shift, (k_dim, v_dim) in itertools.product((1, 2, 3), (0, 1), ((8, 8), (5, 3))):
        v_dtype = DTYPES[itemsize] if k_dim == v_dim else CAST[4 // itemsize]
        spec = CacheSpec.kv(1, heads, k_dim, DTYPES[itemsize], v_head_dim=v_dim, v_dtype=v_dtype)
        shaped = PagedPool.allocate(spec, shard(spec), pages=PAGES, page_size=page_size, layout=layout, fused=fused)
        of, planes, nbytes = _misplaced(shaped, shift)
        full = noise(nbytes, heads)
        memories = (full.copy(), full.copy())
        pools = [adopted(spec, of, shaped.site.groups, planes, (buffer_over(m),)) for m in memories]
        unit_bytes = (spec.component(planes[0].layer, "k").unit_bytes, spec.component(planes[0].layer, "v").unit_bytes)
        for moves, size in _moves(heads, page_size, unit_bytes):
            staged = [noise(size, 1), noise(size, 1)]
            cpu.gather(pools[0], moves, buffer_over(staged[0]), None)
            reference.gather(pools[1], moves, buffer_over(staged[1]), None)
            assert np.array_equal(staged[0], staged[1])
            sums = [one.checksum(pools[0], moves, None).read()[0].tolist() for one in (cpu, reference)]
            assert sums[0] == sums[1]
            staged = [noise(size, 2), noise(size, 2)]
            cpu.scatter(pools[0], moves, buffer_over(staged[0]))
            reference.scatter(pools[1], moves, buffer_over(staged[1]))
            assert np.array_equal(memories[0], memories[1])
            assert np.array_equal(staged[0], noise(size, 2))


RULES = ["bfloat16-float8_e4m3fn-head", "bfloat16-float8_e4m3fn-computed", "float8_e4m3fn-bfloat16-computed",
         "float32-bfloat16-none"]  # fmt: skip
KINDS: list[tuple[Layout, bool]] = [("NHD", False), ("HND", False), ("NHD", True)]


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_copy_that_converts_equals_the_reference_on_every_byte_of_all_pools(
    kind: tuple[Layout, bool], page_size: int
) -> None:
    """Head slices, partial pages, every order on both sides, K != V, odd addresses, and every rule of scales."""
    targets: list[Kind] = [(*into, size) for into in KINDS for size in (1, 4)]
    for case in [one for one in cases((5, 3)) if one.name in RULES]:
        grid = CopyGrid.between((*kind, page_size), targets, case.of_one_layer, [(0, 2, 1), (1, 0, 2)])
        check_copy(CpuKernels(), grid, "cpu", (1, 3))


def test_the_grid_moves_something() -> None:
    """The negative control: a pool of other bytes gathers to other staging."""
    spec = CacheSpec.kv(1, 2, 8, "float16")
    shaped = PagedPool.allocate(spec, shard(spec), pages=PAGES, page_size=4)
    moves, size = next(_moves(2, 4, (16, 16)))
    staged = [noise(size, 1), noise(size, 1)]
    for seed, into in enumerate(staged):
        CpuKernels().gather(over(shaped, noise(shaped.site.buffers[0], seed)), moves, buffer_over(into), None)
    assert not np.array_equal(staged[0], staged[1])
