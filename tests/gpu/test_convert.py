"""Conversions natively: every byte and every sum is the reference's, for every code of every format."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from disagg_kv.geometry import CONVERSIONS, PageTable, elect, shard
from disagg_kv.kernels import Move, PageMove, Pages, ReferenceKernels, gpu_kernels
from disagg_kv.kernels.convert.triton import convert
from disagg_kv.memory import Buffer, ConvertedPool, Event, Layout, MappedPool, PagedMemory, PagedPool, new_buffer
from disagg_kv.planning import PairPlan, Segment
from tests.support.convert_grid import Case, cases, check, every_code, moves_of
from tests.support.copy_grid import CopyGrid, Kind, check_copy
from tests.support.kernel_grid import content_of
from tests.support.pools import KV

ODD = list(cases((5, 3)))
EVEN = list(cases((128, 64)))
KINDS: list[tuple[Layout, bool]] = [("NHD", False), ("HND", False), ("NHD", True)]
SLICES = [(0, 2, 1), (1, 0, 2), (0, 0, 3)]
LONG = 3_000_000_000
"""Clock cycles: about one and a half seconds, in which the host does everything else."""


@pytest.mark.parametrize("case", EVEN, ids=lambda case: case.name)
def test_gathers_and_sums_equal_the_reference(case: Case) -> None:
    check(gpu_kernels(), case, "NHD", "cuda")


@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1), (2, 4)])
def test_cells_of_any_length_are_converted_at_any_address(shifts: tuple[int, int]) -> None:
    for case in ODD:
        check(gpu_kernels(), case, "HND", "cuda", shifts)


@pytest.mark.parametrize(("source", "target"), sorted(CONVERSIONS))
def test_every_code_becomes_what_the_reference_says(source: str, target: str) -> None:
    every_code(gpu_kernels(), source, target, "cuda")


@pytest.mark.parametrize("case", EVEN, ids=lambda case: case.name)
def test_copies_equal_the_reference_on_every_byte_of_all_pools(case: Case) -> None:
    """Into every layout in one call; what needs no conversion is copied as it is."""
    targets: list[Kind] = [(*kind, size) for kind, size in zip(KINDS, (16, 3, 64), strict=True)]
    grid = CopyGrid.between(("NHD", False, 4), targets, (case.source, case.target), SLICES)
    check_copy(gpu_kernels(), grid, "cuda")


RULES = [4, 7, len(ODD) // 2, len(ODD) - 1]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_copies_between_pages_of_all_kinds_equal_the_reference(kind: tuple[Layout, bool], page_size: int) -> None:
    """For every rule of scales, wide accesses and narrow ones."""
    targets: list[Kind] = [(*into, size) for into in KINDS for size in (1, 4, 64)]
    for case in (of[i] for i in RULES for of in (ODD, EVEN)):
        check_copy(gpu_kernels(), CopyGrid.between((*kind, page_size), targets, case.of_one_layer, SLICES), "cuda")


@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1), (2, 4)])
def test_cells_of_any_length_are_copied_from_and_to_any_address(shifts: tuple[int, int]) -> None:
    for case in ODD:
        grid = CopyGrid.between(("HND", False, 4), [("NHD", False, 3)], (case.source, case.target), SLICES)
        check_copy(gpu_kernels(), grid, "cuda", shifts)


def test_a_bounded_launch_copies_the_same() -> None:
    """Each program goes on until all is converted."""
    for case, programs in itertools.product((EVEN[4], EVEN[-1]), (1, 5)):
        grid = CopyGrid.between(("NHD", False, 16), [("HND", False, 64)], (case.source, case.target), SLICES)
        check_copy(gpu_kernels(programs), grid, "cuda")


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _pools(case: Case) -> tuple[PagedPool, ConvertedPool, list[PagedPool]]:
    """A pool of noise, how it is read, and three that may be written."""
    own = PagedPool.allocate(case.source, shard(case.source), pages=8, page_size=4, allocator=_noise)
    targets = [PagedPool.allocate(case.target, shard(case.target), pages=8, page_size=4, device="cuda") for _ in "abc"]
    torch.cuda.synchronize()
    return own, ConvertedPool(own, case.target), targets


def _noise(nbytes: int) -> Buffer:
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return Buffer(memory.data_ptr(), nbytes, str(memory.device), memory)


def _page_move(source: ConvertedPool, target: PagedMemory, rows: tuple[int, int] = (0, 21)) -> PageMove:
    spec = source.spec
    copy = PairPlan(source.site, target.site, elect(spec, [shard(spec)], shard(spec))[0]).page_copy(
        Segment(*rows, 0, 2)
    )
    tables = [{KV: PageTable(KV, pages)} for pages in ([3, 0, 7, 1, 2, 5], [5, 4, 3, 2, 1, 0])]
    return PageMove(copy, Pages(source, tables[0]), Pages(MappedPool(target.site, target.buffers), tables[1]))


def _compiled() -> int:
    """Kernels of conversions that were compiled in this process."""
    return sum(len(cache[0]) for cache in convert.device_caches.values())


@pytest.mark.parametrize("case", [EVEN[4], EVEN[-1]], ids=lambda case: case.name)
def test_after_the_warm_up_nothing_is_compiled(case: Case) -> None:
    """Whatever rows a first request takes, by gather or copy; with memory for arguments, nothing waits for the GPU."""
    triton = gpu_kernels()
    _own, source, (target, wanted, _) = _pools(case)
    triton.warm(source)
    triton.warm_copy(source, MappedPool(target.site, target.buffers))
    before = _compiled()
    for rows in ((0, 1), (3, 5), (0, 16), (1, 21), (0, 21)):
        _wait(triton.copy([_page_move(source, target, rows)], None))
        ReferenceKernels().copy([_page_move(source, wanted, rows)], None)
    moves, nbytes = moves_of(source)
    _wait(triton.gather(source, moves[:1], new_buffer(nbytes, "cuda"), None))
    assert _compiled() == before
    assert np.array_equal(content_of(target.buffers[0]), content_of(wanted.buffers[0]))


@pytest.mark.parametrize("case", [EVEN[4], ODD[-1]], ids=lambda case: case.name)
def test_conversions_wait_for_the_engines_event_and_prepared_ones_are_launched_once(case: Case) -> None:
    """By copy and by gather; every slot of what is dropped comes back."""
    triton = gpu_kernels()
    own, source, (target, wanted, other) = _pools(case)
    moves, nbytes = moves_of(source)
    staging, gathered = (new_buffer(nbytes + 64, "cuda") for _ in range(2))
    memory = own.buffers[0].owner
    assert isinstance(memory, torch.Tensor)
    # A kernel's first use may wait for all that is enqueued.
    _wait(triton.copy([_page_move(source, other)], None))
    _wait(triton.gather(source, moves, staging, None))
    memory.copy_(memory.flip(0))
    torch.cuda.synchronize()
    for _ in range(100):
        gather = triton.prepare_gather(source, moves, staging)
        assert gather is not None
        gather.drop()
    gather = triton.prepare_gather(source, moves, staging)
    assert gather is not None
    torch.cuda._sleep(LONG)
    memory.copy_(memory.flip(0))
    computed = torch.cuda.Event()
    computed.record()
    events = triton.copy([_page_move(source, target)], computed), gather.launch(32, computed)
    assert not computed.query()
    for event in events:
        assert event is not None
        event.synchronize()
    reference = ReferenceKernels()
    reference.copy([_page_move(source, wanted)], None)
    reference.gather(source, [Move(m.layout, m.tables, m.base + 32) for m in moves], gathered, None)
    assert np.array_equal(content_of(target.buffers[0]), content_of(wanted.buffers[0]))
    assert np.array_equal(content_of(staging)[48 : nbytes - 5], content_of(gathered)[48 : nbytes - 5])
