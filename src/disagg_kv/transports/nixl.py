"""NIXL: one-sided writes through UCX, from CPU and CUDA memory, within and across hosts."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import attrs
import msgspec
import numpy as np
from attrs import define, frozen

from ..errors import ConfigurationError, PeerLostError, RegistrationError, RemoteProtocolError, TransportError
from ..geometry import I64
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes
from .base import Capabilities, PeerLost, Settled, WriteEnded
from .connected import Connected
from .descriptor import Region, decode, pack, unpack
from .near_side import NearSide
from .nixl_library import U64, Agent, DescriptorList, Place, Registered, load, place
from .nixl_worker import Job, Link, TransportEvent, Worker
from .process import Process, Watch
from .regions import Extents

REGISTERED_PER_S = 1 << 30
"""Bytes that a library registers in a second at least: it touches every page of memory that a network card reads."""


@frozen
class _Contact:
    """What a peer needs besides the regions.

    Args:
        process: the process of the peer.
        version: of the library.
        checksum: of ``metadata``; the library trusts what it is given.
        metadata: the library's own.
    """

    process: Process
    version: str
    checksum: int
    metadata: bytes


_CONTACT = msgspec.msgpack.Decoder(_Contact)

Devices = Mapping[Place, Sequence[RegionId]]
"""The regions on each device."""


@define
class _Remote:
    """A connected peer, whether it is on this host, and where its regions lie."""

    link: Link
    near: bool
    process: Process
    serial: int
    extents: Extents
    devices: Devices


class NixlTransport(NearSide):
    """Writes through one NIXL agent, which a thread of its own drives, on the source's side and on the target's.

    Args:
        num_threads: UCX worker threads that post batches of 1,024 writes or more; 0: the transport's thread does.
        backend: of NIXL.
        backend_options: further options of that backend, as NIXL names them.
        idle_s: the longest pause between two polls of the library, seconds; an idle target adds it to latency.
        drain_s: see ``Capabilities.drain_s``.
        cuda_device: whose context is current when the backend is made; None: the caller's, if torch has one.
        call_s: how long the library may take to make its agent, and to register memory, seconds;
            registering may take a second more for each GiB.

    Raises:
        MissingDependencyError: NIXL is not installed, is too old, or lacks a system library.
        ConfigurationError: an option that cannot be, or a backend that cannot be made.
        TransportError: the library does not return within ``call_s``.
    """

    name = "nixl"
    caps = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        waits_events=True,
        detects_peer_death=True,
        late_writes=True,
        drain_s=5.0,
        bytes_per_s=8e9,
    )
    gpu_caps = attrs.evolve(caps, bytes_per_s=3.8e11)
    """The same for memory of a GPU."""

    def __init__(
        self,
        *,
        num_threads: int = 0,
        backend: str = "UCX",
        backend_options: Mapping[str, str] | None = None,
        idle_s: float = 0.003,
        drain_s: float = 5.0,
        cuda_device: int | None = None,
        call_s: float = 60.0,
    ) -> None:
        if num_threads < 0 or not idle_s > 0 or not drain_s >= 0 or not 0 < call_s < math.inf:
            raise ConfigurationError(
                f"transport 'nixl': {num_threads=}, {idle_s=}, {drain_s=}, {call_s=}: out of range"
            )
        library = load()
        device = _device(cuda_device)
        options = {"ucx_error_handling_mode": "peer", "num_threads": str(num_threads)} if backend == "UCX" else {}
        options |= backend_options or {}
        self.caps = attrs.evolve(self.caps if device == "cpu" else self.gpu_caps, drain_s=drain_s)
        super().__init__()
        self._version = library.version
        self._sources: Sequence[tuple[RegionId, Buffer]] = ()
        self._devices: Devices = {}
        self._metadata = b""
        self._peers: Connected[_Remote] = Connected()
        self._unquiet: set[Ticket] = set()
        self._events: deque[TransportEvent] = deque()
        self._call_s = call_s

        make = partial(Agent, library, self._me.hex(), backend, options, device)
        self._worker = Worker(make, self._events, idle_s, call_s)
        # The thread must be out of the library before the interpreter takes itself apart.
        self._stop = weakref.finalize(self, self._worker.close, 0.0)
        self._metadata = self._worker.call(Agent.metadata, "metadata", call_s)

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers, as sources of writes and as targets of peers'; waits for a write that is being posted.

        Raises:
            RegistrationError: also for CUDA memory that other processes could reach only through TCP, and where the
                library does not return in time.
        """
        self._home.check_open()
        ids = self._table.add(buffers)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        bound_s = self._call_s + nbytes / REGISTERED_PER_S
        registered: list[Registered] = []
        try:
            what = f"registering {nbytes} bytes"
            self._metadata = self._worker.call(partial(_register, buffers, registered), what, bound_s)
        except BaseException as error:
            # The thread may be registering still, or have done so just now.
            self._worker.undo(partial(_deregister, registered))
            self._table.remove(ids)
            if type(error) is TransportError:
                raise RegistrationError(str(error)) from error
            raise
        self._changed()
        return ids

    def _changed(self) -> None:
        self._sources = self._table.items()
        self._devices = by_device((i, b.device) for i, b in self._sources)

    def local_descriptor(self) -> bytes:
        """Return what a peer passes to ``connect``: incarnation and regions."""
        regions = (Region(i, b.nbytes, b.device, b.addr) for i, b in self._table.items())
        contact = _Contact(Process.own(), self._version, zlib.crc32(self._metadata), self._metadata)
        return self._described(regions, pack(contact))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor, or add its new regions.

        10 to 100 ms for a new peer. Whether it can be reached shows later.

        Raises:
            RemoteProtocolError: also for a descriptor that another version of NIXL made, or another process under the
                name of a peer that is known.
        """
        self._home.check_open()
        remote = decode(descriptor, self.name)
        contact = unpack(remote.blob, _CONTACT)
        if contact.version != self._version:
            raise RemoteProtocolError(f"nixl: the peer runs NIXL {contact.version}, this side {self._version}")
        if zlib.crc32(contact.metadata) != contact.checksum:
            raise RemoteProtocolError(f"nixl: {len(contact.metadata)} bytes of metadata are damaged")
        devices = by_device((r.id, _checked_device(r)) for r in remote.regions)
        peer = remote.incarnation
        known = self._peers.get(peer)
        if known is not None and known.link.lost:
            raise PeerLostError(f"nixl: peer {peer.hex()} is lost")
        if known is not None and known.process != contact.process:
            raise RemoteProtocolError(
                f"nixl: peer {peer.hex()} is process {known.process.pid}; process {contact.process.pid} takes its name"
            )
        if known is not None and known.serial >= remote.serial:
            return peer
        watch = _watch(contact.process) if known is None else None
        learn = partial(self._worker.learn, peer, watch, contact.metadata)
        link = self._worker.call(learn, f"connecting peer {peer.hex()}", timeout_s)
        extents = Extents(((r.id, r.base, r.nbytes) for r in remote.regions), f"peer {peer.hex()[:8]}'s")
        near = contact.process.host == Process.own().host
        self._peers.add(peer, _Remote(link, near, contact.process, remote.serial, extents, devices))
        if link.lost:
            # Its loss may have been reported, and dropped by ``poll``, before it was a peer.
            self._peers.remove(peer)
            raise PeerLostError(f"nixl: peer {peer.hex()} is lost")
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer; its tickets still end."""
        if self._peers.remove(peer) is not None:
            self._worker.forget(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket.

        Describes a small batch at once, and posts it once its event has happened.

        A large one is left to the thread, and so is any while the thread is busy.
        """
        self._home.check()
        remote = self._peers.known(peer, self.name)
        parts = single(writes, self._table.extents, remote.extents, self._devices, remote.devices)
        if parts is None:
            source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
            target = remote.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
            parts = cut(writes, source, target, self._devices, remote.devices)
        ticket = Ticket(next(self._tickets))
        self._unquiet.add(ticket)
        nbytes = writes.nbytes.item(0) if len(writes) == 1 else writes.total()
        self._worker.post(Job(ticket, peer, parts, self._sources, nbytes, remote.near, after))
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call; also posts what has waited for an event, and moves small writes on."""
        if not self._home.closed and self._home.here:
            self._worker.look()
        events = [self._events.popleft() for _ in range(len(self._events))]
        for event in events:
            if isinstance(event, Settled) or (isinstance(event, WriteEnded) and event.quiesced):
                self._unquiet.discard(event.ticket)
        return [e for e in events if not isinstance(e, PeerLost) or e.peer in self._peers.all]

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets, and return those that are not quiet.

        Memory of tickets that are not quiet is never freed.
        """
        self._home.check()
        if self._home.closed:
            return ()
        self._home.closed = True
        self._worker.close(drain_s)
        self._stop.detach()
        events = self.poll()
        self._events.extend(events)
        self._peers.clear()
        self._table.clear()
        self._changed()
        return tuple(sorted(self._unquiet))


def _device(cuda_device: int | None) -> str:
    """The device whose context the library finds; a process that does not use CUDA is not made to."""
    import torch  # `plan` reads what this class promises where torch cannot be imported

    initialized: Callable[[], bool] = torch.cuda.is_initialized
    if cuda_device is None and initialized():
        cuda_device = torch.cuda.current_device()
    return "cpu" if cuda_device is None else f"cuda:{cuda_device}"


def _register(buffers: Sequence[Buffer], registered: list[Registered], agent: Agent) -> bytes:
    """All or none; ``registered`` is filled with what the library knows of them."""
    try:
        for buffer in buffers:
            registered.append(agent.register(buffer))
        return agent.metadata()
    except BaseException:
        _deregister(registered, agent)
        raise


def _deregister(registered: list[Registered], agent: Agent) -> None:
    while registered:
        agent.deregister(registered.pop())


def _checked_device(region: Region) -> str:
    """The library would take any device for its own."""
    kind, _, index = region.device.partition(":")
    if kind not in NixlTransport.caps.devices or (index and not (index.isascii() and index.isdigit())):
        raise RemoteProtocolError(f"nixl: region {region.id} on a device of which nothing is known: {region.device!r}")
    return region.device


def _watch(process: Process) -> Watch | None:
    """A process of another host, and one's own, cannot be watched; they are probed all the same."""
    if process == Process.own():
        return None
    try:
        return process.watch()
    except TransportError:
        return None


def by_device(regions: Iterable[tuple[RegionId, str]]) -> Devices:
    """Regions and their devices, the other way round."""
    devices: dict[Place, list[RegionId]] = {}
    for region, device in regions:
        devices.setdefault(place(device), []).append(region)
    return devices


def cut(writes: Writes, source: I64, target: I64, local: Devices, remote: Devices) -> deque[DescriptorList]:
    """The writes of at least one byte, by the devices that they go between.

    Args:
        writes: what to cut.
        source: int64 ``[n]``, addresses.
        target: the same at the peer.
        local: the regions on this side.
        remote: the same at the peer.
    """
    parts: deque[DescriptorList] = deque()
    for device, here in local.items():
        for other, there in remote.items():
            mask = writes.nbytes > 0
            if len(local) > 1:
                mask &= np.isin(writes.local, here)
            if len(remote) > 1:
                mask &= np.isin(writes.remote, there)
            if mask.any():
                nbytes = writes.nbytes[mask]
                rows = _rows(source[mask], nbytes, device), _rows(target[mask], nbytes, other)
                parts.append(DescriptorList(device, rows[0], other, rows[1]))
    return parts


def single(
    writes: Writes, local: Extents, remote: Extents, here: Devices, there: Devices
) -> deque[DescriptorList] | None:
    """What :func:`cut` makes of one range, several times as fast; None: it is not one good range, or not all alike.

    The staged path posts nothing else.
    """
    if len(writes) != 1 or len(here) != 1 or len(there) != 1:
        return None
    nbytes = writes.nbytes.item(0)
    source = local.address(writes.local.item(0), writes.local_off.item(0), nbytes)
    target = remote.address(writes.remote.item(0), writes.remote_off.item(0), nbytes)
    if source is None or target is None or not nbytes:
        return None
    ((device,), (other,)) = here, there
    return deque([DescriptorList(device, [(source, nbytes, device[1])], other, [(target, nbytes, other[1])])])


def _rows(addresses: I64, nbytes: I64, device: Place) -> U64:
    rows = np.empty((len(nbytes), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device[1]
    return rows
