"""Mistakes in a transport, one a class: claims of ``caps`` that are false, calls that block, and forked children."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import attrs

from disagg_kv.errors import TransportError
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.transports import PeerLost, Settled, WriteEnded
from tests.support.model_transport import Flight, ModelTransport, Place, stopped
from tests.support.transport_mutants import SOON_S, ClosesEarly

# Claims


class PollsByTheTarget(ModelTransport):
    """Its bytes land only when the target polls; ``needs_target_polling`` is not claimed."""

    everyone: ClassVar[WeakValueDictionary[Peer, PollsByTheTarget]] = WeakValueDictionary()

    def __init__(self) -> None:
        super().__init__()
        self.everyone[self._me] = self
        self._inbox: dict[Flight, ModelTransport] = {}

    def move(self, flight: Flight) -> None:
        self.everyone[flight.peer]._inbox[flight] = self

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        for flight, sender in self._inbox.items():
            ModelTransport.move(sender, flight)
        self._inbox.clear()
        return super().poll()


class BlocksForTheTarget(PollsByTheTarget):
    """It claims ``needs_target_polling``, and ``submit`` waits until the target has polled."""

    caps = attrs.evolve(ModelTransport.caps, needs_target_polling=True)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        ticket = super().submit(peer, writes, after=after)
        self.progress(self._flights[-1])
        while self._flights:
            time.sleep(0.001)
        return ticket


class IgnoresEvents(ModelTransport):
    """It claims ``waits_events`` and waits for none."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, writes)


class BlocksForEvents(ModelTransport):
    """It claims ``waits_events`` and waits in ``submit``."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        while after is not None and not after.query():
            time.sleep(0.001)
        return super().submit(peer, writes, after=after)


class PollBlocksForEvents(ModelTransport):
    """It claims ``waits_events`` and waits in ``poll``."""

    def progress(self, flight: Flight) -> None:
        while flight.after is not None and not flight.after.query():
            time.sleep(0.001)
        super().progress(flight)


class UnclaimedEvents(ModelTransport):
    """It does not claim ``waits_events``, and takes an event without waiting."""

    caps = attrs.evolve(ModelTransport.caps, waits_events=False)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, writes)


class NotOnlyOwnMemory(ModelTransport):
    """It does not claim ``own_memory_only``, and peers reach no other memory."""

    caps = attrs.evolve(ModelTransport.caps, own_memory_only=False)


class NoMemoryOfItsOwn(ModelTransport):
    """It claims ``own_memory_only``, and gives none."""

    allocate = None  # type: ignore[assignment]


class OwnAndOtherMemory(ModelTransport):
    """It claims ``own_memory_only``, and takes a write to other memory, which goes nowhere."""

    def place(self, buffer: Buffer) -> Place | None:
        found = super().place(buffer)
        if found is None:
            self._spare = super().allocate(buffer.nbytes)
            found = super().place(self._spare)
        return found

    def allocated(self, buffer: Buffer) -> bool:
        return super().place(buffer) is not None


class SmallerBatches(ModelTransport):
    """It claims a larger ``max_batch`` than it takes."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        if len(writes) > 900:
            raise TransportError(f"{len(writes)} descriptors do not fit into the queue")
        return super().submit(peer, writes, after=after)


class UnlimitedBatches(SmallerBatches):
    """It claims no ``max_batch``, and has one."""

    caps = attrs.evolve(ModelTransport.caps, max_batch=None)


class LargerBatches(ModelTransport):
    """It claims a ``max_batch``, and cuts what is longer."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        some = Writes(*(getattr(writes, field.name)[:1000] for field in attrs.fields(Writes)))
        return super().submit(peer, some, after=after)


class CrossesProcesses(ModelTransport):
    """It claims ``in_process_only``, and reaches other processes."""

    caps = attrs.evolve(ModelTransport.caps, in_process_only=True)


class OneProcess(ModelTransport):
    """It does not claim ``in_process_only``, and reaches its own process only."""

    everyone: ClassVar[WeakValueDictionary[Peer, OneProcess]] = WeakValueDictionary()

    def __init__(self) -> None:
        super().__init__()
        self.everyone[self._me] = self

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        peer = super().connect(descriptor, timeout_s)
        if peer not in self.everyone:
            raise TransportError(f"no peer {peer.hex()} in this process")
        return peer


class HelperLands(ModelTransport):
    """A child process copies for it a while later, also when this one was killed. It claims ``drain_s`` of 0."""

    def __init__(self) -> None:
        super().__init__()
        self._helpers: list[int] = []

    def move(self, flight: Flight) -> None:
        if flight.nbytes.sum() > 1:
            at = int(flight.target[0])
            memory = next(m for m in flight.remote.memory.values() if m.addr <= at < m.addr + m.nbytes)
            data = ctypes.string_at(int(flight.source[0]), int(flight.nbytes[0]))
            while self._helpers and os.waitpid(self._helpers[0], os.WNOHANG)[0]:
                self._helpers.pop(0)
            if (pid := os.fork()) == 0:
                time.sleep(4 * SOON_S)
                os.pwrite(memory.fd, data, at - memory.addr)
                os._exit(0)
            self._helpers.append(pid)
        super().move(flight)


class LateFence(HelperLands):
    """The same with a ``drain_s`` that is not known; its loss of a peer is fenced all the same."""

    caps = attrs.evolve(ModelTransport.caps, drain_s=None)


class FenceAfterTickets(LateFence):
    """The same; tickets of the peer fail a moment before its loss is reported."""

    _since: float | None = None

    def lose(self, peer: Peer) -> None:
        self._since = time.monotonic()
        self._gone = peer

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        events = list(super().poll())
        if self._since is not None and time.monotonic() > self._since + SOON_S:
            self._since = None
            events.append(PeerLost(self._gone, fenced=True))
        return events


class FenceOfALivingPeer(ClosesEarly):
    """A peer in this process that has closed is fenced, while its thread still copies."""

    caps = attrs.evolve(ModelTransport.caps, in_process_only=True)
    everyone: ClassVar[WeakValueDictionary[Peer, FenceOfALivingPeer]] = WeakValueDictionary()

    def __init__(self) -> None:
        super().__init__()
        self.everyone[self._me] = self

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        for peer in set(self._peers.all) - self._lost:
            if self.everyone[peer]._closed:
                self._lost.add(peer)
                self.lose(peer)
        return super().poll()


class FenceBeforeItsInbox(ModelTransport):
    """Data are messages, of which a poll takes one; a peer that ends is fenced while messages of it still wait."""

    def __init__(self) -> None:
        super().__init__()
        self._heads: dict[Ticket, bytes] = {}
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._inbox.bind(_address(self._me))
        weakref.finalize(self, self._inbox.close)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        ticket = super().submit(peer, writes, after=after)
        self._heads[ticket] = struct.pack("<qq", int(writes.remote[0]), int(writes.remote_off[0]))
        return ticket

    def move(self, flight: Flight) -> None:
        data = ctypes.string_at(int(flight.source[0]), int(flight.nbytes[0]))
        try:
            self._inbox.sendto(self._heads[flight.ticket] + data, _address(flight.peer))
        except BlockingIOError:
            return
        self.end(flight, None)

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        self.receive()
        return super().poll()

    def receive(self) -> None:
        try:
            data = self._inbox.recv(1 << 17)
        except BlockingIOError:
            return
        region, offset = struct.unpack_from("<qq", data)
        buffer = self._table.get(RegionId(region))
        if buffer is not None:
            ctypes.memmove(buffer.addr + offset, data[16:], len(data) - 16)


class UnsaidUnquiet(ModelTransport):
    """Its errors leave bytes on their way, without ``late_writes``."""

    def end(self, flight: Flight, error: Exception | None) -> None:
        self._flights.remove(flight)
        self._events.append(WriteEnded(flight.ticket, error, quiesced=error is None))


# Threads and processes


class BlocksForPeer(ModelTransport):
    """``submit`` waits for an answer of the peer's process, which a frozen one does not give."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        remote = self._peers.get(peer)
        while remote is not None and stopped(remote):
            time.sleep(0.001)
        return super().submit(peer, writes, after=after)


class ConnectBlocks(ModelTransport):
    """``connect`` waits for a frozen peer, and for no time-out."""

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        peer = super().connect(descriptor, timeout_s)
        remote = self._peers.get(peer)
        while remote is not None and stopped(remote):
            time.sleep(0.001)
        return peer


class Forks(ModelTransport):
    """It works in a forked child, with the sockets and the tickets of its parent."""

    def __init__(self) -> None:
        super().__init__()
        self._home = _Anywhere()  # type: ignore[assignment]


class PollsInChildren(ModelTransport):
    """It refuses calls in a forked child, but returns the parent's events there."""

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        home, self._home = self._home, _Anywhere()  # type: ignore[assignment]
        try:
            return super().poll()
        finally:
            self._home = home


def _address(peer: Peer) -> bytes:
    """Of the abstract socket on which a peer receives messages; it ends with its process."""
    return b"\0disagg_kv-model-" + peer.hex().encode()


class _Anywhere:
    here = True

    def check(self) -> None:
        """Nothing is wrong."""
