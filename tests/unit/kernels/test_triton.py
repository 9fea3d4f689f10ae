"""The Triton kernels, interpreted on the CPU, against the reference bit for bit; natively: ``tests/gpu``."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from disagg_kv.errors import LocalProtocolError, RegistrationError, UnsupportedError
from disagg_kv.geometry import CacheSpec, PageTable, elect, shard
from disagg_kv.kernels import KERNELS, Move, SupportsPreparing, SupportsStreams, SupportsWarmUp, kernels_for
from disagg_kv.kernels.triton_shapes import shapes
from disagg_kv.kernels.triton_tables import Call, Planes, SumCall
from disagg_kv.memory import Buffer, Layout, PagedPool
from disagg_kv.planning import PartView, Segment
from tests.support.checksums import cell_sum, expected_sums
from tests.support.kernel_cases import cases
from tests.support.kernel_grid import ALIGNMENTS, Grid, buffer_on, check, check_prepared, check_prepared_gather, strided
from tests.support.pools import KV, Bytes, adopted, buffer_over, copies, noise, staged_layout
from tests.support.rig_parts import FiredEvent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs natively here: see tests/gpu")

TRITON = KERNELS["triton"]()


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("layout", "fused"), [("NHD", False), ("HND", False), ("NHD", True)], ids=["NHD", "HND", "fused"]
)
def test_the_kernels_equal_the_reference_on_every_byte_of_both_buffers_and_in_every_sum(
    layout: Layout, fused: bool, page_size: int, alignment: int
) -> None:
    """Slices, partial pages, every layout, item size and alignment, K != V; all of it in one launch."""
    grid = Grid.of(layout, fused, page_size, alignment, [(0, 1), (1, 3), (0, 3)])
    check(TRITON, grid.pool, grid.moves, grid.staging_bytes, "cpu", (0, 0))


@pytest.mark.parametrize("shifts", [(1, 0), (0, 2), (4, 8), (8, 4), (8, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_storage_may_be_misaligned_on_either_side(layout: Layout, shifts: tuple[int, int]) -> None:
    """Units of 16 bytes whose addresses allow only less."""
    grid = Grid.of(layout, False, 4, 16, [(1, 3)])
    check(TRITON, grid.pool, grid.moves, grid.staging_bytes, "cpu", shifts)


@settings(max_examples=30)
@given(case=cases())
def test_any_strides_tables_and_moves(case: tuple[PagedPool, Bytes, list[Move], Bytes]) -> None:
    """Every named unit arrives, and no other byte of pages or staging changes, whatever the geometry."""
    pool, memory, moves, staging = case
    before, expected = memory.copy(), staging.copy()
    for cell, at, nbytes in copies(pool, moves):
        expected[at : at + nbytes] = memory[cell : cell + nbytes]
    assert TRITON.gather(pool, moves, buffer_over(staging), None) is None
    assert np.array_equal(staging, expected)
    assert np.array_equal(memory, before)

    staging[:] = noise(len(staging), 98)
    for cell, at, nbytes in copies(pool, moves):
        before[cell : cell + nbytes] = staging[at : at + nbytes]
    assert [of.tolist() for of in TRITON.checksum(pool, moves, None).read()] == expected_sums(pool, memory, moves)
    assert TRITON.scatter(pool, moves, buffer_over(staging)) is None
    assert np.array_equal(memory, before)
    assert np.array_equal(staging, noise(len(staging), 98))


@pytest.mark.parametrize(("unit_bytes", "units", "gap"), [(2064, 1, 16), (160, 3, 0), (2052, 2, 0), (96, 2, 32)])
def test_runs_wider_than_a_tile_and_rows_beyond_one_tile(unit_bytes: int, units: int, gap: int) -> None:
    """Long and odd runs are cut into columns, many rows into tiles; entries end where they end."""
    pool = strided(unit_bytes, units, gap, 16)
    pages = PageTable(KV, [5, 0, 3])
    entries, end = [], 0
    for plane in range(len(pool.site.planes)):
        rows = 41 - 20 * plane
        entries.append((plane, 0, units, 2, 2 + rows, end))
        end += rows * units * unit_bytes
    check(TRITON, pool, [Move(staged_layout(entries, end), {KV: pages}, 0)], end, "cpu", (0, 0))


def test_rooms_far_into_their_tables_send_only_the_page_ids_in_use() -> None:
    """Tables that begin late, long tables, one table in two moves, a move without entries, an entry without rows."""
    spec = CacheSpec.kv(1, 2, 4, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=40, page_size=4)
    long = PageTable(KV, np.random.default_rng(0).permutation(40), 400)
    moves = [
        Move(staged_layout([(0, 0, 2, 470, 477, 0), (1, 1, 1, 500, 500, 112)], 112), {KV: long}, 0),
        Move(staged_layout([], 0), {}, 112),
        Move(staged_layout([(1, 0, 1, 470, 477, 0)], 56), {KV: long}, 112),
        Move(staged_layout([(1, 0, 2, 0, 3, 0)], 48), {KV: PageTable(KV, [long.pages[0]])}, 168),
    ]
    check(TRITON, pool, moves, 220, "cpu", (0, 0))


def test_gather_reads_the_pages_only_after_the_event() -> None:
    """Whatever the event writes is what arrives."""
    spec = CacheSpec.kv(1, 2, 4, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)

    class Happens:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            pool.view(0)[...] = 7

    staging = np.zeros(8, np.uint8)
    move = Move(staged_layout([(0, 1, 1, 2, 3, 0)], 8), {KV: PageTable(KV, [3])}, 0)
    TRITON.gather(pool, [move], buffer_over(staging), Happens())
    assert staging.tolist() == [7] * 8
    pool.view(0)[...] = 0
    sums = TRITON.checksum(pool, [move], Happens()).read()
    assert [of.tolist() for of in sums] == [[cell_sum(b"\7" * 8, 0, "k", 2, 1)]]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_prepared_equals_the_reference_and_reads_what_is_there_when_it_is_launched(layout: Layout) -> None:
    """What comes between has effect, and no byte moves before."""
    grid = Grid.of(layout, False, 3, 16, [(0, 1), (1, 3)])
    check_prepared(TRITON, grid, "cpu")
    check_prepared_gather(TRITON, grid, "cpu")


def test_what_was_prepared_is_launched_once_or_dropped() -> None:
    assert isinstance(TRITON, SupportsPreparing)
    assert not any(isinstance(KERNELS[name](), SupportsPreparing) for name in ("cpu", "reference"))
    spec = CacheSpec.kv(1, 2, 4, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)
    staging = noise(8, 0)
    move = Move(staged_layout([(0, 1, 1, 2, 3, 0)], 8), {KV: PageTable(KV, [3])}, 0)
    dropped, launched = (TRITON.prepare_scatter(pool, [move], buffer_over(staging)) for _ in range(2))
    assert dropped is not None
    assert launched is not None
    dropped.drop()
    dropped.drop()
    with pytest.raises(LocalProtocolError, match="launched or dropped before"):
        dropped.launch()
    assert not pool.view(0).any()
    assert launched.launch() is None
    assert pool.view(0).any()
    launched.drop()
    with pytest.raises(LocalProtocolError, match="launched or dropped before"):
        launched.launch()


def test_patterns_are_remembered_within_bounds() -> None:
    """More peers and layer groups than a pool remembers only cost time."""
    from disagg_kv.kernels.triton_tables import PATTERNS, Planes

    spec = CacheSpec.kv(1, 300, 1, "uint8")
    pool = PagedPool.allocate(spec, shard(spec), pages=1, page_size=1)
    planes = Planes(pool)
    first = planes.pattern([staged_layout([(0, 0, 1, 5, 6, 0)], 1)])
    assert planes.pattern([staged_layout([(0, 0, 1, 7, 8, 0)], 1)]) is first
    for unit in range(1, PATTERNS + 1):
        words = planes.pattern([staged_layout([(0, unit, 1, 5, 7, 3)], 2)]).words
        assert words.tolist() == [[1, 2, planes.addr, unit, 0, 0, 3, 0]]
    assert planes.pattern([staged_layout([(0, 0, 1, 5, 6, 0)], 1)]) is not first


def test_a_pattern_is_found_by_what_layouts_say_of_each_other_and_is_that_of_their_content() -> None:
    """Layouts that a view makes are not compared byte by byte; the result is as if they were."""
    spec = CacheSpec.kv(2, 4, 2, "uint8")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)
    planes = Planes(pool)
    writers = [shard(spec, tp=2, rank=rank) for rank in range(2)]
    views = [PartView(pool.site, parts) for parts in elect(spec, writers, shard(spec))]
    segments = [Segment(0, 4, 0, 2), Segment(4, 8, 0, 2), Segment(0, 5, 0, 2), Segment(0, 4, 0, 1)]
    for pair in itertools.product(segments, repeat=2):
        first, again = ([v.layout(segment) for v, segment in zip(views, pair, strict=True)] for _ in range(2))
        found = planes.pattern(first)
        assert planes.pattern(again) is found
        assert planes.pattern([attrs.evolve(layout) for layout in first]) is found


def test_memory_on_two_devices_is_refused() -> None:
    spec = CacheSpec.kv(1, 2, 4, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)
    with pytest.raises(RegistrationError, match=r"'cpu'.*'cuda:1'"):
        TRITON.gather(pool, [], Buffer(4096, 4096, "cuda:1"), None)
    far = adopted(spec, shard(spec), pool.site.groups, pool.site.planes, [_elsewhere(pool)])
    with pytest.raises(RegistrationError, match="interpreted here: no memory on 'cuda:0'"):
        TRITON.scatter(far, [], Buffer(4096, 4096, "cuda:0"))
    assert isinstance(TRITON, SupportsPreparing)
    with pytest.raises(RegistrationError, match=r"'cpu'.*'cuda:1'"):
        TRITON.prepare_scatter(pool, [], Buffer(4096, 4096, "cuda:1"))
    with pytest.raises(RegistrationError, match="interpreted here: no memory on 'cuda:0'"):
        TRITON.checksum(far, [], None)


def _elsewhere(pool: PagedPool) -> Buffer:
    return Buffer(4096, pool.site.buffers[0], "cuda:0")


def test_more_than_the_kernels_can_count_is_refused_before_anything_is_written() -> None:
    spec = CacheSpec.kv(1, 2, 4, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)
    move = Move(staged_layout([(0, 0, 2, 0, 2**31, 0)], 0), {KV: PageTable(KV, [1])}, 0)
    with pytest.raises(UnsupportedError, match="1 entries, the largest of 2147483648 pieces"):
        TRITON.gather(pool, [move], buffer_on("cpu", noise(16, 0)), None)
    with pytest.raises(UnsupportedError, match="1 entries, the largest of 4294967296 pieces"):
        TRITON.checksum(pool, [move], None)


@settings(max_examples=60)
@given(case=cases())
def test_what_is_compiled_for_a_pool_is_what_any_gather_and_checksum_take(
    case: tuple[PagedPool, Bytes, list[Move], Bytes],
) -> None:
    """Any widths, strides, gaps and units, wherever the parts lie in staging."""
    pool, _, moves, staging = case
    planes, at = Planes(pool), staging.ctypes.data
    call = Call(planes, moves, 4096, None, at)
    if call.entries:
        sums = SumCall(planes, moves, 4096, None, np.zeros(call.entries, np.int64))
        into = np.zeros(sums.words, np.int64)
        places = [at + move.base + offset for move in moves for offset in (0, *move.layout.offset.tolist())]
        parts = int(np.bitwise_or.reduce(np.array(places)))
        known = {one.constants for one in shapes(planes, pool, 4096, None, parts)}
        assert call.write(into, 0).constants in known
        known = {one.constants for one in shapes(planes, pool, 4096, single=True)}
        assert sums.write(into, 0).constants in known


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_compiled_beforehand_is_what_requests_take(layout: Layout) -> None:
    """Whatever heads and rows a peer takes, the constants are among those of the warm-up."""
    spec = CacheSpec.kv(3, 8, 128, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=8, page_size=16, layout=layout)
    planes = Planes(pool)
    known = {s.constants for s in shapes(planes, pool, 4096)}
    assert len(known) <= 8
    table = {KV: PageTable(KV, list(range(8)))}
    for units in range(1, 9):
        for rows in (1, 2, 7, 16, 100):
            size = rows * units * 256
            moves = [
                Move(
                    staged_layout(
                        [(plane, 8 - units, units, 3, 3 + rows, plane * size) for plane in range(6)], 6 * size
                    ),
                    table,
                    at,
                )
                for at in (0, 1 << 20)
            ]
            call = Call(planes, moves, 4096, None, 1 << 20)
            shape = call.write(np.zeros(call.words, np.int64), 1 << 12)
            assert shape.constants in known, (units, rows)


def test_what_is_compiled_beforehand_is_what_checksums_take() -> None:
    """Whatever heads and rows are compared."""
    spec = CacheSpec.kv(3, 8, 128, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=8, page_size=16)
    planes, table = Planes(pool), {KV: PageTable(KV, list(range(8)))}
    known = {s.constants for s in shapes(planes, pool, 4096, single=True)}
    assert len(known) <= 8
    for units in range(1, 9):
        for start, stop in ((0, 1), (3, 5), (3, 10), (0, 16), (1, 101)):
            layout = staged_layout([(plane, 8 - units, units, start, stop, 0) for plane in range(6)], 1)
            call = SumCall(planes, [Move(layout, table, 0), Move(layout, table, 0)], 4096, None, np.arange(12))
            assert call.write(np.zeros(call.words, np.int64), 1 << 12).constants in known, (units, start, stop)


def test_kernels_are_ready_before_the_first_request_and_wait_for_no_event_where_they_are_interpreted() -> None:
    """Interpreted, nothing is compiled, and an event is waited for by the thread."""
    pool = PagedPool.allocate(
        CacheSpec.kv(1, 2, 4, "float16"), shard(CacheSpec.kv(1, 2, 4, "float16")), pages=2, page_size=4
    )
    assert isinstance(TRITON, SupportsWarmUp)
    assert isinstance(TRITON, SupportsStreams)
    TRITON.warm(pool)
    TRITON.warm_checksum(pool)
    assert not TRITON.orders(FiredEvent())


def test_a_gpu_is_served_by_triton() -> None:
    assert kernels_for("cuda:0").name == "triton"


def _python(code: str) -> None:
    """Run in a process in which Triton compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_without_triton_a_gpu_is_served_by_the_reference_and_it_is_said_what_to_install() -> None:
    _python(
        "import logging, sys; sys.modules['triton'] = None\n"
        "from disagg_kv.kernels import available, kernels_for\n"
        "said = []\n"
        "logging.getLogger('disagg_kv').addFilter(lambda record: said.append(record.getMessage()))\n"
        "assert kernels_for('cuda:0').name == 'reference'\n"
        "assert 'cuda:0' in said[0] and 'disagg_kv[triton]' in said[0], said\n"
        "found = available()\n"
        "assert found['reference'] is found['cpu'] is None and 'triton' in found['triton'], found\n"
    )


def test_compiled_kernels_refuse_the_memory_of_the_cpu() -> None:
    _python(
        "from disagg_kv.errors import RegistrationError\n"
        "from disagg_kv.geometry import CacheSpec, shard\n"
        "from disagg_kv.kernels import KERNELS, available\n"
        "from disagg_kv.memory import PagedPool\n"
        "spec = CacheSpec.kv(1, 2, 4, 'float16')\n"
        "pool = PagedPool.allocate(spec, shard(spec), pages=2, page_size=4)\n"
        "try: KERNELS['triton']().gather(pool, [], pool.buffers[0], None)\n"
        "except RegistrationError as error: assert 'not interpreted' in str(error), error\n"
        "else: raise SystemExit('moved')\n"
        "assert 'cuda' in available()['triton']\n"
    )
