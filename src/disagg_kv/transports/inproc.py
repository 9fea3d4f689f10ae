"""Both sides in one process: a submit is a copy. For tests, for learning, and as the smallest correct transport."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import msgspec
from attrs import frozen

from ..errors import PeerLostError, RegistrationError, RemoteProtocolError, TransportError
from ..geometry import I64
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event, new_buffer
from ..planning import Writes
from .base import Capabilities, LinkCost, PeerLost, Settled, WriteEnded
from .connected import Connected
from .descriptor import Region, decode, pack, unpack
from .flags import HostFlags
from .near_side import NearSide
from .regions import Extents, copy

_open: WeakValueDictionary[Peer, InprocTransport] = WeakValueDictionary()
_registry = threading.Lock()
_NUMBER = msgspec.msgpack.Decoder(int)
_departures = count(1)
_departed = 0
"""How many transports of this process were closed or destroyed: only then a peer may be lost."""


@frozen
class _Remote:
    """A connected peer: which of its descriptors is known, and the regions in it."""

    serial: int
    extents: Extents
    regions: frozenset[RegionId]


class InprocTransport(NearSide):
    """Copies between two transports of one process, also of different threads.

    A write is finished, and quiet, when ``submit`` returns. A peer that was closed counts as lost; nothing of it can
    land any more.
    """

    name = "inproc"
    caps = Capabilities(
        in_process_only=True, detects_peer_death=True, drain_s=0.0, bytes_per_s=8e9,
        link=LinkCost(1_000, 0),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._peers: Connected[_Remote] = Connected()
        self._events: list[WriteEnded | Settled | PeerLost] = []
        self._lost: set[Peer] = set()
        self._flag_pages: WeakValueDictionary[int, Buffer] = WeakValueDictionary()
        # Held while a peer copies into this transport's memory or while that memory is taken away.
        self._target = threading.Lock()
        self._seen = _departed
        with _registry:
            _open[self._me] = self

    def __del__(self) -> None:
        _depart()

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers, as sources of writes and as targets of peers'."""
        self._home.check()
        with self._target:
            return self._table.add(buffers)

    def local_descriptor(self) -> bytes:
        """Return what a peer passes to ``connect``: incarnation and regions."""
        return self._described(Region(i, b.nbytes, b.device) for i, b in self._table.items())

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor, or add its new regions; never waits."""
        self._home.check()
        remote = decode(descriptor, self.name)
        peer = remote.incarnation
        if _find(peer) is None:
            raise PeerLostError(f"inproc peer {peer.hex()} is not an open transport of this process")
        known = self._peers.get(peer)
        if known is None or known.serial < remote.serial:
            places = Extents(((r.id, 0, r.nbytes) for r in remote.regions), f"peer {peer.hex()[:8]}'s")
            self._peers.add(peer, _Remote(remote.serial, places, frozenset(r.id for r in remote.regions)))
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer; its tickets still end."""
        self._peers.remove(peer)
        self._lost.discard(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket; copies before it returns."""
        self._home.check()
        remote = self._peers.known(peer, self.name)
        if after is not None:
            raise TransportError("inproc does not wait for events: wait first")
        source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
        remote.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
        ticket = Ticket(next(self._tickets))
        there = _find(peer)
        error = _closed(peer) if there is None else there._receive(writes, source)
        self._events.append(WriteEnded(ticket, error))
        return ticket

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """Why kernels of ``device`` cannot write to these regions of a peer; None: no reason is known."""
        remote, there = self._peers.get(peer), _find(peer)
        if remote is None or there is None:
            return f"inproc: no open peer {peer.hex()}"
        for region in regions:
            buffer = there._table.get(region) if region in remote.regions else None
            if buffer is None:
                return f"inproc: region {region} of peer {peer.hex()} is not registered"
            if buffer.device != device:
                return f"inproc: region {region} is memory on {buffer.device!r}, not for kernels on {device!r}"
        return None

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """Return a region of a peer as memory for kernels of ``device``; the peer's own buffer."""
        self._home.check()
        self._peers.known(peer, self.name)
        there = _find(peer)
        if there is None:
            raise _closed(peer)
        buffer, reason = there._table.get(region), self.unmappable(peer, [region], device)
        if buffer is None or reason is not None:
            raise RegistrationError(reason or f"inproc: peer {peer.hex()} has just closed")
        return buffer

    def flag_page(self, nbytes: int) -> tuple[Buffer, bytes]:
        """Return memory for flags, and what a peer passes to :meth:`open_flags`."""
        self._home.check()
        number, buffer = next(self._tickets), new_buffer(nbytes, "cpu")
        self._flag_pages[number] = buffer
        return buffer, pack(number)

    def open_flags(self, peer: Peer, page: bytes) -> HostFlags:
        """Open the flag page of a connected peer; the peer's own page."""
        self._home.check()
        self._peers.known(peer, self.name)
        there, number = _find(peer), unpack(page, _NUMBER)
        if there is None:
            raise _closed(peer)
        if (buffer := there._flag_pages.get(number)) is None:
            raise RemoteProtocolError(f"inproc peer {peer.hex()} has no flag page {number}")
        return HostFlags(buffer)

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call."""
        if not self._home.here:
            return ()
        events, self._events = self._events, []
        if self._seen == _departed:
            return events
        self._seen = _departed
        for peer in self._peers.all:
            if peer not in self._lost and _find(peer) is None:
                self._lost.add(peer)
                events.append(PeerLost(peer, fenced=True))
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets, and return those that are not quiet.

        Waits for a copy into this transport that another thread makes.
        """
        self._home.check()
        with self._target, _registry:
            _open.pop(self._me, None)
            self._table.clear()
        _depart()
        self._peers.clear()
        return ()

    def _receive(self, writes: Writes, source: I64) -> Exception | None:
        """Called by the writing peer, in its thread. What is registered now counts: nothing, once closed."""
        with self._target:
            try:
                target = self._table.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
            except RegistrationError as error:
                return error
            copy(target, source, writes.nbytes)
            return None


def _depart() -> None:
    global _departed
    _departed = next(_departures)


def _find(peer: Peer) -> InprocTransport | None:
    with _registry:
        return _open.get(peer)


def _closed(peer: Peer) -> PeerLostError:
    return PeerLostError(f"inproc peer {peer.hex()} is closed")
