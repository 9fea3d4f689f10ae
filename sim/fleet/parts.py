"""What an endpoint of a simulated fleet is given: memory and kernels that do nothing, a wire, a channel, a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Protocol

import numpy as np

from disagg_kv.channels import Arrived, Closed, News, Opened, check_together
from disagg_kv.errors import PeerLostError
from disagg_kv.geometry import CacheSpec, Group, Plane, Site, shard
from disagg_kv.ids import GroupId, LayerId, Peer, RegionId, Ticket
from disagg_kv.kernels import Checksums, Move, PageMove
from disagg_kv.memory import Buffer, Event, Flag, MemoryPool
from disagg_kv.planning import Writes
from disagg_kv.transports import Capabilities, Descriptor, PeerLost, Region, Settled, WriteEnded, decode, encode

LAYERS, PAGE_ROWS, PAGES = 80, 16, 4096
KV = GroupId("kv")

CONNECT_S = 0.03
"""What a transport takes to connect a peer, one after the other on a helper thread; NIXL takes 17 to 44 ms."""

WRITE_S = 0.001
"""What a write takes."""


class World(Protocol):
    """What the parts need of the fleet."""

    now: float

    def latency_s(self) -> float:
        """What a message takes."""

    def between(self, least: float, most: float) -> float:
        """A number that is drawn."""

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Do something after some seconds."""

    def cut(self, one: Host, other: Host) -> bool:
        """Whether a partition keeps their frames and writes apart."""


class Host(Protocol):
    """What the parts need of a rank."""

    world: World
    alive: bool
    address: str

    def touch(self) -> None:
        """It has something to do."""


@cache
def site() -> Site:
    """One rank of a model with 80 layers, whose planes lie in one buffer; each rank of a fleet has an equal one."""
    spec = CacheSpec.kv(LAYERS, kv_heads=8, head_dim=128, dtype="bfloat16")
    row = 8 * 256
    nbytes = PAGES * PAGE_ROWS * row
    names = [(layer, name) for layer in range(LAYERS) for name in ("k", "v")]
    planes = [
        Plane(LayerId(layer), name, KV, 0, n * nbytes, PAGE_ROWS * row, row, 256)
        for n, (layer, name) in enumerate(names)
    ]
    return Site(spec, shard(spec), (Group(KV, PAGE_ROWS, PAGES),), planes, (len(planes) * nbytes,))


class NullPool:
    """Pages without memory; satisfies :class:`~disagg_kv.memory.MemoryPool`."""

    aux_bytes = 0

    def __init__(self) -> None:
        self.site = site()
        self.buffers = (Buffer(1 << 44, self.site.buffers[0]),)

    def read_aux(self, slot: int) -> bytes:
        """No aux data."""
        return b""

    def write_aux(self, slot: int, data: bytes) -> None:
        """No aux data."""


class NullKernels:
    """Kernels that copy nothing; satisfies :class:`~disagg_kv.kernels.Kernels`."""

    name = "null"

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        """Done at once."""
        return None

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Done at once."""
        return None

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        """Done at once."""
        return None

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """All sums are zero."""
        return Checksums(None, lambda: [np.zeros(0, np.uint64) for _ in moves])


class FleetTransport:
    """A wire that moves no bytes; satisfies :class:`~disagg_kv.transports.Transport`."""

    name = "fleet"
    caps = Capabilities(drain_s=0.0, bytes_per_s=4e10)

    def __init__(self, host: Host, me: Peer, hosts: dict[Peer, Host]) -> None:
        self._host = host
        self._me = me
        self._hosts = hosts
        self._regions: list[Buffer] = []
        self._tickets = count(1)
        self._events: list[WriteEnded | Settled | PeerLost] = []
        self._next = 1 << 45
        hosts[me] = host

    def allocate(self, nbytes: int) -> Buffer:
        """See :class:`~disagg_kv.transports.SupportsAllocate`; addresses without memory."""
        at, self._next = self._next, self._next + nbytes + 4096
        return Buffer(at, nbytes)

    def allocated(self, buffer: Buffer) -> bool:
        """See :class:`~disagg_kv.transports.SupportsAllocate`."""
        return buffer.addr >= 1 << 45

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """See :meth:`Transport.register`."""
        first = len(self._regions)
        self._regions += buffers
        return [RegionId(first + n) for n in range(len(buffers))]

    def local_descriptor(self) -> bytes:
        """See :meth:`Transport.local_descriptor`."""
        regions = tuple(Region(RegionId(n), b.nbytes, b.device, b.addr) for n, b in enumerate(self._regions))
        return encode(Descriptor(self.name, self._me, len(regions), regions))

    def peer_of(self, descriptor: bytes) -> Peer:
        """See :meth:`Transport.peer_of`."""
        return decode(descriptor, self.name).incarnation

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """See :meth:`Transport.connect`; what it takes is in ``CONNECT_S``."""
        peer = self.peer_of(descriptor)
        if not self._hosts[peer].alive:
            raise PeerLostError("fleet: the process has ended")
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Nothing is kept of a peer."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """See :meth:`Transport.submit`; the write ends after ``WRITE_S``, or fails where the peer has ended."""
        ticket = Ticket(next(self._tickets))
        world, host, target = self._host.world, self._host, self._hosts[peer]

        def end() -> None:
            failed = not target.alive or world.cut(host, target)
            self._events.append(WriteEnded(ticket, PeerLostError("fleet: the write failed") if failed else None))
            host.touch()

        world.later(WRITE_S, end)
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """See :meth:`Transport.poll`."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        """Whether reports wait to be polled."""
        return bool(self._events)

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """See :meth:`Transport.close`."""
        return ()


class Wires:
    """The control network of a fleet: who listens where, and what has crossed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listening: dict[str, FleetChannel] = {}
        self._watchers: dict[str, dict[FleetChannel, None]] = {}
        self.frames = 0
        self.nbytes = 0
        self.largest = 0

    def send(self, source: FleetChannel, address: str, frames: Sequence[bytes]) -> None:
        """A message leaves; it arrives after a moment unless its receiver is gone or cut off."""
        self.frames += len(frames)
        self.nbytes += sum(map(len, frames))
        self.largest = max(self.largest, *map(len, frames))
        watchers = self._watchers.setdefault(address, {})
        if source not in watchers:
            watchers[source] = None
            self._tell(source, Opened(address) if address in self.listening else Closed(address))
        self.world.later(self.world.latency_s(), lambda: self._arrive(source, address, frames))

    def _arrive(self, source: FleetChannel, address: str, frames: Sequence[bytes]) -> None:
        there = self.listening.get(address)
        if there is not None and not self.world.cut(source.host, there.host):
            there.inbox.extend(map(Arrived, frames))
            there.host.touch()

    def open(self, channel: FleetChannel) -> None:
        """A process listens."""
        self.listening[channel.address] = channel
        for watcher in self._watchers.get(channel.address, {}):
            self._tell(watcher, Opened(channel.address))

    def end(self, channel: FleetChannel) -> None:
        """A process has ended: its connections break."""
        del self.listening[channel.address]
        for watchers in self._watchers.values():
            watchers.pop(channel, None)
        for watcher in self._watchers.get(channel.address, {}):
            self._tell(watcher, Closed(channel.address))

    def forget(self, channel: FleetChannel, address: str) -> None:
        """A connection is dropped."""
        self._watchers.get(address, {}).pop(channel, None)

    @staticmethod
    def _tell(channel: FleetChannel, event: Opened | Closed) -> None:
        channel.inbox.append(event)
        channel.host.touch()


class FleetChannel:
    """The inbox of one rank; satisfies :class:`~disagg_kv.channels.Channel` and ``SupportsBatches``."""

    eager = False

    def __init__(self, wires: Wires, host: Host) -> None:
        self._wires = wires
        self.host = host
        self.address = host.address
        self.inbox: list[News] = []
        wires.open(self)

    def send(self, address: str, frame: bytes) -> bool:
        """See :meth:`Channel.send`."""
        return self.send_all(address, (frame,))

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """See :class:`~disagg_kv.channels.SupportsBatches`."""
        check_together(address, frames)
        self._wires.send(self, address, tuple(frames))
        return True

    def poll(self) -> Sequence[News]:
        """What came in."""
        if not self.inbox:
            return ()
        came, self.inbox = self.inbox, []
        return came

    def wait(self, timeout_s: float) -> None:
        """Time passes between the steps of endpoints, not in them."""

    def wake(self) -> None:
        """The endpoint has something to do."""
        self.host.touch()

    def forget(self, address: str) -> None:
        """See :meth:`Channel.forget`."""
        self._wires.forget(self, address)

    def close(self) -> None:
        """The fleet ends its processes itself."""


class FleetBackground:
    """Helper threads of one rank; satisfies ``Background``.

    Connections are made one after the other, as a library with a lock makes them. A look-up reads a table of the
    process, and answers at once.
    """

    def __init__(self, host: Host, name: str) -> None:
        self._host = host
        self._seconds = 0.0 if name.endswith("look-ups") else CONNECT_S
        self._free_at = 0.0

    def start(self, job: Callable[[], None]) -> None:
        """Run a job when what it waits for would have answered."""
        world = self._host.world
        self._free_at = max(self._free_at, world.now) + self._seconds
        world.later(self._free_at - world.now, lambda: self._run(job))

    def _run(self, job: Callable[[], None]) -> None:
        if self._host.alive:
            job()

    def close(self, timeout_s: float, then: Callable[[], None]) -> bool:
        """Jobs of a rank that ends are never run."""
        then()
        return True
