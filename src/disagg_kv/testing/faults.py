"""A transport that fails on purpose, as real ones do, and the same way each time."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count

import attrs
import numpy as np
from attrs import define

from ..errors import PeerLostError, RegistrationError, TransportError
from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes
from ..transports import Home, PeerLost, Settled, SupportsAllocate, SupportsMapping, Transport, WriteEnded


class Fault(Enum):
    """What becomes of one submitted batch; ``release`` is :meth:`FaultyTransport.release`."""

    REFUSED = "an error, quiet at once; nothing lands"
    PARTIAL = "the first half of the bytes lands, then an error, quiet at once"
    UNACKNOWLEDGED = "everything lands, but an error is reported, not quiet; release settles it"
    LATE = "an error, not quiet, while nothing has landed; on release everything lands, then it is settled"
    DELAYED = "nothing lands and nothing is reported; on release it completes as if nothing had been"
    HUNG = "the first half of the bytes lands and nothing is ever reported; close returns the ticket"
    PEER_LOST = "an error, quiet at once; the peer is lost and every later batch to it fails"


class MappingFault(Enum):
    """What becomes of one call of :meth:`FaultyTransport.map`."""

    REFUSED = "the system refuses the mapping; the next call may succeed"
    PEER_LOST = "the owner of the memory ends meanwhile: the peer is lost, and every later batch and mapping fails"


MappingPlan = Callable[[int], MappingFault | None]
"""What becomes of the n-th call of ``map``, counted from 0; ``{1: MappingFault.REFUSED}.get`` fails half way."""


def faultless(number: int) -> None:
    """A plan by which nothing fails."""


Plan = Callable[[int], Fault | None]
"""What becomes of the n-th submitted batch, counted from 0; ``{3: Fault.HUNG}.get`` is one."""


class _Pages(mmap.mmap):
    """Memory given by :meth:`FaultyTransport.allocate` itself."""


@define
class _Held:
    """A batch that is not quiet before :meth:`FaultyTransport.release` calls ``resume``; None: it never is."""

    peer: Peer
    resume: Callable[[], None] | None


@define
class _Flying:
    """A batch that the inner transport has, and how its end is reported."""

    ticket: Ticket
    tell: Callable[[WriteEnded], Sequence[WriteEnded | Settled]]


class FaultyTransport:
    """Wraps a transport and makes chosen batches fail. Everything else, and the data itself, is the inner one's.

    Args:
        inner: does the work; belongs to this object from now on.
        plan: which batch fails how; by default none does.
        mappings: which call of ``map`` fails how; :func:`faultless` lets all pass. None: nothing is mapped, and
            :meth:`unmappable` says so, as it does where the inner transport maps nothing.
    """

    def __init__(
        self,
        inner: Transport,
        plan: Plan = faultless,
        mappings: MappingPlan | None = None,
    ) -> None:
        self._inner = inner
        self._home = Home(f"this transport {inner.name!r}")
        self._plan = plan
        self._mappings = mappings
        self._mapped = 0
        self._losing = threading.Lock()
        self._tickets = count(1)
        self._number = 0
        self._flying: dict[Ticket, _Flying] = {}
        self._held: dict[Ticket, _Held] = {}
        self._lost: set[Peer] = set()
        self._leaving: set[Peer] = set()
        self._events: list[WriteEnded | Settled | PeerLost] = []
        self.name = inner.name
        self.caps = attrs.evolve(inner.caps, late_writes=True, drain_s=None)

    @property
    def held(self) -> tuple[Ticket, ...]:
        """Tickets that are not quiet before they are released, oldest first; a hung one never is."""
        return tuple(self._held)

    def release(self, *tickets: Ticket) -> None:
        """Let these held tickets, by default all, go on; their events come with the next polls. Hung ones stay."""
        for ticket in tickets or self.held:
            resume = self._held[ticket].resume
            if resume is not None:
                del self._held[ticket]
                resume()
        self._let_go()

    def allocate(self, nbytes: int) -> Buffer:
        """Return ``nbytes`` of zeroed memory that peers can write to; plain memory if the inner transport takes any."""
        if isinstance(self._inner, SupportsAllocate):
            return self._inner.allocate(nbytes)
        pages = _Pages(-1, nbytes)
        return Buffer(np.frombuffer(pages, np.uint8).ctypes.data, nbytes, "cpu", pages)

    def allocated(self, buffer: Buffer) -> bool:
        """Return True if the whole buffer is memory of :meth:`allocate`."""
        if isinstance(self._inner, SupportsAllocate):
            return self._inner.allocated(buffer)
        return isinstance(buffer.owner, _Pages)

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers, as sources of writes and as targets of peers'."""
        return self._inner.register(buffers)

    def peer_of(self, descriptor: bytes) -> Peer:
        """Return the peer that a descriptor names, without connecting it."""
        return self._inner.peer_of(descriptor)

    def local_descriptor(self) -> bytes:
        """Return what a peer passes to ``connect``: incarnation and regions."""
        return self._inner.local_descriptor()

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor, or add its new regions."""
        peer = self._inner.connect(descriptor, timeout_s)
        self._leaving.discard(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer; what is held for the peer still lands when it is released."""
        self._leaving.add(peer)
        self._let_go()

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket; the batch's number decides what becomes of it."""
        if peer in self._leaving:
            raise TransportError(f"no peer {peer.hex()}")
        fault = Fault.PEER_LOST if peer in self._lost else self._plan(self._number)
        ticket = Ticket(next(self._tickets))

        def post(some: Writes, tell: Callable[[WriteEnded], Sequence[WriteEnded | Settled]]) -> None:
            self._flying[self._inner.submit(peer, some, after=after)] = _Flying(ticket, tell)

        if fault is None:
            post(writes, lambda end: (attrs.evolve(end, ticket=ticket),))
        else:
            self._check(peer, writes, after)
            self._fail(fault, ticket, peer, writes, post)
        self._number += 1
        return ticket

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """Why kernels of ``device`` cannot write to these regions of a peer; None: no reason is known."""
        if not isinstance(self._inner, SupportsMapping) or self._mappings is None:
            return f"transport {self.name!r} does not map memory of peers"
        if peer in self._lost or peer in self._leaving:
            return f"{self.name}: no open peer {peer.hex()}"
        return self._inner.unmappable(peer, regions, device)

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """Return a region of a peer as memory for kernels of ``device``; the call's number decides what becomes of it.

        What was mapped before stays mapped, whatever becomes of its owner.
        """
        if not isinstance(self._inner, SupportsMapping) or self._mappings is None:
            raise RegistrationError(f"transport {self.name!r} does not map memory of peers")
        with self._losing:
            fault, self._mapped = self._mappings(self._mapped), self._mapped + 1
        if fault is MappingFault.PEER_LOST:
            self.lose(peer)
        if peer in self._lost:
            raise PeerLostError(f"injected: peer {peer.hex()} is lost")
        if peer in self._leaving:
            raise TransportError(f"no peer {peer.hex()}")
        if fault is not None:
            raise TransportError(f"injected: {fault.value}")
        return self._inner.map(peer, region, device)

    def lose(self, peer: Peer) -> None:
        """The peer's process ends now: it is lost, and every later batch and mapping fails. On any thread."""
        with self._losing:
            if peer not in self._lost:
                self._lost.add(peer)
                self._events.append(PeerLost(peer))

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call."""
        if not self._home.here:
            return ()
        for event in self._inner.poll():
            if isinstance(event, PeerLost):
                self._events.append(event)
            elif event.ticket in self._flying:
                self._tell(event)
        with self._losing:
            events, self._events = self._events, []
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets, and return those that are not quiet.

        Held tickets are not quiet, so they are returned.
        """
        unquiet = [self._flying[t].ticket for t in self._inner.close(drain_s) if t in self._flying]
        unquiet += self._held
        self._held.clear()
        return tuple(dict.fromkeys(unquiet))

    def _fail(self, fault: Fault, ticket: Ticket, peer: Peer, writes: Writes, post: Callable[..., None]) -> None:
        error = TransportError(f"injected: {fault.value}", retryable=True)
        held = _Held(peer, None)
        match fault:
            case Fault.REFUSED:
                self._events.append(WriteEnded(ticket, error))
            case Fault.PEER_LOST:
                self.lose(peer)
                self._events.append(WriteEnded(ticket, PeerLostError(f"injected: peer {peer.hex()} is lost")))
            case Fault.PARTIAL:
                post(_first_half(writes), lambda end: (WriteEnded(ticket, error, end.quiesced),))
            case Fault.HUNG:
                post(_first_half(writes), lambda end: ())
                self._held[ticket] = held
            case Fault.UNACKNOWLEDGED:
                held.resume = lambda: self._events.append(Settled(ticket))

                def keep(end: WriteEnded) -> Sequence[WriteEnded]:
                    self._held[ticket] = held
                    return (WriteEnded(ticket, error, quiesced=False),)

                post(writes, keep)
            case Fault.LATE:
                self._events.append(WriteEnded(ticket, error, quiesced=False))
                held.resume = lambda: post(writes, lambda end: (Settled(ticket),) if end.quiesced else ())
                self._held[ticket] = held
            case Fault.DELAYED:
                held.resume = lambda: post(writes, lambda end: (attrs.evolve(end, ticket=ticket),))
                self._held[ticket] = held

    def _tell(self, event: WriteEnded | Settled) -> None:
        flying = self._flying[event.ticket]
        if isinstance(event, Settled):
            del self._flying[event.ticket]
            self._events.append(Settled(flying.ticket))
            return
        if event.quiesced:
            del self._flying[event.ticket]
        self._events.extend(flying.tell(event))

    def _let_go(self) -> None:
        """Disconnect the peers that are to go and for which nothing is held any more."""
        for peer in self._leaving - {held.peer for held in self._held.values()}:
            self._inner.disconnect(peer)
            self._leaving.discard(peer)

    def _check(self, peer: Peer, writes: Writes, after: Event | None) -> None:
        """Raise what the inner transport would raise, without writing: it is given both ends of each range, empty."""
        if after is not None and not self.caps.waits_events:
            raise TransportError(f"{self.name} does not wait for events")
        if bool((writes.nbytes < 0).any()):
            raise RegistrationError(f"a write of {int(writes.nbytes.min())} bytes")
        nothing = np.zeros_like(writes.nbytes)
        for skip in (nothing, writes.nbytes):
            ends = attrs.evolve(
                writes, local_off=writes.local_off + skip, remote_off=writes.remote_off + skip, nbytes=nothing
            )
            self._inner.submit(peer, ends)


def _first_half(writes: Writes) -> Writes:
    kept = writes.total() // 2
    beyond = np.cumsum(writes.nbytes) - kept
    return attrs.evolve(writes, nbytes=writes.nbytes - np.clip(beyond, 0, writes.nbytes))
