"""The Triton kernels natively: bit for bit, above 4 GiB, and in the right order of streams.

On a host with torch and Triton: ``PYTHONPATH=src python3 -m pytest tests/gpu``.
"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given

from disagg_kv.errors import LocalProtocolError, RegistrationError
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import LayerId
from disagg_kv.kernels import (
    KERNELS,
    Checksums,
    Kernels,
    Move,
    Prepared,
    SupportsPreparing,
    SupportsStreams,
    SupportsWarmUp,
    available,
    kernels_for,
)
from disagg_kv.kernels.convert.launch import launcher as launcher_of
from disagg_kv.kernels.cuda_queue import Mark
from disagg_kv.kernels.triton_kernels import OPS
from disagg_kv.kernels.triton_launch import FULL, Launcher
from disagg_kv.kernels.triton_slots import MOST_PREPARED, SLOTS
from disagg_kv.memory import All, Buffer, Layout, PagedPool, new_buffer
from tests.support.checksums import cell_sum, expected_sums
from tests.support.kernel_cases import cases
from tests.support.kernel_grid import (
    ALIGNMENTS,
    Grid,
    buffer_on,
    check,
    check_prepared,
    check_prepared_gather,
    content_of,
    placed,
    strided,
)
from tests.support.pools import KV, Bytes, copies, noise, staged_layout
from tests.support.rig_parts import FiredEvent

SLICES = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
TRITON = KERNELS["triton"]()
SMALL = CacheSpec.kv(1, 2, 4, "float16")


def test_a_gpu_is_served_by_triton_and_everything_works_here() -> None:
    assert type(kernels_for("cuda:0")) is type(TRITON)
    assert available() == dict.fromkeys(KERNELS)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 64, 256])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_kernels_equal_the_reference_on_every_byte_of_both_buffers_and_in_every_sum(
    layout: Layout, fused: bool, page_size: int, alignment: int
) -> None:
    """Every slice, partial pages, every layout, item size and alignment, K != V; all in one launch."""
    grid = Grid.of(layout, fused, page_size, alignment, SLICES)
    check(TRITON, grid.pool, grid.moves, grid.staging_bytes, "cuda", (0, 0))


@pytest.mark.parametrize("pool_shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("staging_shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_storage_may_be_misaligned_on_either_side(layout: Layout, pool_shift: int, staging_shift: int) -> None:
    """Units of 16 bytes whose addresses allow only less."""
    grid = Grid.of(layout, False, 16, 16, SLICES)
    check(TRITON, grid.pool, grid.moves, grid.staging_bytes, "cuda", (pool_shift, staging_shift))


@pytest.mark.parametrize(("unit_bytes", "units", "gap"), [(2064, 1, 16), (160, 3, 0), (2052, 2, 0), (96, 2, 32)])
def test_runs_wider_than_a_tile_and_rows_beyond_one_tile(unit_bytes: int, units: int, gap: int) -> None:
    """Long and odd runs are cut into columns, many rows into tiles; entries end where they end."""
    pool = strided(unit_bytes, units, gap, 64)
    entries, end = [], 0
    for plane in range(len(pool.site.planes)):
        rows = 169 - 100 * plane
        entries.append((plane, 0, units, 2, 2 + rows, end))
        end += rows * units * unit_bytes
    check(TRITON, pool, [Move(staged_layout(entries, end), {KV: PageTable(KV, [5, 0, 3])}, 0)], end, "cuda", (0, 0))


@pytest.mark.parametrize("kernels", [TRITON, KERNELS["reference"]()], ids=["triton", "reference"])
@given(case=cases())
def test_any_strides_tables_and_moves(kernels: Kernels, case: tuple[PagedPool, Bytes, list[Move], Bytes]) -> None:
    """Every named unit arrives, and no other byte of pages or staging changes, whatever the geometry."""
    shaped, memory, moves, content = case
    pool, staging = placed(shaped, buffer_on("cuda", memory)), buffer_on("cuda", content)
    expected, pages = content.copy(), memory.copy()
    for cell, at, nbytes in copies(shaped, moves):
        expected[at : at + nbytes] = memory[cell : cell + nbytes]
    _wait(kernels.gather(pool, moves, staging, None))
    assert np.array_equal(content_of(staging), expected)
    assert np.array_equal(content_of(pool.buffers[0]), memory)
    assert _summed(kernels.checksum(pool, moves, None)) == expected_sums(shaped, memory, moves)

    other = noise(len(content), 98)
    staging = buffer_on("cuda", other)
    for cell, at, nbytes in copies(shaped, moves):
        pages[cell : cell + nbytes] = other[at : at + nbytes]
    _wait(kernels.scatter(pool, moves, staging))
    assert np.array_equal(content_of(pool.buffers[0]), pages)
    assert np.array_equal(content_of(staging), other)


def _summed(sums: Checksums) -> list[list[int]]:
    _wait(sums.event)
    return [of.tolist() for of in sums.read()]


def _wait(event: object) -> None:
    if event is not None:
        assert isinstance(event, Mark)
        event.synchronize()


def _staging(nbytes: int) -> Buffer:
    """Zeroed memory on the GPU; the zeros are there."""
    buffer = new_buffer(nbytes, "cuda")
    torch.cuda.synchronize()
    return buffer


def test_pools_and_staging_above_4_gib() -> None:
    """Pages, planes and parts that begin beyond what 32 bits can address."""
    spec = CacheSpec.kv(1, 8, 128, "bfloat16")
    count, page_size = 40_000, 64
    pools = [PagedPool.allocate(spec, shard(spec), pages=count, page_size=page_size, device="cuda") for _ in range(2)]
    memories = [_tensor(p.buffers[0]) for p in pools]
    assert memories[0].numel() > 9 << 30
    # Every eight bytes differ from all others, so that a wrong place shows.
    torch.arange(memories[0].numel() // 8, out=memories[0].view(torch.int64)).mul_(-7046029254386353131)
    pages = [count - 1, 0, count // 2, count - 2]
    base, rows = 4500 << 20, 3 * page_size + 5
    part = rows * 2 * 256
    layout = staged_layout([(0, 2, 2, 3, 3 + rows, 0), (1, 6, 2, 3, 3 + rows, part)], 2 * part)
    move = Move(layout, {KV: PageTable(KV, pages)}, base)
    staging = [_staging(base + 2 * part) for _ in range(2)]
    _wait(TRITON.gather(pools[0], [move], staging[0], None))
    KERNELS["reference"]().gather(pools[0], [move], staging[1], None)
    assert torch.equal(_tensor(staging[0]), _tensor(staging[1]))
    assert int(_tensor(staging[0])[base:].count_nonzero()) > part
    sums = [_summed(KERNELS[name]().checksum(pools[0], [move], None)) for name in ("triton", "reference")]
    assert sums[0] == sums[1]

    memories[0].copy_(memories[1])
    torch.cuda.synchronize()
    _wait(TRITON.scatter(pools[0], [move], staging[0]))
    KERNELS["reference"]().scatter(pools[1], [move], staging[0])
    assert torch.equal(*memories)
    assert int(memories[0].amax()) > 0


def _tensor(buffer: Buffer) -> torch.Tensor:
    assert isinstance(buffer.owner, torch.Tensor)
    return buffer.owner


def _small() -> tuple[PagedPool, torch.Tensor]:
    spec = CacheSpec.kv(2, 2, 64, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=64, page_size=16, device="cuda")
    torch.cuda.synchronize()
    return pool, _tensor(pool.buffers[0])


def _page(page: int, base: int) -> Move:
    """One page of one plane: 4,096 bytes."""
    return Move(staged_layout([(0, 0, 2, 0, 16, 0)], 4096), {KV: PageTable(KV, [page])}, base)


LONG = 3_000_000_000
"""Clock cycles: about one and a half seconds, in which the host does everything else."""


def test_gather_waits_for_the_engines_event_and_nobody_waits_for_the_gather() -> None:
    """The call returns while the engine still computes; what the engine writes before its event arrives."""
    pool, memory = _small()
    staging = _staging(4096)
    TRITON.gather(pool, [_page(0, 0)], staging, None)  # compiles
    memory.fill_(0)  # a kernel's first use may wait for all that is enqueued
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    memory.fill_(7)
    computed = torch.cuda.Event()
    computed.record()
    gathered = TRITON.gather(pool, [_page(3, 0)], staging, computed)
    assert gathered is not None
    assert not computed.query()
    assert not gathered.query()
    _wait(gathered)
    assert content_of(staging).tolist() == [7] * 4096


def test_a_checksum_waits_for_the_engines_event_and_nobody_waits_for_the_checksum() -> None:
    """Calls queued behind one event, some of which nobody reads, have their own sums of what the engine wrote."""
    pool, memory = _small()
    content = torch.arange(64, dtype=torch.uint8, device="cuda")[:, None]
    memory.view(-1, 4096)[:64] = content.flip(0)  # a kernel's first use may wait for all that is enqueued
    _wait(TRITON.checksum(pool, [_page(0, 0)], None).event)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    memory.view(-1, 4096)[:64] = content
    computed = torch.cuda.Event()
    computed.record()
    sums = [TRITON.checksum(pool, [_page(page, 0)], computed) for page in range(64)]
    assert not computed.query()
    assert not any(one.event is None or one.event.query() for one in sums)
    for page in range(0, 64, 3):
        cells = [cell_sum(bytes([page]) * 128, 0, "k", row, unit) for row in range(16) for unit in range(2)]
        assert _summed(sums[page]) == [[sum(cells) % 2**64]]


def test_sums_that_nobody_reads_cost_no_memory() -> None:
    """However many there are: what they were launched with serves later calls."""
    pool, _ = _small()
    _wait(TRITON.checksum(pool, [_page(0, 0)], None).event)
    before = torch.cuda.memory_allocated()
    for page in range(300):
        _wait(TRITON.checksum(pool, [_page(page % 64, 0)], None).event)
    assert torch.cuda.memory_allocated() == before


def test_kernels_that_are_warmed_in_inference_mode_work_outside_of_it() -> None:
    """An engine makes endpoints in whatever mode it is in; their own thread is in none."""
    pool, memory = _small()
    memory.fill_(3)
    staging = _staging(4096)
    gather = Launcher(OPS["gather"])
    with torch.inference_mode():
        gather.warm(pool)
    _wait(gather(pool, [_page(0, 0)], staging, None))
    assert content_of(staging).tolist() == [3] * 4096


class _Fails:
    """An engine's event that raises."""

    def query(self) -> bool:
        raise RuntimeError("the engine's own")

    def synchronize(self) -> None:
        raise AssertionError


def test_launches_that_fail_take_no_slot_with_them() -> None:
    """However many; the next one is right."""
    pool, memory = _small()
    memory.view(-1, 4096)[5] = 9
    staging, launcher = _staging(4096), Launcher(OPS["gather"])
    _wait(launcher(pool, [_page(5, 0)], staging, None))
    for _ in range(SLOTS + 10):
        with pytest.raises(RuntimeError, match="the engine's own"):
            launcher(pool, [_page(5, 0)], staging, _Fails())
    (context,) = launcher._contexts.values()
    assert context.slots.counts == [SLOTS], "slots were lost, or more were allocated"
    _wait(launcher(pool, [_page(5, 0)], staging, None))
    assert content_of(staging).tolist() == [9] * 4096


def test_arguments_in_flight_are_not_written_over() -> None:
    """Calls queued behind one event keep their own page ids, however many there are."""
    pool, memory = _small()
    memory.view(-1, 4096)[:64] = torch.arange(64, dtype=torch.uint8, device="cuda")[:, None]
    staging = _staging(64 * 4096)
    _wait(TRITON.gather(pool, [_page(0, 0)], staging, None))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    computed = torch.cuda.Event()
    computed.record()
    events = [TRITON.gather(pool, [_page(page, page * 4096)], staging, computed) for page in range(64)]
    assert not computed.query()
    for event in events:
        _wait(event)
    assert np.array_equal(content_of(staging).reshape(64, 4096), np.arange(64, dtype=np.uint8)[:, None].repeat(4096, 1))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_prepared_scatter_equals_the_reference(layout: Layout, page_size: int) -> None:
    """It reads what has come since it was prepared, and no page changes before it is launched."""
    check_prepared(TRITON, Grid.of(layout, False, page_size, 16, SLICES), "cuda")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_prepared_gather_equals_the_reference(layout: Layout, alignment: int) -> None:
    """It goes where it is sent when it is launched, and reads what is in the pages by then."""
    check_prepared_gather(TRITON, Grid.of(layout, False, 3, alignment, SLICES), "cuda")


def test_a_prepared_gather_comes_after_the_engines_event_and_waits_for_no_other() -> None:
    """Not for the event of a gather that was launched after it was prepared, on whatever stream."""
    pool, memory = _small()
    staging = _staging(16 * 4096)
    gather = Launcher(OPS["gather"])
    gather.warm(pool)
    memory.fill_(3)
    torch.cuda.synchronize()
    first, second = (gather.prepare(pool, [_page(page, 0)], staging, moved=True) for page in (0, 1))
    assert first is not None
    assert second is not None
    torch.cuda._sleep(LONG)
    memory.fill_(7)
    computed = torch.cuda.Event()
    computed.record()
    for at in range(2, 5):  # one stream is left that waits for nothing
        gather(pool, [_page(at, at * 4096)], staging, computed)
    _wait(first.launch(0))
    assert not computed.query()
    assert content_of(staging)[:4096].tolist() == [3] * 4096
    _wait(second.launch(4096, computed))
    assert content_of(staging)[4096:8192].tolist() == [7] * 4096


def _prepared(launcher: Launcher, pool: PagedPool, page: int, staging: Buffer) -> Prepared:
    prepared = launcher.prepare(pool, [_page(page, page * 4096)], staging)
    assert prepared is not None
    return prepared


def _pages_of(memory: torch.Tensor) -> list[int]:
    """What each page of the first plane is full of."""
    torch.cuda.synchronize()
    pages = memory.view(-1, 4096)[:64].cpu().numpy()
    assert (pages == pages[:, :1]).all()
    return [int(page[0]) for page in pages]


def test_what_is_prepared_first_may_be_compiled_at_its_launch() -> None:
    """A launcher that was not warmed compiles when it launches."""
    pool, memory = _small()
    memory.fill_(9)
    staging = buffer_on("cuda", np.arange(64, dtype=np.uint8).repeat(4096))
    scatter = Launcher(OPS["scatter"])
    first = _prepared(scatter, pool, 0, staging)
    for prepared in (first, _prepared(scatter, pool, 5, staging)):
        _wait(prepared.launch())
    assert _pages_of(memory) == [5 if page == 5 else 0 if page == 0 else 9 for page in range(64)]


def test_prepared_scatters_keep_their_arguments_whatever_is_launched_or_dropped_meanwhile() -> None:
    """Also where their uploads are queued behind what waits for an engine."""
    pool, memory = _small()
    other, _ = _small()
    staging = buffer_on("cuda", np.arange(64, dtype=np.uint8).repeat(4096))
    scatter = Launcher(OPS["scatter"])
    scatter.warm(pool)
    memory.fill_(99)
    torch.cuda.synchronize()
    kept = [_prepared(scatter, pool, page, staging) for page in range(0, 64, 2)]
    torch.cuda._sleep(LONG)
    computed = torch.cuda.Event()
    computed.record()
    for page in range(16):
        scatter(other, [_page(page, 0)], staging, computed)
        _prepared(scatter, pool, page, staging).drop()
        kept.append(_prepared(scatter, pool, 2 * page, staging))
    events = [prepared.launch() for prepared in kept]
    assert not computed.query()
    for event in events:
        _wait(event)
    assert _pages_of(memory) == [99 if page % 2 else page for page in range(64)]


def test_no_more_is_prepared_than_leaves_slots_for_calls_and_no_memory_is_taken_for_it() -> None:
    """To allocate pinned memory may wait for all of the GPU. Launched or dropped makes room again."""
    pool, memory = _small()
    staging = buffer_on("cuda", np.arange(64, dtype=np.uint8).repeat(4096))
    scatter = Launcher(OPS["scatter"])
    scatter.warm(pool)
    memory.fill_(99)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for end in ("launch", "drop"):
        full = [_prepared(scatter, pool, page % 64, staging) for page in range(MOST_PREPARED)]
        assert scatter.prepare(pool, [_page(0, 0)], staging) is None
        for _ in range(SLOTS - MOST_PREPARED):
            _wait(scatter(pool, [_page(1, 4096)], staging))
        for prepared in full:
            getattr(prepared, end)()
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert _pages_of(memory) == list(range(64))
    table = PageTable(KV, np.zeros(1 << 14, np.int32))
    large = Move(staged_layout([(0, 0, 2, 0, 16 << 14, 0)], 4096), {KV: table}, 0)
    assert scatter.prepare(pool, [large], staging) is None, "there is no slot for so many page ids yet"
    assert torch.cuda.memory_allocated() == before


def test_what_was_prepared_is_launched_once_or_dropped() -> None:
    pool, memory = _small()
    memory.fill_(9)
    staging = _staging(4096)
    assert isinstance(TRITON, SupportsPreparing)
    assert TRITON.prepare_scatter(pool, [], staging) is None
    dropped, launched = (TRITON.prepare_scatter(pool, [_page(0, 0)], staging) for _ in range(2))
    assert dropped is not None
    assert launched is not None
    dropped.drop()
    dropped.drop()
    with pytest.raises(LocalProtocolError, match="launched or dropped before"):
        dropped.launch()
    assert _pages_of(memory)[0] == 9
    _wait(launched.launch())
    assert _pages_of(memory)[0] == 0
    launched.drop()
    with pytest.raises(LocalProtocolError, match="launched or dropped before"):
        launched.launch()


def test_an_event_that_is_not_of_cuda_is_waited_for() -> None:
    pool, memory = _small()

    class Happens:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            memory.fill_(9)
            torch.cuda.synchronize()

    staging = _staging(4096)
    _wait(TRITON.gather(pool, [_page(1, 0)], staging, Happens()))
    assert content_of(staging).tolist() == [9] * 4096


def test_threads_may_gather_and_scatter_at_once() -> None:
    """Each thread copies its pages to another pool; all arrive."""
    source, memory = _small()
    target, copied = _small()
    memory.copy_(torch.from_numpy(noise(memory.numel(), 5)))
    torch.cuda.synchronize()

    def work(first: int) -> None:
        staging = _staging(4096)
        for page in range(first, 64, 4):
            _wait(TRITON.gather(source, [_page(page, 0)], staging, None))
            _wait(TRITON.scatter(target, [_page(page, 0)], staging))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(copied[: 64 * 4096], memory[: 64 * 4096])
    assert not copied[64 * 4096 :].any()


def test_nothing_is_compiled_for_another_request() -> None:
    """Token counts, pages, slices and the number of moves are values; only alignment and widths are code."""
    from disagg_kv.kernels.moves.triton import stage

    def compiled() -> int:
        return sum(len(cache[0]) for cache in stage.device_caches.values())

    spec = CacheSpec.kv(4, 8, 128, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=64, page_size=16, device="cuda")
    staging = _staging(64 << 20)

    def move(first: int, tokens: int, plane: int, base: int) -> Move:
        pages = np.random.default_rng(tokens).permutation(64)
        layout = staged_layout([(plane, first, 2, 0, tokens, 0)], tokens * 512)
        return Move(layout, {KV: PageTable(KV, pages)}, base)

    _wait(TRITON.gather(pool, [move(0, 16, 0, 0)], staging, None))
    before = compiled()
    assert before
    for tokens in (1, 2, 3, 16, 17, 100, 1000, 1024):
        for moves in ([move(2, tokens, 1, 0)], [move(i, tokens, i, i << 20) for i in range(5)]):
            _wait(TRITON.gather(pool, moves, staging, None))
    assert compiled() == before


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("heads", "dim", "dtype"), [(8, 128, "bfloat16"), (3, 80, "float8_e4m3fn")])
def test_after_the_warm_up_nothing_is_compiled_for_a_first_request(
    layout: Layout, heads: int, dim: int, dtype: str
) -> None:
    """Whatever heads and rows it takes."""
    from disagg_kv.kernels.moves.triton import stage

    def compiled() -> int:
        return sum(len(cache[0]) for cache in stage.device_caches.values())

    spec = CacheSpec.kv(2, heads, dim, dtype)
    pool = PagedPool.allocate(spec, shard(spec), pages=8, page_size=16, layout=layout, device="cuda")
    staging = _staging(1 << 20)
    assert isinstance(TRITON, SupportsWarmUp)
    TRITON.warm(pool)
    before, size = compiled(), spec.layers[LayerId(0)][0].unit_bytes
    for units in range(1, heads + 1):
        for rows in (1, 5, 16, 100):
            layout_of = staged_layout([(1, heads - units, units, 3, 3 + rows, 0)], rows * units * size)
            move = Move(layout_of, {KV: PageTable(KV, list(range(8)))}, 0)
            _wait(TRITON.gather(pool, [move], staging, None))
            _wait(TRITON.scatter(pool, [move], staging))
    assert compiled() == before


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_after_their_warm_up_no_checksum_is_compiled(layout: Layout) -> None:
    """Whatever heads and rows the first comparison takes."""
    from disagg_kv.kernels.checksum.triton import checksum

    def compiled() -> int:
        return sum(len(cache[0]) for cache in checksum.device_caches.values())

    spec = CacheSpec.kv(2, 8, 128, "bfloat16")
    pool = PagedPool.allocate(spec, shard(spec), pages=8, page_size=16, layout=layout, device="cuda")
    assert isinstance(TRITON, SupportsWarmUp)
    TRITON.warm_checksum(pool)
    before = compiled()
    for units in range(1, 9):
        for rows in (1, 5, 16, 100):
            move = Move(
                staged_layout([(1, 8 - units, units, 3, 3 + rows, 0)], 1), {KV: PageTable(KV, list(range(8)))}, 0
            )
            sums = TRITON.checksum(pool, [move], None)
            _wait(sums.event)
            (found,), (wanted,) = sums.read(), KERNELS["reference"]().checksum(pool, [move], None).read()
            assert found.tolist() == wanted.tolist()
    assert compiled() == before


def test_a_launch_behind_an_event_delays_no_other() -> None:
    """Consecutive launches are on streams of their own, so one whose chunk is late does not hold up the next."""
    pool, _ = _small()
    staging = _staging(2 * 4096)
    _wait(TRITON.gather(pool, [_page(0, 0)], staging, None))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    late = torch.cuda.Event()
    late.record()
    first = TRITON.gather(pool, [_page(1, 0)], staging, late)
    _wait(TRITON.gather(pool, [_page(2, 4096)], staging, None))
    assert not late.query()
    _wait(first)


def test_large_launches_behind_the_same_events_come_one_after_the_other() -> None:
    """The first is ready for the wire while the others still run: here the second reads what the first has written."""
    spec, pages = CacheSpec.kv(1, 8, 128, "bfloat16"), 512
    first, second = (PagedPool.allocate(spec, shard(spec), pages=pages, page_size=64, device="cuda") for _ in range(2))
    rows, nbytes = 64 * pages, 1 << 26
    layout = staged_layout([(0, 0, 8, 0, rows, 0)], nbytes)
    assert nbytes // OPS["gather"].tuning.tile_bytes >= FULL
    memory, staging = _tensor(first.buffers[0]), _staging(nbytes)
    gather = Launcher(OPS["gather"])
    for pool in (first, second):
        gather.warm(pool)
    for number in range(1, 4):
        torch.cuda._sleep(LONG // 30)
        memory.fill_(number)
        computed = torch.cuda.Event()
        computed.record()
        gather(first, [Move(layout, {KV: PageTable(KV, list(range(pages)))}, 0)], second.buffers[0], computed)
        ended = gather(
            second, [Move(layout, {KV: PageTable(KV, list(reversed(range(pages))))}, 0)], staging, All((computed,))
        )
        assert not computed.query()
        _wait(ended)
        assert (content_of(staging) == number).all()


def test_only_events_of_cuda_are_left_to_the_stream() -> None:
    """One of the host among them has to be asked."""
    assert isinstance(TRITON, SupportsStreams)
    event = torch.cuda.Event()
    assert TRITON.orders(event)
    assert TRITON.orders(All((event, All((event,)))))
    assert not TRITON.orders(All((event, FiredEvent())))


def test_an_end_that_somebody_knows_is_nobody_elses() -> None:
    """Events serve again, but only when they are forgotten: as many as are in use, and no more, are made."""
    pool, _ = _small()
    staging = _staging(4096)
    known = [TRITON.gather(pool, [_page(0, 0)], staging, None) for _ in range(300)]
    handles = {one.cuda_event for one in known if isinstance(one, Mark)}
    assert len(handles) == 300
    torch.cuda.synchronize()
    assert all(one is not None and one.query() for one in known)
    known.clear()
    for _ in range(1000):
        again = TRITON.gather(pool, [_page(0, 0)], staging, None)
        assert isinstance(again, Mark)
        handles.add(again.cuda_event)
        again.synchronize()
    assert len(handles) <= 301


def test_a_pool_is_not_kept_alive() -> None:
    pool, memory = _small()
    _wait(TRITON.gather(pool, [_page(0, 0)], _staging(4096), None))
    gone = weakref.ref(pool)
    del pool, memory
    gc.collect()
    assert gone() is None


def test_memory_on_two_devices_is_refused() -> None:
    pool, _ = _small()
    with pytest.raises(RegistrationError, match=r"'cuda:0'.*'cpu'"):
        TRITON.gather(pool, [_page(0, 0)], new_buffer(4096, "cpu"), None)


def test_what_arrives_is_scattered_on_streams_of_the_lowest_priority() -> None:
    """An engine's stream of a higher priority is served first; nothing is lower than ours."""
    pool = PagedPool.allocate(SMALL, shard(SMALL), pages=2, page_size=4, device="cuda")
    assert isinstance(TRITON, SupportsWarmUp)
    TRITON.warm(pool)
    contexts = [launcher_of(name, None)._context("cuda:0") for name in ("gather", "scatter")]
    ours = {stream.priority for context in contexts for stream in context.streams}
    assert ours == {torch.cuda.Stream(priority=1 << 20).priority}, "out of range is mapped to the lowest"
    assert torch.cuda.Stream(priority=-1).priority < ours.pop()
