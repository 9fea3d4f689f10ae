"""Host and device memory of one request: what a transport registers is decided by its capabilities."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from disagg_kv.channels import Channel
from disagg_kv.errors import ConfigurationError, DisaggKVError
from disagg_kv.geometry import CacheSpec, Shard
from disagg_kv.ids import RegionId
from disagg_kv.kernels import Checksums, Move, PageMove, Pages, kernels_for
from disagg_kv.memory import Buffer, Event, Flag, MemoryPool, PagedMemory, PagedPool, bytes_of, new_buffer
from disagg_kv.trace import Recorder
from disagg_kv.transports import InprocTransport, ShmTransport, Transport, Transports
from tests.support.pools import adopted
from tests.support.rig import AUX_BYTES, POISON, E, Member, Memory, Rig, tp_shards
from tests.unit.endpoints.test_states import HYBRID

DEVICE = "cuda:0"


def on(buffer: Buffer, device: str) -> Buffer:
    """The same memory, said to be of another device."""
    return attrs.evolve(buffer, device=device)


def host_view(pool: PagedMemory) -> PagedPool:
    """A pool of the device as the test, and kernels of the device, see its memory."""
    site = pool.site
    return adopted(site.spec, site.shard, site.groups, site.planes, [on(b, "cpu") for b in pool.buffers])


class DeviceTransport(InprocTransport):
    """Registers device memory alone, as Mooncake does over NVLink."""

    caps = attrs.evolve(InprocTransport.caps, devices=frozenset({"cuda"}))

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Buffer] = []

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Note and pass on."""
        regions = super().register(buffers)
        self.registered += buffers
        return regions


class AllocatingTransport(DeviceTransport):
    """The same, and it gives device memory."""

    def allocate(self, nbytes: int) -> Buffer:
        """Of the device that is none."""
        return on(new_buffer(nbytes, "cpu"), DEVICE)

    def allocated(self, buffer: Buffer) -> bool:
        """All that is of the device."""
        return buffer.device == DEVICE


class OwnMemoryTransport(AllocatingTransport):
    """It registers memory of the host, too."""

    caps = attrs.evolve(InprocTransport.caps, devices=frozenset({"cpu", "cuda"}))


class DeviceKernels:
    """Kernels that refuse what is not of the device, and do the work on the CPU."""

    name = "device"

    def __init__(self) -> None:
        self._inner = kernels_for("cpu")

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        """From the device to the device."""
        assert {staging.device, *(b.device for b in pool.buffers)} == {DEVICE}
        return self._inner.gather(host_view(pool), moves, on(staging, "cpu"), after)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """From the device to the device."""
        assert {staging.device, *(b.device for b in pool.buffers)} == {DEVICE}
        return self._inner.scatter(host_view(pool), moves, on(staging, "cpu"))

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        """From the device to the device."""
        here = [PageMove(move.copy, self._on_host(move.source), self._on_host(move.target)) for move in moves]
        return self._inner.copy(here, after, flags)

    def _on_host(self, pages: Pages) -> Pages:
        return Pages(host_view(pages.pool), pages.tables)

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Of the device."""
        return self._inner.checksum(host_view(pool), moves, after)


class DeviceRig(Rig):
    """Pools lie on the device; their aux rows, as ever, on the host."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.pools: list[PagedPool] = []

    def _pool(self, spec: CacheSpec, held: Shard, of: Memory, transports: Transports) -> PagedPool:
        drawn = PagedPool.allocate(spec, held, pages=of.pages, page_size=of.page_size, state_slots=8)
        for buffer in drawn.buffers:
            bytes_of(buffer)[:] = POISON
        return PagedPool(drawn.site, [on(b, DEVICE) for b in drawn.buffers], aux_slots=4, aux_bytes=AUX_BYTES)

    def _member(
        self, endpoint: E, pool: PagedPool, transport: Transport, channel: Channel, observer: Recorder
    ) -> Member[E]:
        self.pools.append(pool)
        return super()._member(endpoint, host_view(pool), transport, channel, observer)


class MixedRig(DeviceRig):
    """Pools of the ranks whose transport gives device memory lie on the device, those of the others on the host."""

    def _pool(self, spec: CacheSpec, held: Shard, of: Memory, transports: Transports) -> PagedPool:
        if of.transport is OwnMemoryTransport:
            return super()._pool(spec, held, of, transports)
        return self._poisoned(self._paged(spec, held, of, transports))

    def _member(
        self, endpoint: E, pool: PagedPool, transport: Transport, channel: Channel, observer: Recorder
    ) -> Member[E]:
        if pool.buffers[0].device == DEVICE:
            return super()._member(endpoint, pool, transport, channel, observer)
        return Rig._member(self, endpoint, pool, transport, channel, observer)

    def _poisoned(self, pool: PagedPool) -> PagedPool:
        for buffer in pool.buffers:
            bytes_of(buffer)[:] = POISON
        return pool


class HostRig(Rig):
    """Pools lie in plain memory, whatever the transport would give."""

    def _pool(self, spec: CacheSpec, held: Shard, of: Memory, transports: Transports) -> MemoryPool:
        return super()._pool(spec, held, of, Transports([InprocTransport()]))


@pytest.mark.parametrize("path", ["staged", "slice", "mapped", "auto"])
def test_a_request_with_aux_and_states_crosses_where_no_host_memory_can_be_registered(path: str) -> None:
    """Pages, slots of states and the ring are registered; aux rows go in frames."""
    rig, memory = DeviceRig(HYBRID), Memory(transport=AllocatingTransport)
    prefills = rig.prefill(tp_shards(HYBRID, 2), memory=memory, strategy=path, kernels=DeviceKernels())
    decodes = rig.decode(tp_shards(HYBRID, 1), memory=memory, strategy=path, kernels=DeviceKernels())
    *sources, target = rig.pools
    for pool in sources:
        pool.write_aux(1, b"first tk")
    request = rig.request("room", prefills, decodes, 21).open_decode().expect(21, aux=2).open_prefill()
    request.send(9).send(21, 9).finish(aux=1).landed()
    assert target.read_aux(2) == b"first tk"
    for member in rig.members:
        assert isinstance(member.transport, DeviceTransport)
        assert {b.device for b in member.transport.registered} == {DEVICE}
    rig.quiet()
    rig.close()


@pytest.mark.parametrize("path", ["staged", "slice", "auto"])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)])
@pytest.mark.parametrize("sent_by", ["a device", "the host"])
def test_rows_cross_between_memory_of_a_device_and_of_the_host(path: str, tp: tuple[int, int], sent_by: str) -> None:
    """Each side stages in memory of its pool's kind; a kernel of one kind of memory maps no pages of the other."""
    rig, kinds = MixedRig(HYBRID), (Memory(transport=OwnMemoryTransport), Memory())
    here, there = kinds if sent_by == "a device" else kinds[::-1]
    ours, theirs = (DeviceKernels() if of is kinds[0] else None for of in (here, there))
    prefills = rig.prefill(tp_shards(HYBRID, tp[0]), memory=here, strategy=path, kernels=ours)
    decodes = rig.decode(tp_shards(HYBRID, tp[1]), memory=there, strategy=path, kernels=theirs)
    for name in ("room", "again"):
        request = rig.request(name, prefills, decodes, 21).open_decode().expect(21).open_prefill()
        request.send(9).send(21, 9).finish().landed()
        assert {handle.report.path for handle in request.sends} == {"staged" if path == "auto" else path}
    rig.quiet()
    rig.close()


def test_a_kernel_does_not_copy_into_pages_of_another_kind_of_memory() -> None:
    """Where the path is asked for, a room fails for the reason that the transport gives."""
    rig, device = MixedRig(HYBRID), Memory(transport=OwnMemoryTransport)
    prefills = rig.prefill(tp_shards(HYBRID, 1), memory=device, strategy="mapped", kernels=DeviceKernels())
    decodes = rig.decode(tp_shards(HYBRID, 1), strategy="mapped")
    request = rig.request("room", prefills, decodes, 21).start().failed()
    assert "is memory on 'cpu', not for kernels on 'cuda:0'" in request.errors()
    rig.quiet()
    rig.close()


@pytest.mark.parametrize(
    ("transport", "rig", "error", "says"),
    [
        (DeviceTransport, HostRig, ConfigurationError, "no transport moves memory on 'cpu'"),
        (OwnMemoryTransport, HostRig, ConfigurationError, "staging memory on 'cuda:0', and the pool's pages .* 'cpu'"),
        (ShmTransport, DeviceRig, ConfigurationError, "no transport moves memory on 'cuda:0'"),
    ],
)
def test_memory_that_a_transport_cannot_carry_is_refused_when_an_endpoint_is_made(
    transport: type[Transport], rig: type[HostRig | DeviceRig], error: type[DisaggKVError], says: str
) -> None:
    """With the reason, on both sides, also where only the ring would be written to."""
    made, memory, shards = rig(HYBRID), Memory(transport=transport), tp_shards(HYBRID, 1)
    with pytest.raises(error, match=says):
        made.prefill(shards, memory=memory, kernels=DeviceKernels())
    with pytest.raises(error, match=says):
        made.decode(shards, memory=memory, strategy="staged", kernels=DeviceKernels())
    assert made.members == []
