"""Shared memory between processes of one host: a submit is a copy into the peer's memory, mapped at ``connect``.

Memory that peers can write to is an anonymous file (``memfd_create``), which they open as
``/proc/<pid>/fd/<fd>``. It has no name in ``/dev/shm``: however a process ends, nothing stays behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import uuid
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from weakref import WeakSet

import msgspec
from attrs import define, frozen

from ..errors import MissingDependencyError, PeerLostError, RegistrationError, TransportError
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes
from .base import Capabilities, Ended, Heard, Settled
from .descriptor import Descriptor, Region, decode, encode, pack, unpack
from .process import PROCESS, Process, Watch
from .regions import Extents, RegionTable, copy


@frozen
class _Place:
    """Where a region's memory is to be found: byte ``offset`` of memory ``number``, open as ``fd`` in its process."""

    number: int
    fd: int
    offset: int


_PLACE = msgspec.msgpack.Decoder(_Place)


def _name(peer: Peer, number: int) -> str:
    return f"disagg_kv-{peer.hex()}-{number}"


def _available() -> int:
    """Bytes of memory that the host could still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class _Segment:
    """Memory that peers can map. It is unmapped when the last reference to this object goes."""

    fd = -1

    def __init__(self, peer: Peer, number: int, nbytes: int) -> None:
        # Linux would begin to hand out pages and end by killing some process.
        if nbytes > _available():
            raise OSError(errno.ENOMEM, f"the host has {_available()} bytes to give")
        self.number = number
        self.fd = os.memfd_create(_name(peer, number), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserved now, so that a failure is an error here and not a SIGBUS at some write.
            os.posix_fallocate(self.fd, 0, nbytes)
            # A peer that shrank the file would kill us at the next access.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._mapping = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except BaseException:
            self.hide()
            raise
        self.addr = _address(self._mapping)
        self.nbytes = nbytes

    def hide(self) -> None:
        """Let no further peer map it; those that have, keep it, and so does this process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.hide()


@define
class _Remote:
    """A connected peer: what of it is mapped here, and how its end is noticed."""

    watch: Watch
    serial: int
    mappings: dict[RegionId, mmap.mmap]
    extents: Extents
    lost: bool = False

    def unmap(self) -> None:
        for mapping in self.mappings.values():
            mapping.close()


class ShmTransport:
    """Copies into memory that the peer took from its own :meth:`allocate`; any CPU memory can be the source.

    A write is finished, and quiet, when ``submit`` returns. The peer's process is watched through a pidfd: its end is
    reported by ``poll``, and is a fence, because it is the process itself that copies, and mappings are not inherited
    by its children.

    Raises:
        MissingDependencyError: not Linux 5.3 or newer.
    """

    name = "shm"
    caps = Capabilities(own_memory_only=True, detects_peer_death=True, drain_s=0.0, write_s=1e-6, bytes_per_s=8e9)

    def __init__(self) -> None:
        if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
            raise MissingDependencyError("transport 'shm'", "needs memfd_create and pidfd_open", "run on Linux 5.3+")
        self._me = Peer(uuid.uuid4().bytes)
        self._table = RegionTable(self.caps.devices)
        self._segments: WeakSet[_Segment] = WeakSet()
        self._numbers = count()
        self._peers: dict[Peer, _Remote] = {}
        self._tickets = count(1)
        self._events: list[Ended | Settled | Heard] = []

    def allocate(self, nbytes: int) -> Buffer:
        """See :meth:`SupportsAllocate.allocate`.

        Raises:
            RegistrationError: the host does not give that much shared memory.
        """
        try:
            segment = _Segment(self._me, next(self._numbers), nbytes)
        except (OSError, OverflowError) as error:
            raise RegistrationError(f"shm: cannot allocate {nbytes} bytes of shared memory: {error}") from error
        self._segments.add(segment)
        return Buffer(segment.addr, segment.nbytes, "cpu", segment)

    def allocated(self, buffer: Buffer) -> bool:
        """See :meth:`SupportsAllocate.allocated`."""
        return self._segment(buffer) is not None

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """See :meth:`Transport.register`; peers can write only to what :meth:`allocate` gave."""
        return self._table.add(buffers)

    def deregister(self, regions: Sequence[RegionId]) -> None:
        """See :meth:`Transport.deregister`; a peer that has mapped the memory can go on writing to it."""
        self._table.remove(regions)

    def local_descriptor(self) -> bytes:
        """See :meth:`Transport.local_descriptor`."""
        regions = tuple(Region(i, b.nbytes, b.device, 0, self._place(b)) for i, b in self._table.items())
        blob = pack(Process.own())
        return encode(Descriptor(self.name, self._me, self._table.serial, regions, blob))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """See :meth:`Transport.connect`; maps the peer's memory, which takes about a millisecond per MiB.

        Raises:
            PeerLostError: the peer's process has ended, or it has given the memory back.
        """
        remote = decode(descriptor, self.name)
        process = unpack(remote.blob, PROCESS)
        places = {r.id: unpack(r.blob, _PLACE) for r in remote.regions if r.blob}
        peer = remote.incarnation
        known = self._peers.get(peer)
        if known is not None and (known.lost or known.serial >= remote.serial):
            return peer
        watch = process.watch()
        mappings: dict[RegionId, mmap.mmap] = {}
        try:
            for region in remote.regions:
                if region.id in places:
                    mappings[region.id] = _map(process, peer, places[region.id], region.nbytes)
        except BaseException:
            for mapping in mappings.values():
                mapping.close()
            raise
        self.disconnect(peer)
        where = (
            (r.id, _address(mappings[r.id]) + places[r.id].offset % mmap.ALLOCATIONGRANULARITY, r.nbytes)
            for r in remote.regions
            if r.id in places
        )
        self._peers[peer] = _Remote(watch, remote.serial, mappings, Extents(where, f"peer {peer.hex()[:8]}'s writable"))
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See :meth:`Transport.disconnect`."""
        remote = self._peers.pop(peer, None)
        if remote is not None:
            remote.unmap()

    def submit(self, peer: Peer, writes: Writes, *, notify: bytes | None = None, after: Event | None = None) -> Ticket:
        """See :meth:`Transport.submit`; copies before it returns."""
        remote = self._peers.get(peer)
        if remote is None:
            raise TransportError(f"shm: no peer {peer.hex()}")
        if notify is not None or after is not None:
            raise TransportError("shm neither carries notifications nor waits for events")
        source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
        target = remote.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
        ticket = Ticket(next(self._tickets))
        self._look(peer, remote)
        if remote.lost:
            self._events.append(Ended(ticket, PeerLostError(f"shm: the process of peer {peer.hex()} has ended")))
            return ticket
        copy(target, source, writes.nbytes)
        self._events.append(Ended(ticket))
        return ticket

    def poll(self) -> Sequence[Ended | Settled | Heard]:
        """See :meth:`Transport.poll`."""
        for peer, remote in self._peers.items():
            self._look(peer, remote)
        events, self._events = self._events, []
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """See :meth:`Transport.close`; memory from :meth:`allocate` stays until its owners go."""
        for peer in tuple(self._peers):
            self.disconnect(peer)
        for segment in self._segments:
            segment.hide()
        self._table.clear()
        return ()

    def _segment(self, buffer: Buffer) -> _Segment | None:
        """The memory given by :meth:`allocate` in which the whole buffer lies."""
        for segment in self._segments:
            if segment.addr <= buffer.addr and buffer.addr + buffer.nbytes <= segment.addr + segment.nbytes:
                return segment
        return None

    def _place(self, buffer: Buffer) -> bytes:
        segment = self._segment(buffer)
        if segment is None:
            return b""
        return pack(_Place(segment.number, segment.fd, buffer.addr - segment.addr))

    def _look(self, peer: Peer, remote: _Remote) -> None:
        """Note the end of a peer's process."""
        if not remote.lost and remote.watch.ended():
            remote.lost = True
            self._events.append(Heard(peer, None, fenced=True))


def _map(process: Process, peer: Peer, place: _Place, nbytes: int) -> mmap.mmap:
    """Map the pages of a peer's memory that hold ``nbytes`` bytes from ``place`` on."""
    path = f"/proc/{process.pid}/fd/{place.fd}"
    link = f"/memfd:{_name(peer, place.number)} (deleted)"
    into = place.offset % mmap.ALLOCATIONGRANULARITY
    try:
        # The link is looked at first, so that nothing but such memory is ever opened, and again once it is open.
        if os.readlink(path) != link:
            raise PeerLostError(f"shm: {path} is not {link} any more: the peer has given the memory back")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != link or not 0 <= place.offset <= os.fstat(fd).st_size - nbytes:
                raise PeerLostError(f"shm: {path} is not {nbytes} bytes of {link} from {place.offset} on")
            # Page tables are filled here, where blocking is allowed, and not at the first write.
            mapping = mmap.mmap(fd, into + nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=place.offset - into)
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise PeerLostError(f"shm: {path} is gone: the peer has ended or given the memory back") from error
    except OSError as error:
        raise TransportError(f"shm: {path} cannot be mapped; have both processes the same user? {error}") from error
    # A child forked by this process must not be able to write after this process has ended.
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping
