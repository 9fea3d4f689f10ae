"""Transports that a child process can import by name."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from bench.emulated import EmulatedWire, emulate
from disagg_kv.errors import TransportError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.memory import Event
from disagg_kv.planning import Writes
from disagg_kv.testing import Fault, FaultyTransport, faultless
from disagg_kv.transports import (
    InprocTransport,
    PeerLost,
    Settled,
    ShmTransport,
    WriteEnded,
)


def faultless_inproc() -> FaultyTransport:
    """No fault is planned."""
    return FaultyTransport(InprocTransport(), mappings=faultless)


def faultless_shm() -> FaultyTransport:
    """No fault is planned."""
    return FaultyTransport(ShmTransport(), mappings=faultless)


def emulated_shm() -> EmulatedWire:
    """A wire of a gigabyte a second, 50 us long."""
    return emulate(ShmTransport(), 1e9, 5e-5)


class SlowTransport(FaultyTransport):
    """Moves one batch per poll, as hardware that takes its time; takes short batches and waits for events."""

    def __init__(self) -> None:
        super().__init__(InprocTransport(), lambda number: Fault.DELAYED, faultless)
        self.caps = attrs.evolve(self.caps, late_writes=False, waits_events=True, max_batch=1000)
        self._after: dict[Ticket, Event] = {}

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Only keeps the batch."""
        if len(writes) > 1000:
            raise TransportError(f"{len(writes)} descriptors, but at most 1000 in one batch")
        ticket = super().submit(peer, writes)
        if after is not None:
            self._after[ticket] = after
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Moves the oldest batch whose event has happened."""
        if not self._home.here:
            return ()
        for ticket in self.held:
            try:
                due = ticket not in self._after or self._after[ticket].query()
            except Exception as error:
                failed = TransportError(f"its event: {error}")
                failed.__cause__ = error
                self._drop(ticket, failed)
                continue
            if due:
                self._after.pop(ticket, None)
                self.release(ticket)
                break
        return super().poll()

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Moves what it can."""
        for ticket in self.held:
            if ticket in self._after:
                self._drop(ticket, TransportError("closed before its event"))
            elif drain_s > 0:
                self.release(ticket)
        return super().close(drain_s)

    def _drop(self, ticket: Ticket, error: TransportError) -> None:
        del self._held[ticket], self._after[ticket]
        self._events.append(WriteEnded(ticket, error))
