"""The conformance suite notices broken transports: for each kind of lie a test that must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest

from disagg_kv.errors import DisaggKVError, RemoteProtocolError, TransportError
from disagg_kv.ids import Peer, RegionId, Ticket
from disagg_kv.memory import Buffer, Event
from disagg_kv.planning import Writes
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.testing.ends import Child, End, HostMemory, TransportEvent
from disagg_kv.testing.pair import Log, Pair, _stacks, same
from disagg_kv.testing.transport_cases import NBYTES, TransportCases
from disagg_kv.testing.transport_data import DataCases
from disagg_kv.testing.transport_peers import MemoryCases, PeerCases
from disagg_kv.transports import Capabilities, InprocTransport, PeerLost, Settled, Transport, WriteEnded
from tests.support.transports import faultless_inproc

data, memory, peers = DataCases(), MemoryCases(), PeerCases()


def pair(make: Callable[[], Transport], target: Callable[[], Transport] = InprocTransport) -> Pair:
    """A broken source and a target, with little patience."""
    return Pair(End(make, HostMemory()), End(target, HostMemory()), NBYTES, 0.05)


class Changed(InprocTransport):
    """Does something else with each batch, or with what is told of it."""

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        return super().submit(peer, self.change(writes), after=after)

    def change(self, writes: Writes) -> Writes:
        return writes

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        return [told for event in super().poll() for told in self.tell(event)]

    def tell(self, event: WriteEnded | Settled | PeerLost) -> Sequence[WriteEnded | Settled | PeerLost]:
        return [event]


class OneByteTooMany(Changed):
    def change(self, writes: Writes) -> Writes:
        room = (writes.local_off + writes.nbytes < NBYTES) & (writes.remote_off + writes.nbytes < NBYTES)
        return attrs.evolve(writes, nbytes=writes.nbytes + room)


class LastOneLost(Changed):
    def change(self, writes: Writes) -> Writes:
        return Writes(*(getattr(writes, f.name)[:-1] for f in attrs.fields(Writes)))


class ToldTwice(Changed):
    def tell(self, event: WriteEnded | Settled | PeerLost) -> Sequence[WriteEnded | Settled | PeerLost]:
        return [event, event]


class NeverTold(Changed):
    def tell(self, event: WriteEnded | Settled | PeerLost) -> Sequence[WriteEnded | Settled | PeerLost]:
        return []


class UnclaimedLateWrites(Changed):
    def tell(self, event: WriteEnded | Settled | PeerLost) -> Sequence[WriteEnded | Settled | PeerLost]:
        return (
            [WriteEnded(event.ticket, TransportError("late"), quiesced=False)]
            if isinstance(event, WriteEnded)
            else [event]
        )


class Clamps(Changed):
    """Cuts ranges to the region instead of refusing them."""

    def change(self, writes: Writes) -> Writes:
        local, remote = np.clip(writes.local_off, 0, NBYTES), np.clip(writes.remote_off, 0, NBYTES)
        return attrs.evolve(
            writes,
            local_off=local,
            remote_off=remote,
            nbytes=np.clip(writes.nbytes, 0, np.minimum(NBYTES - local, NBYTES - remote)),
        )


class WritesGoodOnesFirst(Changed):
    """Finds out about a bad descriptor only when it comes to it."""

    def change(self, writes: Writes) -> Writes:
        for i in range(len(writes)):
            super(Changed, self).submit(
                next(iter(self._peers.all)), Writes(*(getattr(writes, f.name)[i : i + 1] for f in attrs.fields(Writes)))
            )
        return writes


class Generous(InprocTransport):
    """Registers one by one, so that a refused call leaves something behind."""

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        return [super(Generous, self).register([buffer])[0] for buffer in buffers]


class LetsGo(InprocTransport):
    """Keeps addresses, and not what lies there."""

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        return super().register([attrs.evolve(buffer, owner=None) for buffer in buffers])


class Raises(InprocTransport):
    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        raise OSError("no")


def one_write(rig: Pair) -> None:
    data.test_bytes_of_a_write_are_at_the_target_when_its_ticket_ends(rig, 255)


def bad_range(rig: Pair) -> None:
    data.test_a_range_outside_its_region_is_refused_before_anything_is_written(rig, (-1, 0, 2))


def freed_memory(rig: Pair) -> None:
    memory.test_registered_memory_lives_although_its_owner_lets_go(rig.source)


def overlap(rig: Pair) -> None:
    memory.test_memory_that_overlaps_a_region_is_refused(rig.source, 0, 4096)


def overlap_in_one_call(rig: Pair) -> None:
    memory.test_memory_that_overlaps_within_one_call_is_refused(rig.source)


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (OneByteTooMany, one_write),
        (OneByteTooMany, data.test_a_batch_of_30000_small_writes_lands_whole),
        (OneByteTooMany, data.test_writes_of_no_bytes_write_nothing),
        (LastOneLost, data.test_a_batch_of_30000_small_writes_lands_whole),
        (ToldTwice, data.test_each_ticket_ends_exactly_once_and_is_never_used_twice),
        (NeverTold, data.test_an_empty_batch_ends_well),
        (UnclaimedLateWrites, data.test_a_whole_region_is_written),
        (Clamps, bad_range),
        (WritesGoodOnesFirst, bad_range),
        (WritesGoodOnesFirst, data.test_unknown_regions_are_refused_before_anything_is_written),
        (LetsGo, freed_memory),
        (Generous, overlap),
        (Generous, overlap_in_one_call),
        (Raises, peers.test_poll_never_raises),
        (Raises, data.test_a_whole_region_is_written),
    ],
)
def test_a_broken_transport_fails(broken: Callable[[], Transport], case: Callable[[Pair], None]) -> None:
    """And the sound one passes the same case."""
    sound = pair(InprocTransport)
    sound.timeout_s = 120.0
    case(sound)
    with pytest.raises((AssertionError, OSError, DisaggKVError, pytest.fail.Exception)):
        case(pair(broken))


def test_a_ticket_that_does_not_end_is_told_with_the_transport_and_what_all_threads_do() -> None:
    """Of both ends: one of them stands still where it should look."""
    told = r"(?s)waited 0\.05 s for ticket 1 to end over 'inproc'\nsource:\n.*MainThread:.*target:\n.*MainThread:"
    with pytest.raises(AssertionError, match=told):
        data.test_an_empty_batch_ends_well(pair(NeverTold))


@pytest.mark.parametrize("fault", [Fault.LATE, Fault.PARTIAL, Fault.HUNG, Fault.REFUSED, Fault.DELAYED])
def test_each_injected_fault_fails(fault: Fault) -> None:
    """A plain write notices all of them."""
    with pytest.raises(AssertionError):
        data.test_a_whole_region_is_written(pair(lambda: FaultyTransport(InprocTransport(), {0: fault}.get)))


def test_the_log_knows_the_order_of_events() -> None:
    """Settled comes once, after an end that was not quiet; a success is quiet; a loss comes once."""
    late = Capabilities(late_writes=True)
    unquiet = WriteEnded(Ticket(1), TransportError("x"), quiesced=False)
    Log(late).add([unquiet, Settled(Ticket(1))])
    Log(Capabilities()).add([PeerLost(Peer(b"p"))])
    wrong: list[tuple[Capabilities, list[TransportEvent]]] = [
        (late, [Settled(Ticket(1))]),
        (late, [WriteEnded(Ticket(1)), Settled(Ticket(1))]),
        (late, [unquiet, Settled(Ticket(1)), Settled(Ticket(1))]),
        (late, [WriteEnded(Ticket(1), None, quiesced=False)]),
        (late, [unquiet, unquiet]),
        (late, [WriteEnded(Ticket(1), OSError("foreign"))]),
        (Capabilities(), [unquiet]),
        (Capabilities(), [PeerLost(Peer(b"p")), PeerLost(Peer(b"p"), fenced=True)]),
    ]
    for caps, told in wrong:
        with pytest.raises(AssertionError):
            Log(caps).add(told)


def test_a_difference_is_told_with_its_place() -> None:
    """The first wrong byte, both values, and how many there are."""
    with pytest.raises(AssertionError, match="2 of 4 bytes are wrong; byte 1 is 9, not 2"):
        same(np.array([1, 9, 9, 4], np.uint8), np.array([1, 2, 3, 4], np.uint8))
    with pytest.raises(AssertionError, match=r"\(1,\) bytes instead of \(2,\)"):
        same(np.zeros(1, np.uint8), np.zeros(2, np.uint8))


def test_a_child_tells_the_errors_of_its_transport_and_ends_with_its_parent() -> None:
    """Errors come back as what they are; a child that stands still is an AssertionError."""
    child = Child(faultless_inproc, HostMemory(), 120.0)
    child.open()
    with pytest.raises(RemoteProtocolError):
        child.connect(b"", 1.0)
    region = child.add(np.arange(10, dtype=np.uint8))
    child.fill(region, np.arange(10, 20, dtype=np.uint8))
    assert child.read(region).tolist() == list(range(10, 20))
    assert "in stacks" in child.stacks()
    child.pause()
    child._timeout_s = 0.01
    with pytest.raises(AssertionError, match="did not answer 'read'"):
        child.read(region)
    assert "cannot be asked" in _stacks(child)
    child.resume()
    with pytest.raises(AssertionError, match="did not answer 'read' before"):
        child.descriptor()
    child.stop()


def test_the_suite_wants_a_factory() -> None:
    """It has no transport of its own."""
    with pytest.raises(NotImplementedError):
        TransportCases.factory()
