"""A small correct transport that claims every capability: what mutants are made of.

Memory of its own is an anonymous file, which peers open through ``/proc``. ``submit`` queues a batch, and ``poll``
copies it once its event has happened.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from weakref import WeakSet

import msgspec
from attrs import define, frozen

from disagg_kv.errors import PeerLostError, TransportError
from disagg_kv.geometry import I64
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.transports import (
    PROCESS,
    Capabilities,
    Connected,
    Descriptor,
    Extents,
    Home,
    PeerLost,
    Process,
    Region,
    RegionTable,
    Settled,
    Watch,
    WriteEnded,
    copy,
    decode,
    encode,
    pack,
    unpack,
)


@frozen
class Place:
    """Where peers find a region: its offset in an open file of its process."""

    fd: int
    offset: int


PLACE = msgspec.msgpack.Decoder(Place)


class Memory:
    """Bytes that peers can map: a mapping of an open file, which this object owns."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        # A forked child that survives this process must not write to the peer's memory.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def __del__(self) -> None:
        os.close(self.fd)


@frozen
class Remote:
    """A connected peer."""

    serial: int
    watch: Watch
    memory: Mapping[RegionId, Memory]
    extents: Extents


@define(eq=False)
class Flight:
    """A batch that was submitted and has not ended."""

    ticket: Ticket
    peer: Peer
    remote: Remote
    target: I64
    source: I64
    nbytes: I64
    after: Event | None


class ModelTransport:
    """See the module. Each mutant overrides one of the methods."""

    name = "model"
    caps = Capabilities(own_memory_only=True, waits_events=True, detects_peer_death=True, max_batch=1000, drain_s=0.0)

    def __init__(self) -> None:
        self._home = Home("this transport 'model'")
        self._me = Peer(uuid.uuid4().bytes)
        self._table = RegionTable(self.caps.devices)
        self._allocated: WeakSet[Memory] = WeakSet()
        self._peers: Connected[Remote] = Connected()
        self._lost: set[Peer] = set()
        self._tickets = count(1)
        self._flights: list[Flight] = []
        self._events: list[WriteEnded | Settled | PeerLost] = []
        self._closed = False

    def allocate(self, nbytes: int) -> Buffer:
        fd = os.memfd_create("disagg_kv-model", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        memory = Memory(fd, nbytes)
        self._allocated.add(memory)
        return Buffer(memory.addr, nbytes, "cpu", memory)

    def allocated(self, buffer: Buffer) -> bool:
        return self.place(buffer) is not None

    def place(self, buffer: Buffer) -> Place | None:
        """Where peers find a buffer; None: they cannot write to it."""
        for memory in self._allocated:
            offset = buffer.addr - memory.addr
            if 0 <= offset <= memory.nbytes - buffer.nbytes:
                return Place(memory.fd, offset)
        return None

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        self._home.check()
        return self._table.add(buffers)

    def peer_of(self, descriptor: bytes) -> Peer:
        return decode(descriptor, self.name).incarnation

    def local_descriptor(self) -> bytes:
        places = [(i, b, self.place(b)) for i, b in self._table.items()]
        regions = tuple(Region(i, b.nbytes, blob=b"" if at is None else pack(at)) for i, b, at in places)
        return encode(Descriptor(self.name, self._me, self._table.serial, regions, pack(Process.own())))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        self._home.check()
        found = self.decode(descriptor)
        peer, process = found.incarnation, unpack(found.blob, PROCESS)
        known = self._peers.get(peer)
        if known is not None and not self.newer(known, found):
            return peer
        watch = process.watch()
        places = {r.id: (unpack(r.blob, PLACE), r.nbytes) for r in found.regions if r.blob}
        memory = {i: _open(process, place, nbytes) for i, (place, nbytes) in places.items()}
        extents = Extents(((i, memory[i].addr + places[i][0].offset, places[i][1]) for i in places), "the peer's")
        self._peers.add(peer, Remote(found.serial, watch, memory, extents))
        return peer

    def decode(self, descriptor: bytes) -> Descriptor:
        """A descriptor, checked."""
        return decode(descriptor, self.name)

    def newer(self, known: Remote, found: Descriptor) -> bool:
        """Whether a descriptor of a known peer is to be believed."""
        return known.serial < found.serial

    def disconnect(self, peer: Peer) -> None:
        self._peers.remove(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        self._home.check()
        remote = self._peers.get(peer)
        if remote is None or self._closed:
            raise TransportError(f"model: no peer {peer.hex()}, or closed")
        if self.caps.max_batch is not None and len(writes) > self.caps.max_batch:
            raise TransportError(f"model: {len(writes)} descriptors, but at most {self.caps.max_batch} in one batch")
        source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
        target = remote.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
        ticket = Ticket(next(self._tickets))
        self._flights.append(Flight(ticket, peer, remote, target, source, writes.nbytes, after))
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        if not self._home.here:
            return ()
        for peer, remote in self._peers.all.items():
            if peer not in self._lost and remote.watch.ended():
                self._lost.add(peer)
                self.lose(peer)
        for flight in tuple(self._flights):
            self.progress(flight)
        events, self._events = self._events, []
        return events

    def lose(self, peer: Peer) -> None:
        """Report a loss: this process copies into the peer's memory itself, and so does the peer into this one's."""
        self._events.append(PeerLost(peer, fenced=True))

    def progress(self, flight: Flight) -> None:
        """Copy a batch whose event has happened, and end it."""
        if flight.remote.watch.ended():
            self.end(flight, PeerLostError("model: the peer's process has ended"))
            return
        try:
            if flight.after is None or flight.after.query():
                self.move(flight)
        except Exception as error:
            failed = TransportError(f"model: ticket {flight.ticket}: {error}")
            failed.__cause__ = error
            self.end(flight, failed)

    def move(self, flight: Flight) -> None:
        """Copy a batch, and end its ticket."""
        copy(flight.target, flight.source, flight.nbytes)
        self.end(flight, None)

    def end(self, flight: Flight, error: Exception | None) -> None:
        """Report the end of a ticket."""
        self._flights.remove(flight)
        self._events.append(WriteEnded(flight.ticket, error))

    def close(self, drain_s: float) -> Sequence[Ticket]:
        self._home.check()
        until = time.monotonic() + drain_s
        while self._flights and time.monotonic() < until:
            for flight in tuple(self._flights):
                self.progress(flight)
        for flight in tuple(self._flights):
            self.end(flight, TransportError("model: closed before it was written"))
        self._closed = True
        self._peers.clear()
        self._table.clear()
        return ()


def _open(process: Process, place: Place, nbytes: int) -> Memory:
    try:
        fd = os.open(f"/proc/{process.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLostError(f"model: the peer's memory is gone: {error}") from error
    size = os.fstat(fd).st_size
    if not 0 <= place.offset <= size - nbytes:
        os.close(fd)
        raise PeerLostError("model: the peer's memory is of another size")
    return Memory(fd, size)


def stopped(remote: Remote) -> bool:
    """Whether the peer's process is stopped."""
    info = Path(f"/proc/self/fdinfo/{remote.watch._pidfd}").read_text()
    pid = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
