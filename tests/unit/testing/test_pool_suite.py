"""The conformance suite for pools: the library's own pass, and broken ones do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Plane, Shard, Site, shard
from disagg_kv.memory import Buffer, MemoryPool, PagedPool, new_buffer
from disagg_kv.testing.pool import PAGE_SIZE, PAGES, SPECS, MemoryPoolSuite


class TestPagedPool(MemoryPoolSuite):
    """Tokens outermost in a page."""

    def pool(self, spec: CacheSpec, shard: Shard, page_size: int, pages: int) -> MemoryPool:
        return PagedPool.allocate(spec, shard, pages=pages, page_size=page_size, aux_slots=2, aux_bytes=16)


class TestPagedPoolOfHeads(MemoryPoolSuite):
    """Units outermost, all components of a layer in one page, and no aux rows."""

    def pool(self, spec: CacheSpec, shard: Shard, page_size: int, pages: int) -> MemoryPool:
        return PagedPool.allocate(spec, shard, pages=pages, page_size=page_size, layout="HND", fused=True)


class Broken(PagedPool):
    """Whole, until a subclass breaks it."""

    @classmethod
    def made(cls, spec: CacheSpec, shard: Shard, page_size: int, pages: int) -> Broken:
        sound = PagedPool.allocate(spec, shard, pages=pages, page_size=page_size)
        return cls(sound.site, sound.buffers, aux_slots=2, aux_bytes=16)


class OneMemory(Broken):
    """Each pool lies in the memory of the one before."""

    memory = new_buffer(1 << 16, "cpu")

    @property
    def buffers(self) -> Sequence[Buffer]:
        return [Buffer(self.memory.addr, b.nbytes, owner=self.memory) for b in super().buffers]


class Drifts(Broken):
    """After a while its pages are somewhere else."""

    asked = 0

    @property
    def buffers(self) -> Sequence[Buffer]:
        self.asked += 1
        sound = super().buffers
        return sound if self.asked < 4 else [Buffer(b.addr, b.nbytes - 1, owner=b.owner) for b in sound]


class Overlaps(Broken):
    """V lies in K."""

    @property
    def site(self) -> Site:
        sound = super().site
        planes = [Plane(p.layer, p.component, p.group, p.buffer, 0, p.page_stride, p.row_stride, p.unit_stride)
                  for p in sound.planes]  # fmt: skip
        return Site(sound.spec, sound.shard, sound.groups, planes, sound.buffers)


class LongAux(Broken):
    """It cuts what does not fit into an aux row."""

    def write_aux(self, slot: int, data: bytes) -> None:
        super().write_aux(slot, data[:16])


class ShortAux(Broken):
    """It gives back an aux row without its end."""

    def read_aux(self, slot: int) -> bytes:
        return super().read_aux(slot)[:-1]


class AnyAux(Broken):
    """It counts aux rows from the end, too."""

    def read_aux(self, slot: int) -> bytes:
        return super().read_aux(slot % 2)


CELLS, AUX = "test_every_cell_keeps_its_own_bytes", "test_an_aux_row_keeps_its_bytes"


@pytest.mark.parametrize(
    ("kind", "test", "more"),
    [
        (OneMemory, "test_two_pools_share_nothing", None),
        (Drifts, "test_site_and_buffers_stay_the_same", ()),
        (Overlaps, "test_an_endpoint_takes_it", None),
        (Overlaps, CELLS, ()),
        (LongAux, "test_more_than_an_aux_row_is_refused", ()),
        (ShortAux, AUX, ()),
        (AnyAux, "test_an_aux_row_that_is_not_there_is_refused", (-1,)),
    ],
)
def test_a_broken_pool_is_noticed(kind: type[Broken], test: str, more: tuple[object, ...] | None) -> None:
    """By the test that its fault is the subject of; ``more`` are its arguments after a pool, None: it makes its own."""

    class Suite(MemoryPoolSuite):
        def pool(self, spec: CacheSpec, shard: Shard, page_size: int, pages: int) -> MemoryPool:
            return kind.made(spec, shard, page_size, pages)

    spec = SPECS["V is smaller"]
    given = (kind.made(spec, shard(spec), PAGE_SIZE, PAGES), *(more or ()))
    if more is None:
        given = () if test == "test_two_pools_share_nothing" else ("V is smaller", "all of it")
    with pytest.raises((AssertionError, GeometryError, pytest.fail.Exception)):
        getattr(Suite(), test)(*given)
