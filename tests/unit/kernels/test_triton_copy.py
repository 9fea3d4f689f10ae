"""The copy kernel, interpreted on the CPU, against the reference bit for bit; natively: ``tests/gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings

from disagg_kv.errors import ConfigurationError, RegistrationError, UnsupportedError
from disagg_kv.geometry import CacheSpec, PageTable, Site, elect, shard
from disagg_kv.kernels import (
    KERNELS,
    Move,
    PageMove,
    Pages,
    ReferenceKernels,
    SupportsWarmUp,
    gpu_kernels,
)
from disagg_kv.kernels.triton_copies import CopyCall, CopyPatterns
from disagg_kv.kernels.triton_copy_launch import CopyLauncher, bits_of
from disagg_kv.kernels.triton_kernels import OPS, Compiled
from disagg_kv.kernels.triton_shapes import shapes
from disagg_kv.kernels.triton_tables import Planes
from disagg_kv.memory import Buffer, MappedPool, PagedMemory, PagedPool
from disagg_kv.planning import PageCopy, PairPlan, Segment
from tests.support.copy_grid import CopyGrid, Kind, check_copy
from tests.support.kernel_cases import CopyCase, copy_cases
from tests.support.pools import KV, copies, staged_layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs natively here: see tests/gpu")

TRITON = KERNELS["triton"]()
SLICES = [(0, 2, 1), (1, 0, 2)]


@pytest.mark.parametrize(
    ("source", "alignment"),
    [(("NHD", False, 3), 1), (("HND", False, 4), 16), (("NHD", True, 1), 2), (("NHD", False, 3), 16)],
    ids=str,
)
def test_a_copy_equals_the_reference_on_every_byte_of_all_pools(source: Kind, alignment: int) -> None:
    """Slices, partial pages, other layouts and page sizes, K != V; two destinations in one launch."""
    targets: list[Kind] = [("NHD", False, 4), ("HND", False, 3)]
    check_copy(TRITON, CopyGrid.of(source, targets, alignment, SLICES), "cpu")


@pytest.mark.parametrize("shifts", [(1, 0), (0, 2), (8, 4)])
def test_memory_may_be_misaligned_on_either_side(shifts: tuple[int, int]) -> None:
    """Units of 16 bytes whose addresses allow only less."""
    check_copy(TRITON, CopyGrid.of(("NHD", False, 4), [("NHD", False, 2)], 16, SLICES), "cpu", shifts)


@settings(max_examples=15)
@given(case=copy_cases())
def test_any_strides_tables_and_moves(case: CopyCase) -> None:
    """Every named unit arrives, states too, and no other byte changes, whatever the geometry of either pool."""
    expected, before = case.into.copy(), case.memory.copy()
    for move in case.moves:
        read = copies(case.source, [Move(move.copy.source, move.source.tables, 0)])
        written = copies(case.target, [Move(move.copy.target, move.target.tables, 0)])
        for (cell, _, nbytes), (into, _, _) in zip(read, written, strict=True):
            expected[into : into + nbytes] = case.memory[cell : cell + nbytes]
    assert TRITON.copy(case.moves, None) is None
    assert np.array_equal(case.into, expected)
    assert np.array_equal(case.memory, before)


def _pool(pages: int = 4, page_size: int = 4, heads: int = 2) -> PagedPool:
    spec = CacheSpec.kv(2, heads, 4, "bfloat16")
    return PagedPool.allocate(spec, shard(spec), pages=pages, page_size=page_size)


def _move(source: PagedMemory, target: PagedMemory, rows: tuple[int, int] = (0, 8)) -> PageMove:
    """Both planes of the first layer, one head."""
    layout = staged_layout([(0, 1, 1, *rows, 0), (1, 1, 1, *rows, 0)], 1)
    tables = [{KV: PageTable(KV, pages)} for pages in ([3, 0], [1, 2])]
    return PageMove(PageCopy(layout, layout), Pages(source, tables[0]), Pages(target, tables[1]))


class Counted:
    """The kernel, and with how many programs it was launched."""

    def __init__(self) -> None:
        self.kernel = OPS["copy"].kernel
        self.programs: list[int] = []

    def warmup(self, *args: object, **options: object) -> Compiled:
        raise AssertionError

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        self.programs += grid
        return self.kernel[grid]


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_a_launch_takes_no_more_programs_than_it_may(most: int) -> None:
    """However much it copies; each program goes on until all is copied."""
    counted = Counted()
    launcher = CopyLauncher(evolve(OPS["copy"], kernel=counted), most)
    source, *pools = (_pool(20, 16, 300) for _ in range(3))
    source.view(0)[...] = 5
    layout = staged_layout([(0, 0, 300, 0, 128, 0)], 1)
    tables = {KV: PageTable(KV, list(range(8)))}
    moves = [PageMove(PageCopy(layout, layout), Pages(source, tables), Pages(pool, tables)) for pool in pools]
    assert launcher(moves, None) is None
    tiles = 2 * -(-128 * 300 * 8 // OPS["copy"].tuning.tile_bytes)
    assert len(counted.programs) == 1
    assert min(most, tiles) <= counted.programs[0] <= most
    for pool in pools:
        assert pool.view(0)[:8].min() == 5
        assert pool.view(0)[8:].max() == 0


@pytest.mark.parametrize("programs", [0, -1, 1.5, "many", (1 << 20) + 1])
def test_a_bound_that_is_no_number_of_programs_is_refused(programs: object) -> None:
    with pytest.raises(ConfigurationError, match="programs"):
        gpu_kernels(programs)  # type: ignore[arg-type]


def test_pages_are_read_only_after_the_event() -> None:
    """Whatever the event writes is what arrives."""
    source, target = _pool(), _pool()

    class Happens:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            source.view(0)[...] = 7

    assert TRITON.copy([_move(source, target)], Happens()) is None
    assert target.view(0)[1].max() == 7


def test_pools_on_two_devices_are_refused() -> None:
    """Before anything is copied; the error names both."""
    source = _pool()
    far = MappedPool(source.site, [Buffer(4096, source.site.buffers[0], "cuda:1")])
    with pytest.raises(RegistrationError, match=r"'cpu', 'cuda:1'.*one device"):
        TRITON.copy([_move(source, far)], None)
    with pytest.raises(RegistrationError, match="interpreted here: no memory on 'cuda:1'"):
        TRITON.copy([_move(far, far)], None)
    assert TRITON.copy([], None) is None


def test_more_than_the_kernel_can_count_is_refused_before_anything_is_copied() -> None:
    source, target = _pool(), _pool()
    with pytest.raises(UnsupportedError, match="2 entries, the largest of 2147483648 pieces"):
        TRITON.copy([_move(source, target, (0, 1 << 31))], None)


def test_moves_without_entries_copy_nothing() -> None:
    """Alone, and among others."""
    source, target = _pool(), _pool()
    source.view(0)[...] = 3
    nothing = PageMove(PageCopy(staged_layout([], 0), staged_layout([], 0)), Pages(source, {}), Pages(target, {}))
    assert TRITON.copy([nothing], None) is None
    assert not target.view(0).any()
    TRITON.copy([nothing, _move(source, target), nothing], None)
    again = _pool()
    ReferenceKernels().copy([_move(source, again)], None)
    assert np.array_equal(target.view(0), again.view(0))


def test_calls_that_differ_in_their_rows_share_a_pattern_and_pools_do_not() -> None:
    """Also where layouts are not known to be alike."""
    source, target, other = _pool(), _pool(), _pool()
    found = {id(pool): Planes(pool) for pool in (source, target, other)}
    known = CopyPatterns(1 << 15)

    def pattern(into: PagedPool, rows: tuple[int, int]) -> object:
        call = CopyCall([_move(source, into, rows)], lambda pool: found[id(pool)], known)
        assert (call.entries, call._pattern.shape.tiles) == (2, 1)
        return call._pattern

    first = pattern(target, (0, 4))
    assert pattern(target, (2, 6)) is first
    assert pattern(target, (0, 5)) is not first
    assert pattern(other, (0, 4)) is not first
    spec = source.site.spec
    pair = PairPlan(source.site, target.site, elect(spec, [shard(spec)], shard(spec))[0])
    tables = {KV: PageTable(KV, [0, 1, 2, 3])}

    def planned(start: int, stop: int) -> object:
        copy = pair.page_copy(Segment(start, stop, 0, 2))
        move = PageMove(copy, Pages(source, tables), Pages(target, tables))
        return CopyCall([move], lambda pool: found[id(pool)], known)._pattern

    assert planned(0, 4) is planned(8, 12) is not planned(0, 8)


@settings(max_examples=60)
@given(case=copy_cases())
def test_what_is_compiled_for_two_pools_is_what_any_copy_between_them_takes(case: CopyCase) -> None:
    """Any widths, strides, gaps and units, also where peers' pages are aligned worse than ours."""
    found = {id(pool): Planes(pool) for move in case.moves for pool in (case.source, move.target.pool)}
    known = shapes(Planes(case.source), case.source, 1 << 12, None, bits_of(case.source, case.target))
    call = CopyCall(case.moves, lambda pool: found[id(pool)], CopyPatterns(1 << 12))
    if call.entries:
        assert call._pattern.shape.constants in {one.constants for one in known}


def test_what_is_compiled_for_a_pool_is_what_copies_into_any_peer_s_take() -> None:
    """Whatever heads, pages and rows: our own pool says what there can be."""
    spec = CacheSpec.kv(2, 8, 128, "bfloat16")
    sites: list[Site] = []
    for tp, page_size in ((1, 64), (2, 16)):
        sites.append(PagedPool.allocate(spec, shard(spec, tp=tp, rank=0), pages=1, page_size=page_size).site)
    pools = [MappedPool(site, [Buffer(1 << 20, size) for size in site.buffers]) for site in sites]
    words = [Planes(pool) for pool in pools]
    found = {id(pool): one for pool, one in zip(pools, words, strict=True)}
    call_patterns = CopyPatterns(1 << 15)
    known = {s.constants for s in shapes(words[0], pools[0], 1 << 15, None, bits_of(pools[0], pools[0]))}
    assert len(known) <= 4
    tables = {KV: PageTable(KV, list(range(300)))}
    for units in range(1, 5):
        for rows in (1, 5, 16, 300):
            sides = [staged_layout([(0, first, units, 3, 3 + rows, 0)], 1) for first in (8 - units, 0)]
            move = PageMove(PageCopy(*sides), Pages(pools[0], tables), Pages(pools[1], tables))
            shape = CopyCall([move], lambda pool: found[id(pool)], call_patterns)._pattern.shape
            assert shape.constants in known


def test_triton_compiles_copies_for_our_own_pool_and_nothing_more_for_a_peer_s(tmp_path: Path) -> None:
    """Of other pages, heads and layers; by Triton's own compiler, for a GPU that need not be there."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = sys.executable, "-W", "ignore", "-m", "tests.support.hopper"
    said = subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout
    assert said.split() == ["2"] * 5


def test_a_warm_up_reads_and_writes_nothing_where_kernels_are_interpreted() -> None:
    source, target = _pool(), _pool()
    assert isinstance(TRITON, SupportsWarmUp)
    TRITON.warm_copy(source, target)
    assert not target.view(0).any()
