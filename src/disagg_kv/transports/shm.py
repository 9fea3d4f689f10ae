"""Shared memory between processes of one host: a submit is a copy into the peer's memory, which it maps.

Memory that peers can write to is an anonymous file (``memfd_create``), which they open as
``/proc/<pid>/fd/<fd>``. It has no name in ``/dev/shm``: however a process ends, nothing stays behind.

``connect`` maps the files. Nothing fills page tables in advance, which takes up to seconds per GiB and keeps the
interpreter: the first copy to a page does, and ``memmove`` runs without the interpreter. The files are sealed, so
whatever their owner does meanwhile, a mapping never loses its pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakSet

from attrs import define

from ..errors import MissingDependencyError, PeerLostError, RegistrationError, TransportError
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes
from .base import Capabilities, LinkCost, PeerLost, Settled, WriteEnded
from .connected import Connected
from .descriptor import Region, decode, pack, unpack
from .flags import HostFlags
from .memfd import PLACE, Place, SharedMemory, new_flag_page, open_flag_page, open_memory
from .near_side import NearSide
from .process import PROCESS, Exits, Process, Watch
from .regions import Extents, copy


@define(eq=False)
class _Remote:
    """A connected peer.

    Args:
        watch: sees the end of its process.
        serial: of the newest descriptor.
        regions: those that it can be written to, mapped.
        extents: of these.
    """

    watch: Watch
    serial: int
    regions: Mapping[RegionId, Buffer]
    extents: Extents
    lost: bool = False


class ShmTransport(NearSide):
    """Copies into memory that the peer took from its own :meth:`allocate`; any CPU memory can be the source.

    A write is finished, and quiet, when ``submit`` returns. The transport watches the peer's process through a
    pidfd, and ``poll`` reports its end. That end is a fence: the process itself copies, and its children do not inherit
    the mappings.

    Raises:
        MissingDependencyError: not Linux 5.3 or newer.
    """

    name = "shm"
    caps = Capabilities(
        own_memory_only=True,
        detects_peer_death=True,
        drain_s=0.0,
        bytes_per_s=8e9,
        # The mapping's address is free; the peer's process is watched, and its memory has a descriptor. Measured by
        # benchmarks/links.py.
        link=LinkCost(1_500, 2),
    )

    def __init__(self) -> None:
        if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
            raise MissingDependencyError("transport 'shm'", "needs memfd_create and pidfd_open", "run on Linux 5.3+")
        super().__init__()
        self._segments: WeakSet[SharedMemory] = WeakSet()
        self._numbers = count()
        self._peers: Connected[_Remote] = Connected()
        self._exits: Exits[Peer] = Exits()
        self._events: list[WriteEnded | Settled | PeerLost] = []

    def allocate(self, nbytes: int) -> Buffer:
        """Return ``nbytes`` of zeroed memory that peers can write to.

        Raises:
            RegistrationError: the host does not give that much shared memory.
        """
        try:
            segment = SharedMemory(self._me, next(self._numbers), nbytes)
        except (OSError, OverflowError) as error:
            raise RegistrationError(f"shm: cannot allocate {nbytes} bytes of shared memory: {error}") from error
        self._segments.add(segment)
        return Buffer(segment.addr, segment.nbytes, "cpu", segment)

    def allocated(self, buffer: Buffer) -> bool:
        """Return True if the whole buffer is memory of :meth:`allocate`."""
        return self._segment(buffer) is not None

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers, as sources of writes and as targets of peers'.

        Peers can write only to what :meth:`allocate` gave.
        """
        self._home.check()
        return self._table.add(buffers)

    def local_descriptor(self) -> bytes:
        """Return what a peer passes to ``connect``: incarnation and regions."""
        regions = (Region(i, b.nbytes, b.device, 0, self._place(b)) for i, b in self._table.items())
        return self._described(regions, pack(Process.own()))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor, or add its new regions.

        Maps the peer's memory, and touches none of its pages. Never waits.

        Raises:
            PeerLostError: the peer's process has ended, or it has given the memory back.
            TransportError: also where this process cannot map the memory.
        """
        self._home.check()
        remote = decode(descriptor, self.name)
        process = unpack(remote.blob, PROCESS)
        places = {r.id: unpack(r.blob, PLACE) for r in remote.regions if r.blob}
        peer = remote.incarnation
        known = self._peers.get(peer)
        if known is not None and (known.lost or known.serial >= remote.serial):
            return peer
        watch = process.watch()
        mapped = {} if known is None else known.regions
        regions = {
            r.id: mapped.get(r.id) or open_memory(process, peer, places[r.id], r.nbytes)
            for r in remote.regions
            if r.id in places
        }
        where = ((i, far.addr, far.nbytes) for i, far in regions.items())
        found = _Remote(watch, remote.serial, regions, Extents(where, _writable(peer)))
        if self._peers.add(peer, found) is found:
            try:
                self._exits.add(peer, watch)
            except TransportError:
                self._peers.remove(peer)
                raise
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer; its tickets still end."""
        self._peers.remove(peer)
        self._exits.remove(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket; copies before it returns."""
        self._home.check()
        remote = self._peers.known(peer, self.name)
        if after is not None:
            raise TransportError("shm does not wait for events: wait first")
        source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
        target = remote.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
        ticket = Ticket(next(self._tickets))
        if remote.watch.ended():
            self._note_end(peer, remote)
        if remote.lost:
            self._events.append(WriteEnded(ticket, PeerLostError(f"shm: the process of peer {peer.hex()} has ended")))
            return ticket
        copy(target, source, writes.nbytes)
        self._events.append(WriteEnded(ticket))
        return ticket

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """Why kernels of ``device`` cannot write to these regions of a peer; None: no reason is known.

        Only memory of the peer's :meth:`allocate` can be mapped.
        """
        if device != "cpu":
            return f"shm maps memory for kernels on the CPU, not on {device!r}"
        remote = self._peers.get(peer)
        if remote is None:
            return f"shm: no peer {peer.hex()}"
        unknown = [region for region in regions if region not in remote.regions]
        why = "is not registered: it is unknown, or memory of another allocator"
        return f"shm: {_writable(peer)} region {unknown[0]} {why}" if unknown else None

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """Return a region of a peer as memory for kernels of ``device``; its owner keeps the mapping."""
        self._home.check()
        remote = self._peers.known(peer, self.name)
        reason = self.unmappable(peer, [region], device)
        if reason is not None:
            raise RegistrationError(reason)
        if remote.lost or remote.watch.ended(at_once=True):
            raise PeerLostError(f"shm: the process of peer {peer.hex()} has ended")
        return remote.regions[region]

    def flag_page(self, nbytes: int) -> tuple[Buffer, bytes]:
        """Return memory for flags, and what a peer passes to :meth:`open_flags`."""
        self._home.check()
        return new_flag_page(self._me, next(self._numbers), nbytes)

    def open_flags(self, peer: Peer, page: bytes) -> HostFlags:
        """Open the flag page of a connected peer."""
        self._home.check()
        self._peers.known(peer, self.name)
        return HostFlags(open_flag_page(peer, page))

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call."""
        if not self._home.here:
            return ()
        for peer in self._exits.ended():
            remote = self._peers.get(peer)
            if remote is not None:
                self._note_end(peer, remote)
        events, self._events = self._events, []
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets, and return those that are not quiet.

        Memory from :meth:`allocate` stays until its owners go.
        """
        self._home.check()
        self._peers.clear()
        self._exits.clear()
        for segment in self._segments:
            segment.hide()
        self._table.clear()
        return ()

    def _segment(self, buffer: Buffer) -> SharedMemory | None:
        """The memory given by :meth:`allocate` in which the whole buffer lies."""
        for segment in self._segments:
            if segment.addr <= buffer.addr and buffer.addr + buffer.nbytes <= segment.addr + segment.nbytes:
                return segment
        return None

    def _place(self, buffer: Buffer) -> bytes:
        segment = self._segment(buffer)
        if segment is None:
            return b""
        return pack(Place(segment.number, segment.fd, buffer.addr - segment.addr))

    def _note_end(self, peer: Peer, remote: _Remote) -> None:
        """A peer's process has ended."""
        if not remote.lost:
            remote.lost = True
            self._events.append(PeerLost(peer, fenced=True))


def _writable(peer: Peer) -> str:
    """Whose regions, for messages."""
    return f"peer {peer.hex()[:8]}'s writable"
