"""Which kernels there are, and what they do with nothing and with an event."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from disagg_kv.errors import UnknownNameError
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.kernels import (
    KERNELS,
    Checksums,
    CpuKernels,
    Kernels,
    Move,
    PageMove,
    Pages,
    ReferenceKernels,
    available,
    kernels_for,
)
from disagg_kv.memory import Buffer, Event, Flag, MappedPool, MemoryPool, PagedPool
from disagg_kv.planning import PageCopy
from tests.support.pools import KV, buffer_over, noise, staged_layout

ON_CPU: list[Kernels] = [CpuKernels(), ReferenceKernels()]


class _Happens:
    """An event that happens when somebody waits for it, and then writes."""

    def __init__(self, pool: PagedPool) -> None:
        self.pool = pool
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.pool.view(0)[...] = 7
        self.done = True


class _Copied:
    """The real kernels, wrong in one way, with a real event for what they do."""

    def __init__(self, wrong: str = "") -> None:
        self.name = "copied"
        self.wrong = wrong
        self.waited = 0

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        CpuKernels().gather(pool, moves, staging, after)
        return self

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        if self.wrong != "scatter":
            CpuKernels().scatter(pool, moves, staging)
        return self

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        if self.wrong != "copy":
            CpuKernels().copy(moves, after, flags)
        return self

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        sums = CpuKernels().checksum(pool, moves, after)
        return Checksums(self, lambda: [np.full_like(of, 7) if self.wrong == "checksum" else of for of in sums.read()])

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waited += 1


class _Broken:
    name = "broken"

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        raise OSError("no such instruction")

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        raise OSError("no such instruction")

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        raise OSError("no such instruction")

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        raise OSError("no such instruction")


def _pool() -> PagedPool:
    spec = CacheSpec.kv(2, 2, 4, "bfloat16")
    return PagedPool.allocate(spec, shard(spec), pages=4, page_size=4)


def test_the_cpu_is_served_by_the_numpy_kernels() -> None:
    assert kernels_for("cpu").name == "cpu"


def test_an_unserved_device_is_refused_and_the_served_ones_are_listed() -> None:
    with pytest.raises(UnknownNameError, match=r"'tpu'; known: .*cpu"):
        kernels_for("tpu")


def test_every_implementation_works_on_this_host() -> None:
    assert available() == dict.fromkeys(KERNELS)


def test_what_does_not_work_is_named_with_its_reason() -> None:
    copied = _Copied()
    tried: dict[str, Callable[[], Kernels]] = {
        "a": lambda: copied,
        "b": lambda: _Copied("scatter"),
        "c": _Broken,
        "d": lambda: _Copied("checksum"),
        "e": lambda: _Copied("copy"),
    }
    assert available(tried) == {
        "a": None,
        "b": "IntegrityError: kernels 'copied' move wrong bytes",
        "c": "OSError: no such instruction",
        "d": "IntegrityError: kernels 'copied' sum equal cells to 7 and 7, others to 7",
        "e": "IntegrityError: kernels 'copied' move wrong bytes",
    }
    assert copied.waited == 6


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_gather_reads_the_pages_only_after_the_event(kernels: Kernels) -> None:
    pool = _pool()
    event = _Happens(pool)
    staging = np.zeros(8, np.uint8)
    move = Move(staged_layout([(0, 1, 1, 2, 3, 0)], 8), {KV: PageTable(KV, [3])}, 0)
    kernels.gather(pool, [move], buffer_over(staging), event)
    assert event.query()
    assert staging.tolist() == [7] * 8


def _copy(source: PagedPool, target: PagedPool, entries: list[tuple[int, int, int, int, int, int]]) -> PageMove:
    layout, tables = staged_layout(entries, 8 * len(entries)), {KV: PageTable(KV, [3])}
    return PageMove(
        PageCopy(layout, layout), Pages(source, tables), Pages(MappedPool(target.site, target.buffers), tables)
    )


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_copy_reads_the_pages_only_after_the_event(kernels: Kernels) -> None:
    pool, target = _pool(), _pool()
    event = _Happens(pool)
    kernels.copy([_copy(pool, target, [(0, 1, 1, 2, 3, 0)])], event)
    assert event.query()
    assert target.view(0)[3, 2, 1].tolist() == [7] * 8
    assert sum(int(target.view(i).sum()) for i in range(4)) == 7 * 8


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_one_copy_writes_to_several_pools(kernels: Kernels) -> None:
    pool, targets = _pool(), [_pool(), _pool()]
    pool.view(1)[...] = 9
    moves = [_copy(pool, target, [(1, 0, 2, i, i + 2, 0)]) for i, target in enumerate(targets)]
    assert kernels.copy(moves, None) is None
    for i, target in enumerate(targets):
        assert (target.view(1)[3] == 9).all(axis=(1, 2)).tolist() == [i <= row < i + 2 for row in range(4)]


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_no_moves_and_moves_without_entries_touch_nothing(kernels: Kernels) -> None:
    pool = _pool()
    staging = noise(64, 1)
    empty = Move(staged_layout([], 0), {}, 0)
    for moves in ([], [empty], [empty, empty]):
        kernels.gather(pool, moves, buffer_over(staging), None)
        kernels.scatter(pool, moves, buffer_over(staging))
        kernels.copy([_copy(pool, pool, []) for _ in moves], None)
        assert [len(of) for of in kernels.checksum(pool, moves, None).read()] == [0] * len(moves)
    assert np.array_equal(staging, noise(64, 1))
    assert not any(pool.view(i).any() for i in range(4))


@pytest.mark.parametrize("kernels", ON_CPU, ids=lambda kernels: kernels.name)
def test_one_call_takes_the_parts_of_several_rooms(kernels: Kernels) -> None:
    """Two rooms' tables, two planes each: every part lands at its own base."""
    pool = _pool()
    layout = staged_layout([(0, 0, 2, 0, 4, 0), (3, 1, 1, 1, 3, 64)], 80)
    for page, plane in ((1, 0), (2, 0), (1, 3), (2, 3)):
        pool.view(plane)[page] = 10 * page + plane
    staging = np.zeros(256, np.uint8)
    moves = [Move(layout, {KV: PageTable(KV, [page])}, base) for page, base in ((1, 100), (2, 0))]
    kernels.gather(pool, moves, buffer_over(staging), None)
    expected = [20] * 64 + [23] * 16 + [0] * 20 + [10] * 64 + [13] * 16 + [0] * 76
    assert staging.tolist() == expected


def test_the_numpy_kernels_do_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from disagg_kv.kernels import available\n"
        "found = available()\n"
        "assert found['cpu'] is None and 'torch' in found['reference'] and 'triton' in found['triton'], found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
