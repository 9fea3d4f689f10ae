"""A wire of a chosen speed: for benchmarks that need a ratio of wire to compute which this host does not have."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from disagg_kv.errors import ConfigurationError
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.transports.base import PeerLost, Settled, SupportsAllocate, Transport, WriteEnded
from disagg_kv.transports.process import Home


class EmulatedWire:
    """Reports the end of each batch of another transport no earlier than a wire of the given speed would end it.

    :func:`emulate` makes it. All peers share the wire, as they share a network card. Batches take it one after another,
    in the order of their submission, each not before the event that it waits for has happened. Latency delays each end
    without taking the wire. The bytes themselves cross at the speed of the inner transport, so it must be faster than
    the emulated wire. Errors are reported at once.

    Args:
        inner: does the work; belongs to this object from now on.
        bytes_per_s: of the wire.
        latency_s: between a batch's last byte on the wire and its end.
        clock: seconds, monotonic.

    Raises:
        ConfigurationError: a speed that is not positive, a negative latency.
    """

    def __init__(self, inner: Transport, bytes_per_s: float, latency_s: float, clock: Callable[[], float]) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ConfigurationError(f"an emulated wire of {bytes_per_s} bytes/s with {latency_s} s of latency")
        self._inner = inner
        self._home = Home(f"this emulated wire around {inner.name!r}")
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._free_at = clock()
        self._queue: OrderedDict[Ticket, tuple[Event | None, float]] = OrderedDict()
        self._landed: set[Ticket] = set()
        self._due: dict[Ticket, float] = {}
        self._closed = False
        self.busy_s = 0.0
        self.name = inner.name
        self.caps = attrs.evolve(inner.caps, bytes_per_s=bytes_per_s)

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """See :meth:`Transport.register`."""
        return self._inner.register(buffers)

    def peer_of(self, descriptor: bytes) -> Peer:
        """See :meth:`Transport.peer_of`."""
        return self._inner.peer_of(descriptor)

    def local_descriptor(self) -> bytes:
        """See :meth:`Transport.local_descriptor`."""
        return self._inner.local_descriptor()

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """See :meth:`Transport.connect`."""
        return self._inner.connect(descriptor, timeout_s)

    def disconnect(self, peer: Peer) -> None:
        """See :meth:`Transport.disconnect`."""
        self._inner.disconnect(peer)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """See :meth:`Transport.submit`; the batch takes its turn on the wire."""
        ticket = self._inner.submit(peer, writes, after=after)
        self._queue[ticket] = after, writes.total() / self._bytes_per_s
        self._transmit()
        return ticket

    def _transmit(self) -> None:
        """Let those take the wire whose turn it is; nothing overtakes one that still waits for its event."""
        while self._queue:
            ticket, (after, takes) = next(iter(self._queue.items()))
            if not _happened(after):
                return
            del self._queue[ticket]
            self._free_at = max(self._free_at, self._clock()) + takes
            self.busy_s += takes
            self._due[ticket] = self._free_at + self._latency_s

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """See :meth:`Transport.poll`."""
        if not self._home.here:
            return ()
        events: list[WriteEnded | Settled | PeerLost] = []
        for event in self._inner.poll():
            if isinstance(event, WriteEnded) and event.error is None:
                self._landed.add(event.ticket)
                continue
            if isinstance(event, WriteEnded):
                self._queue.pop(event.ticket, None)
                self._due.pop(event.ticket, None)
            events.append(event)
        self._transmit()
        now = self._clock()
        due = {ticket: now if self._closed else self._due.get(ticket, math.inf) for ticket in self._landed}
        for ticket in sorted((t for t in due if due[t] <= now), key=lambda t: (due[t], t)):
            self._landed.discard(ticket)
            self._queue.pop(ticket, None)
            self._due.pop(ticket, None)
            events.append(WriteEnded(ticket))
        return events

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """See :meth:`Transport.close`; the next ``poll`` reports tickets that only the emulated wire held back."""
        self._closed = True
        return self._inner.close(drain_s)


def _happened(event: Event | None) -> bool:
    """Whether the event has happened, or there is none; True if its query raises: the inner transport reports that."""
    try:
        return event is None or event.query()
    except Exception:
        return True


class _AllocatingWire(EmulatedWire):
    """Around a transport that gives memory of its own."""

    def __init__(
        self,
        inner: Transport,
        allocator: SupportsAllocate,
        bytes_per_s: float,
        latency_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(inner, bytes_per_s, latency_s, clock)
        self._allocator = allocator

    def allocate(self, nbytes: int) -> Buffer:
        """See :meth:`SupportsAllocate.allocate`."""
        return self._allocator.allocate(nbytes)

    def allocated(self, buffer: Buffer) -> bool:
        """See :meth:`SupportsAllocate.allocated`."""
        return self._allocator.allocated(buffer)


def emulate(
    inner: Transport, bytes_per_s: float, latency_s: float = 0.0, clock: Callable[[], float] = time.monotonic
) -> EmulatedWire:
    """``inner`` behind a wire of a chosen speed; see :class:`EmulatedWire`."""
    if isinstance(inner, SupportsAllocate):
        return _AllocatingWire(inner, inner, bytes_per_s, latency_s, clock)
    return EmulatedWire(inner, bytes_per_s, latency_s, clock)
