"""A pool that another project wrote against the Protocol alone: an array of its own for each plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from disagg_kv.channels import Hub, InprocChannel
from disagg_kv.endpoints import DecodeEndpoint, Environment, PrefillEndpoint
from disagg_kv.errors import ConfigurationError, DisaggKVError, GeometryError
from disagg_kv.geometry import CacheSpec, Group, Plane, Shard, Site, shard
from disagg_kv.ids import GroupId
from disagg_kv.memory import Buffer, MemoryPool
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.testing.pool import MemoryPoolSuite
from disagg_kv.transports import InprocTransport
from tests.support.rig import Memory, Rig, tp_shards

SPEC = CacheSpec.kv(3, 4, 8, "float16", v_head_dim=4)
KV = GroupId("kv")


class ArrayPool:
    """Heads outermost in a page, and a spare row at each page's end that only the engine knows."""

    def __init__(self, spec: CacheSpec, held: Shard, page_size: int, pages: int) -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        self.aux = np.zeros((4, 8), np.uint8)
        planes = []
        for layer in held.layers():
            for component in spec.layers[layer]:
                units = sum(map(len, held.units(layer, component.name)))
                array = np.zeros((pages, units, page_size + 1, component.unit_bytes), np.uint8)
                page, unit, row, _ = array.strides
                planes.append(Plane(layer, component.name, KV, len(self.arrays), 0, page, row, unit))
                self.arrays.append(array)
        sizes = [array.nbytes for array in self.arrays]
        self._site = Site(spec, held, [Group(KV, page_size, pages)], planes, sizes)
        self._buffers = [Buffer(array.ctypes.data, array.nbytes, owner=array) for array in self.arrays]

    @property
    def site(self) -> Site:
        return self._site

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self._buffers

    @property
    def aux_bytes(self) -> int:
        return int(self.aux.shape[1])

    def read_aux(self, slot: int) -> bytes:
        if not 0 <= slot < len(self.aux):
            raise GeometryError(f"aux row {slot} of {len(self.aux)}")
        return bytes(self.aux[slot])

    def write_aux(self, slot: int, data: bytes) -> None:
        if not 0 <= slot < len(self.aux) or len(data) > self.aux_bytes:
            raise GeometryError(f"{len(data)} bytes for aux row {slot}, of {len(self.aux)} rows of {self.aux_bytes}")
        self.aux[slot, : len(data)] = np.frombuffer(data, np.uint8)


def made(spec: CacheSpec, held: Shard, of: Memory) -> MemoryPool:
    return ArrayPool(spec, held, of.page_size, of.pages)


class TestArrayPool(MemoryPoolSuite):
    """The suite that the library's pools pass."""

    def pool(self, spec: CacheSpec, shard: Shard, page_size: int, pages: int) -> MemoryPool:
        return ArrayPool(spec, shard, page_size, pages)


@pytest.mark.parametrize("path", ["staged", "slice"])
@pytest.mark.parametrize("theirs", ["prefill", "decode", "both"])
def test_a_pool_of_arrays_carries_a_transfer(theirs: str, path: str) -> None:
    """On either side: two ranks to one, pages of other sizes; every byte is there, the spare rows are untouched."""
    rig = Rig(SPEC)
    of = Memory(8, 32, pool=made if theirs != "decode" else None)
    to = Memory(4, 64, pool=made if theirs != "prefill" else None)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=of, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=to, strategy=path)
    for number in range(2):
        rig.request(f"room {number}", prefills, decodes, 37).start().landed()
    rig.quiet()


def test_an_aux_row_crosses() -> None:
    """From a row of one pool to another row of the other."""
    pools: list[ArrayPool] = []

    def kept(spec: CacheSpec, held: Shard, of: Memory) -> MemoryPool:
        pools.append(ArrayPool(spec, held, of.page_size, of.pages))
        return pools[-1]

    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(pool=kept))
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(pool=kept))
    pools[0].write_aux(3, b"a token")
    rig.request("room", prefills, decodes, 5).open_decode().expect(5, aux=1).open_prefill().send(5).finish(3).landed()
    assert pools[1].read_aux(1) == b"a token\0"


class OtherMemory(ArrayPool):
    """Its arrays are elsewhere each time it is asked."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        return [Buffer(b.addr + 16 * next(self.moved), b.nbytes) for b in self._buffers]

    moved = iter(range(1 << 20))


class ShortBuffers(ArrayPool):
    """Its site says more bytes than there are."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        return [Buffer(b.addr, b.nbytes - 1) for b in self._buffers]


class PagesApart(ArrayPool):
    """An array for each page: the planes say what no stride can."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        return [Buffer(page.ctypes.data, page.nbytes, owner=array) for array in self.arrays for page in array]


class OneArray(ArrayPool):
    """All planes lie in the same bytes."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        first = self._buffers[0]
        return [Buffer(first.addr, b.nbytes, owner=first.owner) for b in self._buffers]


class TwoDevices(ArrayPool):
    """Its first plane is on a GPU."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        first, *others = self._buffers
        return [Buffer(first.addr, first.nbytes, "cuda:0"), *others]


class NoBuffers(ArrayPool):
    """It names tensors."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self.arrays  # type: ignore[return-value]


class PastTheEnd(ArrayPool):
    """Its last page lies behind its buffer."""

    @property
    def site(self) -> Site:
        of = self._site
        return Site(of.spec, of.shard, [Group(KV, g.rows_per_page, g.pages + 1) for g in of.groups], of.planes,
                    of.buffers)  # fmt: skip


class ManyAux(ArrayPool):
    """Its aux rows have no length."""

    @property
    def aux_bytes(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (OtherMemory, ConfigurationError, "pool: site and buffers must stay the same"),
        (ShortBuffers, GeometryError, "but the site says"),
        (PagesApart, GeometryError, "but the site says"),
        (OneArray, GeometryError, "share memory: give them as one buffer"),
        (TwoDevices, GeometryError, "on one device"),
        (NoBuffers, ConfigurationError, "pool: buffers: a list of Buffer is needed"),
        (PastTheEnd, GeometryError, "ends at byte"),
        (ManyAux, ConfigurationError, "pool: aux_bytes must be at least 0"),
    ],
)
def test_memory_that_cannot_be_a_pool_is_refused(kind: type[ArrayPool], error: type[DisaggKVError], says: str) -> None:
    """By both endpoints, before anything is registered or bound."""
    for end in (PrefillEndpoint, DecodeEndpoint):
        with pytest.raises(error, match=says):
            refused(end, kind(SPEC, shard(SPEC), 4, 8))


def refused(end: type[PrefillEndpoint | DecodeEndpoint], pool: MemoryPool) -> None:
    """An endpoint over such a pool."""
    channel = InprocChannel(Hub(), "here")
    end(
        pool,
        transport=InprocTransport(),
        channel=channel,
        rendezvous=StaticRendezvous(),
        instance="I",
        environment=Environment(thread=False, engine=False),
    )


class Slotted:
    """A class that forgot its weak references."""

    __slots__ = ("aux_bytes", "buffers", "read_aux", "site", "write_aux")

    def __init__(self, pool: ArrayPool) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(pool, name))


@dataclass
class ByValue:
    """Equal to another pool, and without a hash."""

    pool: ArrayPool

    def __getattr__(self, name: str) -> object:
        return getattr(self.pool, name)


@dataclass(frozen=True)
class WithHash:
    """Equal to another pool, with a hash."""

    pool: ArrayPool

    def __getattr__(self, name: str) -> object:
        return getattr(self.pool, name)


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (Slotted, "Slotted allows no weak reference: name '__weakref__'"),
        (ByValue, "ByValue is compared by value"),
        (WithHash, "WithHash is compared by value"),
    ],
)
def test_a_pool_that_kernels_cannot_keep_in_mind_is_refused(wrap: Callable[[ArrayPool], MemoryPool], says: str) -> None:
    """Its first gather failed before, or took another pool's memory for its own."""
    with pytest.raises(ConfigurationError, match=says):
        refused(DecodeEndpoint, wrap(ArrayPool(SPEC, shard(SPEC), 4, 8)))
