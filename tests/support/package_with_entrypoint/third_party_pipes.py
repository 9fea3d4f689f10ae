"""Somebody else's transport: batches go over a Unix-domain stream socket, and a thread of the target writes them.

It knows nothing of the library but its public names, and differs from the built-in transports wherever it may: it
limits batches, keeps no memory in use, and knows no bound for writes of a process that has ended.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue

import msgspec
import numpy as np

from disagg_kv.errors import PeerLostError, RegistrationError, TransportError
from disagg_kv.geometry import I64
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.transports import (
    Capabilities,
    Connected,
    Descriptor,
    Extents,
    Home,
    PeerLost,
    Region,
    RegionTable,
    Settled,
    WriteEnded,
    copy,
    decode,
    encode,
)

SIZE = 8
"""Bytes of the number that says how long the message after it is; an answer is one number, the error's length."""


def _address(peer: Peer) -> str:
    """An abstract socket: gone with its process, and no file."""
    return f"\0third-party-{peer.hex()}"


def _send(stream: socket.socket, message: bytes) -> None:
    stream.sendall(len(message).to_bytes(SIZE, "little") + message)


def _receive(stream: socket.socket) -> bytes:
    """One message; EOFError: there is none any more."""
    return _exactly(stream, int.from_bytes(_exactly(stream, SIZE), "little"))


def _exactly(stream: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        part = stream.recv(min(nbytes - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


class _Link:
    """The way to one peer: a socket, and a thread that sends one batch after the other and awaits each answer."""

    def __init__(self, peer: Peer, events: SimpleQueue[WriteEnded | Settled | PeerLost], timeout_s: float) -> None:
        self.peer = peer
        self.serial = -1
        self.extents = Extents((), "remote")
        self.unended: set[Ticket] = set()
        self._events = events
        self._batches: SimpleQueue[tuple[Ticket, bytes, bytes] | None] = SimpleQueue()
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream.settimeout(timeout_s)
        try:
            self._stream.connect(_address(peer))
        except ConnectionRefusedError as error:
            self._stream.close()
            raise PeerLostError(f"third-party: peer {peer.hex()} is gone") from error
        except OSError as error:
            self._stream.close()
            raise TransportError(f"third-party: peer {peer.hex()} cannot be reached: {error}") from error
        self._stream.settimeout(None)
        self._hangup = select.poll()
        self._hangup.register(self._stream, 0)
        self._cut = False
        self._thread = threading.Thread(target=self._run, name="third-party link", daemon=True)
        self._thread.start()

    def put(self, ticket: Ticket, where: bytes, data: bytes) -> None:
        """Queue a batch."""
        self.unended.add(ticket)
        self._batches.put((ticket, where, data))

    def lost(self) -> bool:
        """Whether the peer has hung up; unasked."""
        return bool(self._hangup.poll(0))

    def leave(self) -> None:
        """Nothing comes after the batches that are queued."""
        self._batches.put(None)

    def close(self, drain_s: float) -> None:
        """Let the batches end, for so long."""
        self.leave()
        self._thread.join(drain_s)
        self._cut = True
        with suppress(OSError):  # the peer may have hung up before
            self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._stream.close()

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            ticket, where, data = batch
            error: Exception | None = None
            try:
                _send(self._stream, where)
                _send(self._stream, data)
                refusal = _receive(self._stream)
                error = TransportError(f"third-party: {refusal.decode()}") if refusal else None
            except (OSError, EOFError):
                if self._cut:
                    return  # the batch is under way, for all we know
                # The peer hangs up only after its last write: by hand, or because its process has ended.
                error = PeerLostError(f"third-party: peer {self.peer.hex()} has hung up")
            self._events.put(WriteEnded(ticket, error))


class PipesTransport:
    """See the module."""

    name = "third-party"
    caps = Capabilities(detects_peer_death=True, max_batch=500, bytes_per_s=1e9)

    def __init__(self) -> None:
        self._home = Home("this transport 'third-party'")
        self._me = Peer(os.urandom(16))
        self._table = RegionTable(self.caps.devices)
        self._links: Connected[_Link] = Connected()
        self._left: list[_Link] = []
        self._lost: set[Peer] = set()
        self._tickets = count(1)
        self._events: SimpleQueue[WriteEnded | Settled | PeerLost] = SimpleQueue()
        # Held while memory of this side is written to, or taken away.
        self._target = threading.Lock()
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self._me))
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="third-party accept", daemon=True)
        self._thread.start()

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        self._home.check()
        with self._target:
            return self._table.add(buffers)

    def peer_of(self, descriptor: bytes) -> Peer:
        return decode(descriptor, self.name).incarnation

    def local_descriptor(self) -> bytes:
        regions = tuple(Region(i, b.nbytes, b.device) for i, b in self._table.items())
        return encode(Descriptor(self.name, self._me, self._table.serial, regions))

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        self._home.check()
        remote = decode(descriptor, self.name)
        peer = remote.incarnation
        link = self._links.get(peer)
        if link is None:
            made = _Link(peer, self._events, timeout_s)
            link = self._links.add(peer, made)
            if link is not made:
                made.close(0.0)
        if link.serial < remote.serial:
            link.serial = remote.serial
            link.extents = Extents(((r.id, 0, r.nbytes) for r in remote.regions), "remote")
        return peer

    def disconnect(self, peer: Peer) -> None:
        link = self._links.remove(peer)
        if link is not None:
            link.leave()
            self._left.append(link)
            self._lost.discard(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        self._home.check()
        link = self._links.get(peer)
        if link is None or after is not None:
            raise TransportError("third-party: unknown peer, or an event, which it does not support")
        if len(writes.nbytes) > (self.caps.max_batch or 0):
            raise TransportError(f"third-party: {len(writes.nbytes)} writes, but at most {self.caps.max_batch} a batch")
        source = self._table.extents.addresses(writes.local, writes.local_off, writes.nbytes)
        link.extents.addresses(writes.remote, writes.remote_off, writes.nbytes)
        # Copied at once, so that nothing of this side is read once this returns.
        data = np.empty(int(writes.nbytes.sum()), np.uint8)
        copy(data.ctypes.data + _starts(writes.nbytes), source, writes.nbytes)
        where = msgspec.msgpack.encode([a.tolist() for a in (writes.remote, writes.remote_off, writes.nbytes)])
        ticket = Ticket(next(self._tickets))
        link.put(ticket, where, data.tobytes())
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        if not self._home.here:
            return ()
        events = [self._events.get() for _ in range(self._events.qsize())]
        for link in (*self._links.all.values(), *self._left):
            link.unended -= {event.ticket for event in events if isinstance(event, WriteEnded)}
        for link in [link for link in self._left if not link.unended]:
            link.close(0.0)
            self._left.remove(link)
        for peer, link in self._links.all.items():
            if peer not in self._lost and link.lost():
                self._lost.add(peer)
                events.append(PeerLost(peer))
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        self._home.check()
        if not self._thread.is_alive():
            return ()
        links = (*self._links.all.values(), *self._left)
        for link in links:
            link.close(drain_s)
        self._listener.shutdown(socket.SHUT_RD)
        # Who has knocked before is let in all the same, and only then are these all streams.
        self._thread.join()
        self._listener.close()
        for stream in tuple(self._streams):
            with suppress(OSError):  # its peer may have hung up, and its thread closed it
                stream.shutdown(socket.SHUT_RD)
        for thread in tuple(self._streams.values()):
            thread.join()
        events = self.poll()
        for event in events:
            self._events.put(event)
        self._links.clear()
        self._left.clear()
        self._table.clear()
        return tuple(ticket for link in links for ticket in link.unended)

    # The target's threads.

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return  # shut down
            thread = threading.Thread(target=self._serve, args=(stream,), name="third-party peer", daemon=True)
            self._streams[stream] = thread
            thread.start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, suppress(OSError, EOFError):
            while True:
                where, data = _receive(stream), _receive(stream)
                _send(stream, self._write(where, data))
        self._streams.pop(stream)

    def _write(self, where: bytes, data: bytes) -> bytes:
        """Write a batch; the reason if it cannot be. Regions of now count, not those that the peer knows."""
        regions, offsets, sizes = (np.array(column, np.int64) for column in msgspec.msgpack.decode(where))
        with self._target:
            try:
                target = self._table.extents.addresses(regions.astype(np.int32), offsets, sizes)
            except RegistrationError as error:
                return str(error).encode()
            copy(target, np.frombuffer(data, np.uint8).ctypes.data + _starts(sizes), sizes)
        return b""


def _starts(sizes: I64) -> I64:
    """Where each piece begins in one run of all of them."""
    starts: I64 = np.cumsum(sizes) - sizes
    return starts
