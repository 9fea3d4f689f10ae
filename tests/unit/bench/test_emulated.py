"""What an emulated wire tells, and when."""

from __future__ import annotations

import attrs
import pytest

from bench.emulated import EmulatedWire, emulate
from disagg_kv.endpoints.handle import HostEvent
from disagg_kv.errors import ConfigurationError
from disagg_kv.ids import Peer, Ticket
from disagg_kv.memory import Event
from disagg_kv.planning import Writes
from disagg_kv.testing import FakeClock, Fault, FaultyTransport
from disagg_kv.testing.ends import End, HostMemory
from disagg_kv.testing.pair import Pair, batch
from disagg_kv.transports import InprocTransport, SupportsAllocate, Transport, WriteEnded
from tests.support.transports import emulated_shm

N = 1000


def _pair(clock: FakeClock, inner: Transport) -> tuple[Pair, EmulatedWire]:
    wire = emulate(inner, 1000.0, 0.5, clock)
    return Pair(End(lambda: wire, HostMemory()), End(InprocTransport, HostMemory()), N, 5.0), wire


def _ended(pair: Pair) -> list[Ticket]:
    return [event.ticket for event in pair.source.events() if isinstance(event, WriteEnded)]


def test_a_batch_ends_when_the_wire_would_have_brought_it() -> None:
    """Its bytes over the speed, plus the latency, and not a moment earlier."""
    clock = FakeClock()
    pair, wire = _pair(clock, InprocTransport())
    ticket = pair.submit((0, 0, 200), (200, 200, 300))
    clock.advance(0.999)
    assert _ended(pair) == []
    clock.advance(0.002)
    assert _ended(pair) == [ticket]
    assert wire.busy_s == pytest.approx(0.5)


def test_batches_share_the_wire_in_order_and_latency_does_not_take_it() -> None:
    """The second ends one transmission after the first; after a pause the wire is free at once."""
    clock = FakeClock()
    pair, _ = _pair(clock, InprocTransport())
    first, second = pair.submit((0, 0, 500)), pair.submit((500, 500, 500))
    clock.advance(1.001)
    assert _ended(pair) == [first]
    clock.advance(0.5)
    assert _ended(pair) == [second]
    clock.advance(100.0)
    third = pair.submit((0, 0, 100))
    clock.advance(0.601)
    assert _ended(pair) == [third]


class Eager(InprocTransport):
    """Takes events, and does not wait for them: whatever waits is the wire around it."""

    caps = attrs.evolve(InprocTransport.caps, waits_events=True)

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Write at once."""
        return super().submit(peer, writes)


class Broken:
    """An event that raises."""

    def query(self) -> bool:
        """Raise."""
        raise RuntimeError("no such stream")

    def synchronize(self) -> None:
        """Raise."""
        raise RuntimeError("no such stream")


def test_a_batch_takes_the_wire_when_its_event_has_happened_and_nothing_overtakes_it() -> None:
    """A wire cannot bring what is not computed yet, however early it was asked to."""
    clock, computed = FakeClock(), HostEvent(lambda over: None)
    pair, wire = _pair(clock, Eager())
    first = wire.submit(pair.peer, batch(pair.local, pair.remote, [(0, 0, 500)]), after=computed)
    second = pair.submit((500, 500, 500))
    clock.advance(10.0)
    assert _ended(pair) == []
    assert wire.busy_s == 0.0
    computed.set()
    assert _ended(pair) == []
    clock.advance(1.001)
    assert _ended(pair) == [first]
    clock.advance(0.5)
    assert _ended(pair) == [second]


def test_an_event_that_raises_holds_up_nothing() -> None:
    """Its batch ends as the inner transport says."""
    clock = FakeClock()
    pair, wire = _pair(clock, Eager())
    ticket = wire.submit(pair.peer, batch(pair.local, pair.remote, [(0, 0, 500)]), after=Broken())
    clock.advance(1.001)
    assert _ended(pair) == [ticket]


def test_what_still_waits_for_its_turn_is_told_after_close() -> None:
    """The wire that held it back is gone."""
    pair, wire = _pair(FakeClock(), Eager())
    ticket = wire.submit(pair.peer, batch(pair.local, pair.remote, [(0, 0, 500)]), after=HostEvent(lambda over: None))
    assert _ended(pair) == []
    wire.close(0.0)
    assert [event.ticket for event in wire.poll() if isinstance(event, WriteEnded)] == [ticket]
    assert wire.poll() == []


def test_an_error_is_told_at_once_and_is_the_inner_transports() -> None:
    """Whoever waits for a wire must not wait for a failure."""
    pair, _ = _pair(FakeClock(), FaultyTransport(InprocTransport(), {0: Fault.REFUSED}.get))
    pair.submit((0, 0, N))
    (event,) = pair.source.events()
    assert isinstance(event, WriteEnded)
    assert "injected" in str(event.error)


def test_only_a_wire_around_an_allocating_transport_allocates() -> None:
    """Pools ask before they take memory from it."""
    assert not isinstance(emulate(InprocTransport(), 1e9), SupportsAllocate)
    around = emulated_shm()
    assert isinstance(around, SupportsAllocate)
    assert around.allocated(around.allocate(4096))
    around.close(0.0)


def test_numbers_that_make_no_wire_are_refused() -> None:
    """Before anything is written."""
    for speed, latency in ((0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0)):
        with pytest.raises(ConfigurationError, match="emulated wire"):
            emulate(InprocTransport(), speed, latency)
