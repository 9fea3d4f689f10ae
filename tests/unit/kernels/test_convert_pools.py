"""Gather, copy and sums of pools that are read as other caches, against the reference: NumPy's, Triton's interpreted.

The interpreter is slow, so it takes a selection here; ``tests/gpu`` takes everything.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from attrs import evolve

from disagg_kv.errors import LocalProtocolError
from disagg_kv.geometry import PageTable, elect, shard
from disagg_kv.kernels import (
    KERNELS,
    Move,
    PageMove,
    Pages,
    ReferenceKernels,
    SupportsPreparing,
    SupportsWarmUp,
)
from disagg_kv.kernels.convert.kinds import Kind, kinds_of, op_of, split_copies
from disagg_kv.kernels.convert.launch import beside, in_turn
from disagg_kv.kernels.triton_copies import CopyCall, CopyPatterns
from disagg_kv.kernels.triton_copy_launch import bits_of
from disagg_kv.kernels.triton_shapes import shapes
from disagg_kv.kernels.triton_tables import Call, Planes
from disagg_kv.memory import All, Buffer, ConvertedPool, Event, Layout, PagedPool, bytes_of, new_buffer
from disagg_kv.planning import PairPlan, Segment
from tests.support import copy_grid
from tests.support.convert_grid import HEADS, Case, cases, check, content, every_code, moves_of
from tests.support.copy_grid import CopyGrid, check_copy
from tests.support.kernel_grid import buffer_on
from tests.support.pools import KV, staged_layout

TRITON = pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it runs natively here"))
ODD = list(cases((5, 3)))
EVEN = list(cases((16, 8)))


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_numpy_gathers_and_sums_what_the_reference_does(case: Case, layout: Layout) -> None:
    check(KERNELS["cpu"](), case, layout, "cpu", (1, 3))


def test_sums_of_more_rows_than_are_converted_at_once_are_those_of_the_reference() -> None:
    """They are sums modulo 2^64, without a warning."""
    case = EVEN[8]
    own = PagedPool.allocate(case.source, shard(case.source), pages=400, page_size=4, allocator=_content)
    pool = ConvertedPool(own, case.target)
    converted = [number for number, how in enumerate(pool.site.conversions) if how is not None]
    entries = [(number, 0, HEADS, 0, 1500, 0) for number in converted]
    move = Move(staged_layout(entries, 1), {KV: PageTable(KV, list(range(375)))}, 0)
    ours, theirs = (of.checksum(pool, [move], None).read()[0] for of in (KERNELS["cpu"](), ReferenceKernels()))
    assert np.array_equal(ours, theirs)


INTO: list[copy_grid.Kind] = [("HND", False, 3), ("NHD", True, 5)]
SLICES = [(0, 2, 1), (1, 0, 2)]


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_numpy_copies_what_the_reference_does(case: Case) -> None:
    """What needs no conversion is copied as it is."""
    grid = CopyGrid.between(("NHD", False, 4), INTO, (case.source, case.target), SLICES)
    check_copy(KERNELS["cpu"](), grid, "cpu", (1, 3))


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize("case", [*EVEN[:9:4], EVEN[-1]], ids=lambda case: case.name)
def test_triton_copies_what_the_reference_does(case: Case, kernels: str) -> None:
    """Into two pools at once; wide accesses where both sides allow them."""
    grid = CopyGrid.between(("NHD", False, 2), [("HND", False, 3), ("NHD", True, 1)], case.of_one_layer, [(1, 0, 2)])
    check_copy(KERNELS[kernels](), grid, "cpu")


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize(("case", "shifts"), [(ODD[8], (0, 0)), (ODD[-1], (1, 2))], ids=["computed", "read"])
def test_triton_copies_cells_of_any_length_to_any_address(case: Case, kernels: str, shifts: tuple[int, int]) -> None:
    grid = CopyGrid.between(("HND", False, 2), [("NHD", False, 1)], (case.source, case.target), [(0, 2, 1)])
    check_copy(KERNELS[kernels](), grid, "cpu", shifts)


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize("case", EVEN[::7], ids=lambda case: case.name)
def test_triton_gathers_and_sums_what_the_reference_does(case: Case, kernels: str) -> None:
    """Wide accesses; what needs no conversion is copied as it is."""
    check(KERNELS[kernels](), case, "NHD", "cpu")


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1)])
def test_triton_converts_cells_of_any_length_at_any_address(kernels: str, shifts: tuple[int, int]) -> None:
    for case in ODD[5::40]:
        check(KERNELS[kernels](), case, "HND", "cpu", shifts)


@pytest.mark.parametrize("kernels", [TRITON])
@pytest.mark.parametrize(
    ("source", "target"), [("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("float8_e4m3fn", "bfloat16")]
)
def test_triton_equals_the_reference_on_every_code(source: str, target: str, kernels: str) -> None:
    every_code(KERNELS[kernels](), source, target, "cpu")


@pytest.mark.parametrize("kernels", [TRITON])
def test_a_gather_that_converts_may_be_prepared(kernels: str) -> None:
    """It is launched once, wherever its parts lie then; what is dropped writes nothing. A copy is not: see base."""
    triton = KERNELS[kernels]()
    assert isinstance(triton, SupportsPreparing)
    case = ODD[4]
    own = PagedPool.allocate(case.source, shard(case.source), pages=8, page_size=4, allocator=_content)
    pool = ConvertedPool(own, case.target)
    moves, nbytes = moves_of(pool)
    wanted, found = (new_buffer(nbytes + 64, "cpu") for _ in range(2))
    ReferenceKernels().gather(pool, [evolve(move, base=move.base + 32) for move in moves], wanted, None)
    for launches in (False, True):
        prepared = triton.prepare_gather(pool, moves, found)
        assert prepared is not None
        if launches:
            assert prepared.launch(32, None) is None
        else:
            prepared.drop()
            assert not bytes_of(found).any()
        with pytest.raises(LocalProtocolError):
            prepared.launch(0, None)
        prepared.drop()
    assert np.array_equal(bytes_of(found), bytes_of(wanted))
    assert triton.prepare_gather(pool, [], found) is None


def _content(nbytes: int) -> Buffer:
    return buffer_on("cpu", content(nbytes, 1))


class Timed:
    """An event, and who waited for it."""

    def __init__(self) -> None:
        self.waited = 0

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited += 1


def test_several_launches_are_one_and_where_one_raises_the_others_have_ended() -> None:
    """Gathers run side by side; copies one after another, so that they take no more of the GPU than one."""
    events, behind = [Timed(), Timed()], list[object]()

    def launch(one: Timed | None, after: Event | None) -> Event | None:
        behind.append(after)
        return one

    def fails(after: Event | None) -> Event | None:
        raise OSError("a launch")

    after = Timed()
    launches = [partial(launch, one) for one in (events[0], None, events[1])]
    both = beside(launches, after)
    assert isinstance(both, All)
    assert both.events == tuple(events)
    assert in_turn(launches, after) is events[1]
    assert behind == [after, after, after, after, events[0], events[0]]
    assert beside([partial(launch, None)], None) is in_turn([], None) is None
    for run in (beside, in_turn):
        with pytest.raises(OSError, match="a launch"):
            run([*launches, fails], after)
    assert (events[0].waited, events[1].waited, after.waited) == (1, 2, 0)


@pytest.mark.parametrize("case", [EVEN[4], EVEN[-1], ODD[8]], ids=lambda case: case.name)
def test_what_is_compiled_beforehand_is_what_conversions_take(case: Case) -> None:
    """Whatever heads, rows and place in staging: the constants are among those of the warm-up."""
    own, target = (PagedPool.allocate(one, shard(one), pages=1, page_size=16) for one in (case.source, case.target))
    source = ConvertedPool(own, case.target)
    planes = Planes(source)
    known_planes = {id(source): planes, id(target): Planes(target)}
    plans = PairPlan(source.site, target.site, elect(case.target, [shard(case.target)], shard(case.target))[0])
    tables = {KV: PageTable(KV, list(range(4)))}
    kinds = [(kind, numbers) for kind, numbers in kinds_of(source).planes() if kind is not None]
    assert kinds
    for kind, numbers in kinds:
        cells = op_of("gather", kind).cells
        known = {one.constants for one in shapes(planes, source, 8192, cells, numbers=numbers)}
        patterns = CopyPatterns(1 << 15, cells)

        def cut(move: PageMove, kind: Kind = kind, patterns: CopyPatterns = patterns) -> object:
            (some,) = dict(split_copies([move]))[kind]
            return CopyCall([some], lambda pool: known_planes[id(pool)], patterns)._pattern.shape.constants

        bits = bits_of(source, target)
        copied = {one.constants for one in shapes(planes, source, 1 << 15, cells, bits, numbers=numbers)}
        for start, stop in ((0, 1), (3, 5), (0, 16), (1, 40)):
            copy = plans.page_copy(Segment(start, stop, 0, 2))
            move = Move(copy.source, tables, 256)
            (some,) = next(of for found, of, _ in kinds_of(source).split([move]) if found == kind)
            call = Call(planes, [some], 8192, cells, 1 << 20)
            shape = call.write(np.zeros(call.words, np.int64), 0)
            assert shape.constants in known, (kind, start, stop)
            assert cut(PageMove(copy, Pages(source, tables), Pages(target, tables))) in copied


def test_a_warm_up_for_another_cache_touches_nothing_where_kernels_are_interpreted() -> None:
    """Neither pool, for gathers, checksums and copies."""
    case = EVEN[4]
    own, target = (PagedPool.allocate(one, shard(one), pages=2, page_size=4) for one in (case.source, case.target))
    triton = KERNELS["triton"]()
    assert isinstance(triton, SupportsWarmUp)
    source = ConvertedPool(own, case.target)
    triton.warm(source)
    triton.warm_checksum(source)
    triton.warm_copy(source, target)
    assert not bytes_of(target.buffers[0]).any()
