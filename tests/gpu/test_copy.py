"""The copy kernel natively: bit for bit over the whole grid, above 4 GiB, and in the right order of streams."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given

from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.kernels import KERNELS, Kernels, Move, PageMove, Pages, gpu_kernels
from disagg_kv.kernels.cuda_queue import Mark
from disagg_kv.kernels.moves.triton import copy as copy_kernel
from disagg_kv.kernels.triton_copy_launch import CopyLauncher
from disagg_kv.kernels.triton_slots import SLOTS
from disagg_kv.memory import Layout, MappedPool, PagedMemory, PagedPool, undisturbed
from disagg_kv.planning import PageCopy
from tests.support.copy_grid import CopyGrid, Kind, check_copy
from tests.support.kernel_cases import CopyCase, copy_cases
from tests.support.kernel_grid import ALIGNMENTS, buffer_on, content_of, placed
from tests.support.pools import KV, copies, staged_layout

TRITON = gpu_kernels()
SLICES = [(0, 0, 1), (0, 2, 1), (1, 0, 2), (0, 1, 2), (0, 0, 3), (2, 1, 1)]
PAGE_SIZES = [1, 2, 3, 4, 16, 64, 256]
KINDS: Sequence[tuple[Layout, bool]] = [("NHD", False), ("HND", False), ("NHD", True)]


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_copy_equals_the_reference_on_every_byte_of_all_pools(
    kind: tuple[Layout, bool], page_size: int, alignment: int
) -> None:
    """Every slice, partial pages, item sizes and alignments, K != V, into every layout and page size in one launch."""
    targets: list[Kind] = [(*into, size) for into in KINDS for size in PAGE_SIZES]
    check_copy(TRITON, CopyGrid.of((*kind, page_size), targets, alignment, SLICES), "cuda")


@pytest.mark.parametrize("shifts", list(itertools.product([0, 1, 2, 4, 8], repeat=2)), ids=str)
def test_memory_may_be_misaligned_on_either_side(shifts: tuple[int, int]) -> None:
    """Units of 16 bytes whose addresses allow only less."""
    targets: list[Kind] = [("NHD", False, 16), ("HND", False, 3)]
    check_copy(TRITON, CopyGrid.of(("NHD", False, 4), targets, 16, SLICES), "cuda", shifts)


@pytest.mark.parametrize("programs", [1, 3, 16])
def test_a_bounded_launch_copies_the_same(programs: int) -> None:
    """Each program goes on until all is copied."""
    grid = CopyGrid.of(("NHD", False, 16), [("NHD", False, 64), ("HND", False, 16)], 16, SLICES)
    check_copy(gpu_kernels(programs), grid, "cuda")


@pytest.mark.parametrize("kernels", [TRITON, KERNELS["reference"]()], ids=["triton", "reference"])
@given(case=copy_cases())
def test_any_strides_tables_and_moves(kernels: Kernels, case: CopyCase) -> None:
    """Every named unit arrives, states too, and no other byte changes, whatever the geometry of either pool."""
    source = placed(case.source, buffer_on("cuda", case.memory))
    target = placed(case.target, buffer_on("cuda", case.into))
    expected = case.into.copy()
    moves = []
    for move in case.moves:
        read = copies(case.source, [Move(move.copy.source, move.source.tables, 0)])
        written = copies(case.target, [Move(move.copy.target, move.target.tables, 0)])
        for (cell, _, nbytes), (into, _, _) in zip(read, written, strict=True):
            expected[into : into + nbytes] = case.memory[cell : cell + nbytes]
        pages = Pages(source, move.source.tables), Pages(target, move.target.tables)
        moves.append(PageMove(move.copy, *pages))
    _wait(kernels.copy(moves, None))
    assert np.array_equal(content_of(target.buffers[0]), expected)
    assert np.array_equal(content_of(source.buffers[0]), case.memory)


def _wait(event: object) -> None:
    if event is not None:
        assert isinstance(event, Mark)
        event.synchronize()


def _tensor(pool: PagedPool) -> torch.Tensor:
    owner = pool.buffers[0].owner
    assert isinstance(owner, torch.Tensor)
    return owner


def test_pools_above_4_gib() -> None:
    """Pages and planes that begin beyond what 32 bits can address, on both sides."""
    spec = CacheSpec.kv(1, 8, 128, "bfloat16")
    count, page_size = 40_000, 64
    source, *targets = (
        PagedPool.allocate(spec, shard(spec), pages=count, page_size=page_size, device="cuda") for _ in range(3)
    )
    assert _tensor(source).numel() > 9 << 30
    # Every eight bytes differ from all others, so that a wrong place shows.
    torch.arange(_tensor(source).numel() // 8, out=_tensor(source).view(torch.int64)).mul_(-7046029254386353131)
    torch.cuda.synchronize()
    rows = 3 * page_size + 5
    layout = staged_layout([(0, 2, 2, 3, 3 + rows, 0), (1, 6, 2, 3, 3 + rows, 0)], 1)
    read = {KV: PageTable(KV, [count - 1, 0, count // 2, count - 2])}
    written = {KV: PageTable(KV, [7, count - 3, count - 1, count // 2])}
    for kernels, target in zip((TRITON, KERNELS["reference"]()), targets, strict=True):
        _wait(kernels.copy([PageMove(PageCopy(layout, layout), Pages(source, read), Pages(target, written))], None))
    assert torch.equal(*map(_tensor, targets))
    assert int(_tensor(targets[0]).amax()) > 0


def _small() -> PagedPool:
    spec = CacheSpec.kv(2, 2, 64, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=64, page_size=16, device="cuda")
    torch.cuda.synchronize()
    return pool


def _page(source: PagedMemory, page: int, target: PagedMemory, into: int) -> PageMove:
    """One page of one plane: 4,096 bytes."""
    layout = staged_layout([(0, 0, 2, 0, 16, 0)], 4096)
    tables = [{KV: PageTable(KV, [number])} for number in (page, into)]
    return PageMove(PageCopy(layout, layout), Pages(source, tables[0]), Pages(target, tables[1]))


def _first_plane(pool: PagedPool) -> list[int]:
    """What each page of the first plane is full of."""
    torch.cuda.synchronize()
    pages = _tensor(pool).view(-1, 4096)[:64].cpu().numpy()
    assert (pages == pages[:, :1]).all()
    return [int(page[0]) for page in pages]


LONG = 3_000_000_000
"""Clock cycles: about one and a half seconds, in which the host does everything else."""


def test_a_copy_waits_for_the_engines_event_and_nobody_waits_for_the_copy() -> None:
    """What the engine writes before its event arrives; each of many calls keeps its own page ids."""
    source, target = _small(), _small()
    TRITON.warm_copy(source, target)
    memory = _tensor(source).view(-1, 4096)
    content = torch.arange(64, dtype=torch.uint8, device="cuda")[:, None]
    memory[:64] = content.flip(0)  # a kernel's first use may wait for all that is enqueued
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    memory[:64] = content
    computed = torch.cuda.Event()
    computed.record()
    events = [TRITON.copy([_page(source, page, target, 63 - page)], computed) for page in range(64)]
    assert not computed.query()
    assert not any(event is None or event.query() for event in events)
    for event in events:
        _wait(event)
    assert _first_plane(target) == list(range(64))[::-1]


def test_a_launch_behind_an_event_delays_no_other() -> None:
    """Consecutive launches are on streams of their own."""
    source, target = _small(), _small()
    _wait(TRITON.copy([_page(source, 0, target, 0)], None))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    late = torch.cuda.Event()
    late.record()
    first = TRITON.copy([_page(source, 1, target, 1)], late)
    _wait(TRITON.copy([_page(source, 2, target, 2)], None))
    assert not late.query()
    _wait(first)


def test_after_the_warm_up_nothing_is_compiled_and_no_pinned_memory_is_allocated() -> None:
    """Whatever heads and rows a first request takes; of a peer with other heads and pages, only its table is new."""

    def compiled() -> int:
        return sum(len(cache[0]) for cache in copy_kernel.device_caches.values())

    spec = CacheSpec.kv(2, 8, 128, "bfloat16")
    source = PagedPool.allocate(spec, shard(spec), pages=8, page_size=64, device="cuda")
    half = PagedPool.allocate(spec, shard(spec, tp=2, rank=1), pages=32, page_size=16, device="cuda")
    target = MappedPool(half.site, half.buffers)
    TRITON.warm_copy(source, source)
    before = compiled()
    TRITON.warm_copy(source, target)
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    for units in range(1, 5):
        for rows in (1, 5, 16, 100, 400):
            sides = [staged_layout([(1, first, units, 3, 3 + rows, 0)], 1) for first in (8 - units, 0)]
            tables = {KV: PageTable(KV, list(range(8)))}, {KV: PageTable(KV, list(range(32)))}
            move = PageMove(PageCopy(*sides), Pages(source, tables[0]), Pages(target, tables[1]))
            _wait(TRITON.copy([move], None))
    assert compiled() == before
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned


def test_nothing_is_launched_while_a_graph_is_captured() -> None:
    """It would become a part of the graph."""
    with undisturbed() as allowed:
        assert allowed
    graph, cell = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        cell.add_(1)
        with undisturbed() as allowed:
            assert not allowed
    with undisturbed() as allowed:
        assert allowed


class _Fails:
    """An engine's event that raises."""

    def query(self) -> bool:
        raise RuntimeError("the engine's own")

    def synchronize(self) -> None:
        raise AssertionError


def test_launches_that_fail_take_no_slot_with_them_and_copy_nothing() -> None:
    """However many; the next one is right."""
    source, target = _small(), _small()
    _tensor(source).fill_(9)
    torch.cuda.synchronize()
    launcher = CopyLauncher()
    _wait(launcher([_page(source, 0, target, 0)], None))
    for _ in range(SLOTS + 10):
        with pytest.raises(RuntimeError, match="the engine's own"):
            launcher([_page(source, 1, target, 1)], _Fails())
    (context,) = launcher._contexts.values()
    assert context.slots.counts == [SLOTS], "slots were lost, or more were allocated"
    _wait(launcher([_page(source, 2, target, 2)], None))
    assert _first_plane(target)[:3] == [9, 0, 9]


def test_pools_are_not_kept_alive() -> None:
    source, target = _small(), _small()
    _wait(TRITON.copy([_page(source, 0, target, 0)], None))
    gone = [weakref.ref(pool) for pool in (source, target)]
    del source, target
    gc.collect()
    assert [one() for one in gone] == [None, None]
