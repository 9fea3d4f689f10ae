"""What every :class:`~disagg_kv.memory.MemoryPool` must do: a suite to inherit.

::

    class TestMine(MemoryPoolSuite):
        def pool(self, spec, shard, page_size, pages):
            return MyPool(spec, shard, page_size, pages)

Needs pytest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from ..endpoints.loop.construction import check_pool
from ..errors import GeometryError
from ..geometry import CacheSpec, PageTable, Shard, shard
from ..kernels import Move, kernels_for
from ..kernels.tensors import tensor_of
from ..memory import U8, Buffer, MemoryPool, new_buffer, wait_for
from ..planning import StagedLayout

PAGE_SIZE = 4
PAGES = 6

SPECS = {
    "equal K and V": CacheSpec.kv(2, 4, 8, "float16"),
    "V is smaller": CacheSpec.kv(3, 2, 6, "int8", v_head_dim=3),
    "latents": CacheSpec.mla(2, 12, "float16"),
}
HELD: Mapping[str, Callable[[CacheSpec], Shard]] = {
    "all of it": lambda spec: shard(spec),
    "half the units": lambda spec: shard(spec, tp=2, rank=1),
    "the last layer": lambda spec: shard(spec, layers=[max(spec.layers)]),
}
CASES = list(itertools.product(SPECS, HELD))


class MemoryPoolSuite:
    """Promises of a pool on any device. Subclasses give ``pool``; test methods are inherited."""

    def pool(self, spec: CacheSpec, shard: Shard, page_size: int, pages: int) -> MemoryPool:
        """A new pool of one rank: ``pages`` pages of ``page_size`` tokens, in memory of its own."""
        raise NotImplementedError

    @pytest.fixture(params=CASES, ids=" of ".join)
    def mine(self, request: pytest.FixtureRequest) -> MemoryPool:
        """A pool of each kind of cache, for a rank that holds all or a part of it."""
        spec = SPECS[request.param[0]]
        return self.pool(spec, HELD[request.param[1]](spec), PAGE_SIZE, PAGES)

    @pytest.fixture
    def whole(self) -> MemoryPool:
        """One of them."""
        return self._whole()

    def _whole(self) -> MemoryPool:
        spec = SPECS["V is smaller"]
        return self.pool(spec, shard(spec), PAGE_SIZE, PAGES)

    @pytest.mark.parametrize(("kind", "held"), CASES, ids=" of ".join)
    def test_an_endpoint_takes_it(self, kind: str, held: str) -> None:
        """Its site is of the cache, shard and pages that it was made for, and its memory is what the site says."""
        spec = SPECS[kind]
        own = HELD[held](spec)
        pool = self.pool(spec, own, PAGE_SIZE, PAGES)
        check_pool(pool)
        assert (pool.site.spec, pool.site.shard) == (spec, own)
        assert {(group.rows_per_page, group.pages) for group in pool.site.token_groups} == {(PAGE_SIZE, PAGES)}

    def test_every_cell_keeps_its_own_bytes(self, mine: MemoryPool) -> None:
        """What kernels scatter into all pages, they gather from them again: no two cells share a byte."""
        data = scattered(mine, seed=1)
        assert np.array_equal(gathered(mine), data)

    def test_site_and_buffers_stay_the_same(self, mine: MemoryPool) -> None:
        """Also when bytes were written to its pages."""
        site, places = mine.site, [(b.addr, b.nbytes, b.device) for b in mine.buffers]
        scattered(mine, seed=2)
        assert mine.site == site
        assert [(b.addr, b.nbytes, b.device) for b in mine.buffers] == places

    def test_two_pools_share_nothing(self) -> None:
        """Neither bytes, nor what kernels keep of them, as two ranks of a process need it."""
        first, second = self._whole(), self._whole()
        data = scattered(first, seed=3)
        others = scattered(second, seed=4)
        assert np.array_equal(gathered(first), data)
        assert np.array_equal(gathered(second), others)

    def test_an_aux_row_keeps_its_bytes(self, whole: MemoryPool) -> None:
        """The row's beginning is what was written; a row is ``aux_bytes`` long."""
        if not whole.aux_bytes:
            pytest.skip("this pool has no aux rows")
        for data in (b"\x07" * whole.aux_bytes, b"\x01", b""):
            whole.write_aux(0, data)
            found = whole.read_aux(0)
            assert len(found) == whole.aux_bytes
            assert found[: len(data)] == data

    def test_more_than_an_aux_row_is_refused(self, whole: MemoryPool) -> None:
        """And changes nothing."""
        if not whole.aux_bytes:
            pytest.skip("this pool has no aux rows")
        whole.write_aux(0, b"\x05")
        before = whole.read_aux(0)
        with pytest.raises(GeometryError):
            whole.write_aux(0, bytes(whole.aux_bytes + 1))
        assert whole.read_aux(0) == before

    @pytest.mark.parametrize("slot", [-1, 1 << 40])
    def test_an_aux_row_that_is_not_there_is_refused(self, whole: MemoryPool, slot: int) -> None:
        """Whether the pool has others or none."""
        with pytest.raises(GeometryError):
            whole.read_aux(slot)
        with pytest.raises(GeometryError):
            whole.write_aux(slot, b"")


def scattered(pool: MemoryPool, seed: int) -> U8:
    """Random bytes, now in every cell of the pool, plane after plane."""
    move, staging = _all_cells(pool)
    data = np.random.default_rng(seed).integers(0, 256, staging.nbytes, np.uint8)
    tensor_of(staging).copy_(torch.from_numpy(data))
    wait_for(kernels_for(staging.device).scatter(pool, [move], staging))
    return data


def gathered(pool: MemoryPool) -> U8:
    """The bytes of every cell of the pool, plane after plane."""
    move, staging = _all_cells(pool)
    wait_for(kernels_for(staging.device).gather(pool, [move], staging, None))
    found: U8 = tensor_of(staging).cpu().numpy().copy()
    return found


def _all_cells(pool: MemoryPool) -> tuple[Move, Buffer]:
    """Every cell of every plane, pages in a mixed order, and staging memory for them on the pool's device."""
    site = pool.site
    tables = {}
    for group in site.token_groups:
        pages = [page for page in range(group.pages) if page != group.null_page]
        tables[group.id] = PageTable(group.id, np.random.default_rng(0).permutation(pages))
    units = [sum(map(len, site.shard.units(plane.layer, plane.component))) for plane in site.planes]
    rows = [len(tables[plane.group].pages) * site.page_rows(plane) for plane in site.planes]
    cell = [site.spec.component(plane.layer, plane.component).unit_bytes for plane in site.planes]
    ends = np.cumsum(np.array(rows, np.int64) * units * cell)
    layout = StagedLayout(
        np.arange(len(units), dtype=np.int32),
        np.zeros(len(units), np.int32),
        np.array(units, np.int32),
        np.zeros(len(units), np.int64),
        np.array(rows, np.int64),
        np.concatenate([[0], ends[:-1]]).astype(np.int64),
        nbytes=int(ends[-1]),
    )
    return Move(layout, tables, 0), new_buffer(layout.nbytes, pool.buffers[0].device)
