"""GPU memory between processes of one host: a submit queues copies into the peer's memory, mapped at ``connect``.

Kernels of this process may write into a peer's memory, too: ``map`` gives the address. GPUs are identified by their
UUIDs: each process may number them in a way of its own. What is opened stays open while a buffer of it is referenced.

The copies are made by the GPU's copy engines, over NVLink or PCIe or within one GPU, on a stream per peer. They begin
when the events that they were given have happened, without a thread that waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from attrs import define, evolve, field

from ..errors import (
    MissingDependencyError,
    PeerLostError,
    RegistrationError,
    RemoteProtocolError,
    TransportError,
)
from ..geometry import I64
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event, parts
from ..planning import Writes, coalesce
from .base import Capabilities, PeerLost, Settled, WriteEnded
from .connected import Connected
from .cuda_api import Gpu, Mark, Stream
from .cuda_driver import Driver
from .cuda_driver import driver as this_driver
from .cuda_memory import OWNER, PLACE, CudaFlags, Opened, Owner, Place, exported, index, said, unreachable
from .descriptor import Region, decode, pack, unpack
from .flags import HostFlags
from .memfd import new_flag_page, open_flag_page
from .near_side import NearSide
from .process import Exits, Process, Watch, namespace
from .regions import Extents
from .waiting import happened, not_posted

log = logging.getLogger("disagg_kv")

_LOOK_S = 0.0002
"""How often ``close`` looks whether copies have ended."""


_LEFT: list[_Remote] = []
"""Peers whose memory copies may still use although their transport has closed; mapped until the process ends."""


@define(eq=False)
class _Remote:
    """A connected peer: what of it is mapped here, and what is on its way to it.

    Args:
        peer: the peer.
        owner: of its memory.
        watch: sees the end of its process.
        serial: of the newest descriptor.
        regions: in that descriptor.
        places: of those regions.
        mapping: held while a thread opens some of them.
        opened: by the number of the device that copies or runs kernels, and handle.
    """

    peer: Peer
    owner: Owner
    watch: Watch
    serial: int
    regions: tuple[Region, ...]
    places: Mapping[RegionId, Place]
    opened: dict[tuple[int, bytes], Opened] = field(factory=dict)
    device: int = 0
    extents: Extents | None = None
    stream: Stream | None = None
    flights: deque[_Flight] = field(factory=deque)
    lost: bool = False
    unquiet: bool = False
    mapping: threading.Lock = field(factory=threading.Lock)


@define(eq=False)
class _Flight:
    """One ticket's copies; not queued on the GPU while ``waits`` has events that only the host can ask.

    The events that were ``given`` are kept until then: an event without references is destroyed, handle or not.
    """

    ticket: Ticket
    remote: _Remote
    target: I64
    source: I64
    nbytes: I64
    given: Sequence[Event]
    waits: list[Event]
    mark: Mark | None = None


class CudaIpcTransport(NearSide):
    """Copies by the GPU into memory of another process on the same host; any exportable GPU memory on both sides.

    All regions of one transport lie on one device. A peer's process is watched through a pidfd.

    Args:
        driver: the CUDA driver; None: this process's.
        clock, sleep: time, for :meth:`close`.

    Raises:
        MissingDependencyError: no CUDA driver, no GPU, or not Linux 5.3 or newer.
    """

    name = "cuda_ipc"
    caps = Capabilities(
        devices=frozenset({"cuda"}),
        waits_events=True,
        detects_peer_death=True,
        late_writes=True,
        drain_s=2.0,
        bytes_per_s=3.8e11,
    )

    def __init__(
        self,
        *,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise MissingDependencyError("transport 'cuda_ipc'", "needs pidfd_open", "run on Linux 5.3+")
        self._cuda = driver or this_driver()
        self._clock = clock
        self._sleep = sleep
        super().__init__()
        self._owner = Owner(Process.own(), namespace("ipc"))
        self._places: dict[RegionId, Place] = {}
        self._device: str | None = None
        self._peers: Connected[_Remote] = Connected()
        self._exits: Exits[Peer] = Exits()
        self._flying: dict[_Remote, None] = {}
        self._leaving: list[_Remote] = []
        self._flag_pages = count(1)
        self._unquiet: set[Ticket] = set()
        self._events: list[WriteEnded | Settled | PeerLost] = []

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers, as sources of writes and as targets of peers'.

        Raises:
            RegistrationError: also for memory of a second device, and for memory that no other process can open.
        """
        self._home.check_open()
        regions = self._table.add(buffers)
        device = self._device
        try:
            places, gpu = [], self._owner.gpu
            for buffer in buffers:
                if device not in (None, buffer.device):
                    raise RegistrationError(f"{said(buffer)}: the transport's other regions lie on {device!r}")
                device = buffer.device
                places.append(exported(self._cuda, buffer))
                gpu = gpu or self._gpu(buffer)
        except BaseException:
            self._table.remove(regions)
            raise
        self._device = device
        self._owner = evolve(self._owner, gpu=gpu)
        self._places.update(zip(regions, places, strict=True))
        return regions

    def _gpu(self, buffer: Buffer) -> Gpu:
        try:
            return self._cuda.gpus()[index(buffer.device)]
        except (TransportError, IndexError) as error:
            raise RegistrationError(f"{said(buffer)}: this process sees no such GPU: {error}") from error

    def local_descriptor(self) -> bytes:
        """Return what a peer passes to ``connect``: incarnation and regions."""
        regions = (Region(i, b.nbytes, b.device, 0, pack(self._places[i])) for i, b in self._table.items())
        return self._described(regions, pack(self._owner))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor, or add its new regions; maps the peer's memory, which takes milliseconds.

        Raises:
            PeerLostError: the peer's process has ended.
            TransportError: it is this process, of another host or PID namespace, or its GPU cannot be reached.
        """
        self._home.check_open()
        remote = decode(descriptor, self.name)
        owner = unpack(remote.blob, OWNER)
        places = {r.id: unpack(r.blob, PLACE) for r in remote.regions}
        if owner.process == self._owner.process:
            raise TransportError("cuda_ipc: the peer is in this process, and CUDA opens other processes' memory only")
        known = self._peers.get(remote.incarnation)
        if known is not None and (known.lost or known.serial >= remote.serial):
            return known.peer
        if known is None:
            known = _Remote(remote.incarnation, owner, owner.process.watch(), remote.serial, remote.regions, places)
            known.extents = self._map(known, remote.regions, places)
            if self._peers.add(known.peer, known) is known:
                try:
                    self._exits.add(known.peer, known.watch)
                except TransportError:
                    self._peers.remove(known.peer)
                    self._give_back(known)
                    raise
            else:
                # Another thread has connected the peer meanwhile; what this one has opened goes.
                self._give_back(known)
            return known.peer
        with known.mapping:
            if known.serial < remote.serial:
                known.extents = self._map(known, remote.regions, places)
                known.serial, known.regions, known.places = remote.serial, remote.regions, places
                known.owner = owner
        return known.peer

    def _mapped(self, remote: _Remote) -> Extents | None:
        """Open what is not open yet; None: as long as we have no device of our own, there is nothing to open it for."""
        if remote.extents is None and self._device is not None:
            with remote.mapping:
                if remote.extents is None:
                    remote.extents = self._map(remote, remote.regions, remote.places)
        return remote.extents

    def _map(self, remote: _Remote, regions: Sequence[Region], places: Mapping[RegionId, Place]) -> Extents | None:
        """Open what of these regions is not open yet; one thread at a time, and ``submit`` uses what was before."""
        if self._device is None:
            return None
        if remote.stream is None:
            remote.device = index(self._device)
            remote.stream = self._cuda.stream(remote.device)
        found = [(region, self._open(remote, remote.device, region, places[region.id])) for region in regions]
        where = [(region.id, addr, region.nbytes) for region, (addr, _) in found]
        return Extents(where, f"peer {remote.peer.hex()[:8]}'s")

    def _open(self, remote: _Remote, device: int, region: Region, place: Place) -> tuple[int, Opened]:
        """A region's address for a device, and what keeps it; ``remote.mapping`` is held, or ``remote`` is still new.

        Raises:
            RemoteProtocolError: it is not inside what its handle opens.
            TransportError: it cannot be opened.
        """
        key = device, place.handle
        opened = remote.opened.get(key)
        if opened is None:
            opened = remote.opened[key] = Opened(self._cuda, device, place.handle, remote.peer.hex())
        base, nbytes = self._cuda.segment(device, opened.addr)
        if not 0 <= place.offset <= nbytes - region.nbytes:
            raise RemoteProtocolError(
                f"cuda_ipc: region {region.id} of peer {remote.peer.hex()[:8]}: {region.nbytes} bytes from "
                f"{place.offset} on are not inside its allocation of {nbytes} bytes"
            )
        return base + place.offset, opened

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """Why kernels of ``device`` cannot write to these regions of a peer; None: no reason is known."""
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number or "0").isdecimal():
            return f"cuda_ipc maps memory for kernels on 'cuda:0', 'cuda:1' ..., not on {device!r}"
        remote = self._peers.get(peer)
        if remote is None:
            return f"cuda_ipc: no peer {peer.hex()}"
        unknown = [region for region in regions if region not in remote.places]
        if unknown:
            return f"cuda_ipc: peer {peer.hex()[:8]}'s region {unknown[0]} is not registered"
        owner = remote.owner
        if owner.ipc != self._owner.ipc:
            return f"cuda_ipc: the peer is of IPC namespace {owner.ipc}, this process of {self._owner.ipc}"
        try:
            return None if owner.gpu is None else unreachable(self._cuda, owner.gpu, int(number or 0))
        except TransportError as error:
            return str(error)

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """Return a region of a peer as memory for kernels of ``device``.

        The address is of the context of ``device``.
        """
        self._home.check_open()
        remote = self._peers.known(peer, self.name)
        reason = self.unmappable(peer, [region], device)
        if reason is not None:
            raise RegistrationError(reason)
        if remote.lost or remote.watch.ended(at_once=True):
            raise PeerLostError(f"cuda_ipc: the process of peer {peer.hex()} has ended")
        with remote.mapping:
            named = next((one for one in remote.regions if one.id == region), None)
            if named is None:  # another thread has taken a later descriptor since
                raise RegistrationError(f"cuda_ipc: peer {peer.hex()[:8]}'s region {region} is not registered any more")
            addr, opened = self._open(remote, index(device), named, remote.places[region])
        return Buffer(addr, named.nbytes, device, opened)

    def flag_page(self, nbytes: int) -> tuple[Buffer, bytes]:
        """Return memory for flags, and what a peer passes to :meth:`open_flags`; host memory, in a file of its own."""
        self._home.check_open()
        return new_flag_page(self._me, next(self._flag_pages), nbytes)

    def open_flags(self, peer: Peer, page: bytes) -> HostFlags:
        """Open the flag page of a connected peer.

        Streams of the device of our regions raise flags, if the driver can.
        """
        self._home.check_open()
        self._peers.known(peer, self.name)
        memory = open_flag_page(peer, page)
        if self._device is not None:
            try:
                return CudaFlags(self._cuda, self._device, memory, peer.hex())
            except TransportError as error:
                log.warning("cuda_ipc: peer %s: no stream raises its flags: %s", peer.hex(), error)
        return HostFlags(memory)

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer; what is mapped is given back once nothing is on its way to it."""
        remote = self._peers.remove(peer)
        if remote is not None:
            self._exits.remove(peer)
            self._leaving.append(remote)
            self._leave()

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket.

        Never waits. ``after`` may be made of CUDA's events and of others.
        """
        self._home.check()
        remote = self._peers.known(peer, self.name)
        extents = self._mapped(remote) or Extents((), "peer's")
        source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
        target = extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
        ticket = Ticket(next(self._tickets))
        if remote.watch.ended():
            self._note_end(remote)
        if remote.lost:
            self._events.append(
                WriteEnded(ticket, PeerLostError(f"cuda_ipc: the process of peer {peer.hex()} has ended"))
            )
        elif not writes.nbytes.any():
            self._events.append(WriteEnded(ticket))
        else:
            ranges = target, source, writes.nbytes
            if len(writes) > 1:
                writes = coalesce(writes)
                source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
                target = extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
                some = writes.nbytes > 0
                ranges = target[some], source[some], writes.nbytes[some]
            given = list(parts(after))
            # Not by ``isinstance``: to look a protocol's members up takes longer than to queue the copies.
            hosts = [event for event in given if getattr(event, "cuda_event", None) is None]
            flight = _Flight(ticket, remote, *ranges, given, hosts)
            remote.flights.append(flight)
            self._flying[remote] = None
            self._begin(flight)
        return ticket

    def _begin(self, flight: _Flight) -> None:
        """Queue a flight's copies if the host need not wait for anything; its error ends it."""
        remote = flight.remote
        assert remote.stream is not None
        if remote.lost:
            self._end(flight, PeerLostError(f"cuda_ipc: the process of peer {remote.peer.hex()} has ended"))
            return
        try:
            flight.waits = [event for event in flight.waits if not happened(event, "cuda_ipc", flight.ticket)]
        except TransportError as error:
            self._end(flight, error)
            return
        if flight.waits:
            return
        try:
            ranges = flight.target, flight.source, flight.nbytes
            after: list[int] = [handle for event in flight.given if (handle := getattr(event, "cuda_event", None))]
            flight.mark = self._cuda.copy(remote.device, remote.stream, *ranges, after)
            flight.given = ()
        except Exception as error:
            # Some of the copies may be queued.
            self._end(flight, error, quiesced=False)

    def _end(self, flight: _Flight, error: Exception | None, quiesced: bool = True) -> None:
        flight.remote.flights.remove(flight)
        if not flight.remote.flights:
            del self._flying[flight.remote]
        if error is not None and not isinstance(error, TransportError | PeerLostError):
            failed = TransportError(f"cuda_ipc: ticket {flight.ticket}: {error}")
            failed.__cause__ = error
            error = failed
        if not quiesced:
            self._unquiet.add(flight.ticket)
            flight.remote.unquiet = True
        self._events.append(WriteEnded(flight.ticket, error, quiesced))

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call."""
        if not self._home.here:
            return ()
        for peer in self._exits.ended():
            if (gone := self._peers.get(peer)) is not None:
                self._note_end(gone)
        for remote in list(self._flying):
            self._progress(remote)
        if self._leaving:
            self._leave()
        events, self._events = self._events, []
        return events

    def _progress(self, remote: _Remote) -> None:
        """Queue what need not wait any more, and end what has been copied; copies of one stream end in their order."""
        ordered = True
        for flight in tuple(remote.flights):
            if flight.mark is None:
                self._begin(flight)
            elif ordered:
                try:
                    ordered = self._cuda.passed(flight.mark)
                except TransportError as error:
                    self._end(flight, error, quiesced=False)
                    continue
                if ordered:
                    self._cuda.forget(flight.mark)
                    self._end(flight, None)

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets, and return those that are not quiet.

        What copies still use is left to the end of the process.
        """
        self._home.check()
        if self._home.closed:
            return ()
        self._home.closed = True
        until = self._clock() + drain_s
        while True:
            for remote in list(self._flying):
                self._progress(remote)
            if not self._flying or self._clock() >= until:
                break
            self._sleep(_LOOK_S)
        for peer in tuple(self._peers.all):
            self.disconnect(peer)
        _LEFT.extend(self._leaving)
        remotes = list(self._flying)
        left = sorted({f.ticket for remote in remotes for f in remote.flights if f.mark is not None} | self._unquiet)
        for flight in [f for remote in remotes for f in remote.flights if f.mark is None]:
            self._end(flight, not_posted("cuda_ipc", flight.ticket))
        self._table.clear()
        self._exits.clear()
        return tuple(left)

    def _leave(self) -> None:
        """Give back what is mapped of peers that were disconnected, where no copy uses it."""
        for remote in [r for r in self._leaving if not r.flights and not r.unquiet]:
            self._leaving.remove(remote)
            self._give_back(remote)

    def _give_back(self, remote: _Remote) -> None:
        # Mappings that kernels may use keep what they are of.
        remote.opened.clear()
        try:
            if remote.stream is not None:
                self._cuda.end(remote.device, remote.stream)
        except TransportError as error:
            log.warning("cuda_ipc: peer %s: %s", remote.peer.hex(), error)

    def _note_end(self, remote: _Remote) -> None:
        """A peer's process has ended."""
        if not remote.lost:
            remote.lost = True
            self._events.append(PeerLost(remote.peer))
