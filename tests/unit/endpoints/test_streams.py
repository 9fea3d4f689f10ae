"""Events of a GPU are left to its streams: no thread waits for them, and no byte moves before them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import Phase
from disagg_kv.endpoints.prefill.room import ReadyEvents
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import LayerId, Peer, Ticket
from disagg_kv.kernels import CpuKernels, Move
from disagg_kv.memory import All, Buffer, Event, MemoryPool
from disagg_kv.planning import Segment, Writes
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.transports import InprocTransport, PeerLost, Settled, WriteEnded
from tests.support.rig import Memory, Rig, put, tp_shards
from tests.support.rig_parts import FiredEvent, RecordingTransport

SPEC = CacheSpec.kv(2, 4, 8, "float16")


class GpuEvent:
    """An event that only a stream may ask before it has happened."""

    cuda_event = 1

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        assert self.happened, "a thread asked for an event that a stream waits for"
        return True

    def synchronize(self) -> None:
        raise AssertionError("a thread waited")


class StreamKernels(CpuKernels):
    """Gathers that are queued behind an event, and done when that has happened and the test says so."""

    def __init__(self) -> None:
        self.queued: list[Gather] = []

    def orders(self, event: Event) -> bool:
        return True

    def gather(  # type: ignore[override]
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None
    ) -> Event | None:
        self.queued.append(Gather(pool, moves, staging, after))
        return self.queued[-1]


class Gather:
    """A launched gather; also the event of its end."""

    cuda_event = 2

    def __init__(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        self.after = after
        self._work = pool, moves, staging
        self.happened = False
        self.error: Exception | None = None

    def run(self) -> None:
        """The GPU gets there."""
        CpuKernels().gather(*self._work, None)
        self.happened = True

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.happened

    def synchronize(self) -> None:
        raise AssertionError("a thread waited")


class StreamTransport(FaultyTransport):
    """Queues writes behind events, as hardware does."""

    def __init__(self) -> None:
        super().__init__(InprocTransport(), lambda number: Fault.DELAYED)
        self.caps = attrs.evolve(self.caps, late_writes=False, waits_events=True)
        self.after: dict[Ticket, Event | None] = {}

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Only keeps the batch."""
        ticket = super().submit(peer, writes)
        self.after[ticket] = after
        return ticket

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Moves what may move."""
        for ticket in self.held:
            after = self.after[ticket]
            if after is None or getattr(after, "happened", True):
                self.release(ticket)
        return super().poll()


def test_a_gather_is_queued_behind_the_engine_s_event_before_that_has_happened() -> None:
    """The thread does not ask the event; the write is posted when the gather's own event has happened."""
    rig = Rig(SPEC)
    kernels, event = StreamKernels(), GpuEvent()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9, ready=event)
    table = request.given[0][0]
    put(prefills[0].pool, table, 0, 9, None)
    request.finish()
    rig.until(lambda: bool(kernels.queued), "a gather")
    rig.wait(1.0)
    assert kernels.queued[0].after is event
    assert prefills[0].endpoint.usage().slots_used == 1
    assert request.receives[0].phase is Phase.MOVING
    put(prefills[0].pool, table, 0, 9, request.truth)
    kernels.queued[0].run()
    request.landed()
    rig.quiet()


def test_a_write_waits_for_its_gather_without_this_thread_where_the_transport_can() -> None:
    """It is posted with the gather's event at once; the pages are read, and the slot is filled, until that happens."""
    rig = Rig(SPEC)
    kernels, carriers = StreamKernels(), [StreamTransport()]
    memory = Memory(transport=carriers.pop)
    carrier = carriers[0]
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9)
    request.finish()
    rig.until(lambda: bool(carrier.held), "a write")
    assert list(carrier.after.values()) == kernels.queued
    fired = request.sends[0].withdraw()
    rig.wait(1.0)
    assert not fired.query()
    kernels.queued[0].run()
    rig.until(fired.query, "the end of reads")
    request.landed()
    rig.quiet()


def test_the_wire_s_time_begins_when_the_gather_behind_the_engine_s_event_has_ended() -> None:
    """What is queued on a GPU before it is computed is not on its way; its pace, span and report say so."""
    rig = Rig(SPEC)
    kernels, carriers = StreamKernels(), [StreamTransport()]
    memory = Memory(transport=carriers.pop)
    carrier = carriers[0]
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    event = GpuEvent()
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9, ready=event)
    request.finish()
    rig.until(lambda: bool(carrier.held), "a write")
    rig.wait(5.0)
    kernels.queued[0].run()
    request.landed()
    wire = next(span for span in prefills[0].observer.spans if span.name == "wire")
    gather = next(span for span in prefills[0].observer.spans if span.name == "gather")
    assert gather.stop - gather.start > 5.0
    assert wire.stop - wire.start < 1.0
    assert request.sends[0].report.seconds["wire"] < 1.0
    rig.quiet()


def test_a_gather_that_fails_fails_its_room_and_frees_its_slot() -> None:
    """Also where its write was posted already: that ends by itself."""
    for early in (False, True):
        rig = Rig(SPEC)
        kernels = StreamKernels()
        memory = Memory(transport=StreamTransport) if early else Memory()
        prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels)
        decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
        request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9)
        rig.until(lambda kernels=kernels: bool(kernels.queued), "a gather")  # type: ignore[misc]
        if early:
            request.sends[0].abort("the engine's stream is broken")
            kernels.queued[0].happened = True
        kernels.queued[0].error = RuntimeError("illegal address")
        rig.until(lambda request=request: request.sends[0].released, "the room to end")  # type: ignore[misc]
        assert request.sends[0].phase is Phase.FAILED
        rig.until(lambda prefills=prefills: prefills[0].endpoint.usage().slots_used == 0, "the slot")  # type: ignore[misc]


def test_pages_are_written_behind_the_engine_s_event_by_a_transport_that_waits() -> None:
    """Without staging there is only one event to wait for, and it is the transport that waits."""
    rig = Rig(SPEC)
    carriers = [StreamTransport()]
    memory, carrier = Memory(transport=carriers.pop), carriers[0]
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="slice", kernels=StreamKernels())
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="slice")
    event = GpuEvent()
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9, ready=event)
    rig.until(lambda: bool(carrier.after), "a write")
    assert list(carrier.after.values()) == [event]
    event.happened = True
    request.finish().landed()
    rig.quiet()


def test_an_event_of_the_gpu_that_raises_fails_its_room() -> None:
    """It is looked at again when the next rows come."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=StreamKernels())
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    broken, event = Gather(prefills[0].pool, [], prefills[0].pool.buffers[0], None), GpuEvent()
    broken.error = RuntimeError("illegal address")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    request.send(4, ready=broken).send(8, 4, ready=event)
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the room to end")
    assert "the engine's event raised" in str(request.sends[0].error)


def test_an_event_that_raises_before_pages_are_written_fails_only_its_room() -> None:
    """Nothing of the room is posted, and the endpoint's other rooms go on."""
    rig = Rig(SPEC)
    sent = RecordingTransport(InprocTransport())
    prefills = rig.prefill(
        tp_shards(SPEC, 1), memory=Memory(transport=lambda: sent), strategy="slice", kernels=StreamKernels()
    )
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="slice")
    broken = Gather(prefills[0].pool, [], prefills[0].pool.buffers[0], None)
    other = rig.request("other", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(4)
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()
    request.send(4, ready=broken).send(9, 4, ready=broken)
    rig.wait(2.0)
    sent.batches.clear()
    broken.error = RuntimeError("illegal address")
    request.failed()
    assert "the engine's event raised" in str(request.sends[0].error)
    assert not sent.batches
    request.forgive()
    other.send(9, 4).finish().landed()
    assert not prefills[0].observer.counters["errors.unforeseen"]


def test_pages_are_not_written_before_the_event_by_a_transport_that_does_not_wait() -> None:
    """Then it is the endpoint that looks at the event."""
    rig = Rig(SPEC)
    sent = RecordingTransport(InprocTransport())
    prefills = rig.prefill(
        tp_shards(SPEC, 1), memory=Memory(transport=lambda: sent), strategy="slice", kernels=StreamKernels()
    )
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="slice")
    event = FiredEvent()
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9, ready=event)
    rig.wait(2.0)
    assert not sent.batches
    event.fired = True
    request.finish().landed()
    rig.quiet()


def test_a_copy_comes_after_the_events_of_its_own_rows_and_layers() -> None:
    """Those of other rows or layers do not delay it."""
    gates = ReadyEvents()
    first, second, late = FiredEvent(), FiredEvent(), FiredEvent()
    layers = [LayerId(0), LayerId(1)]
    gates.add(0, 8, [layers[0]], first)
    gates.add(8, 16, None, second)
    gates.add(0, 8, [layers[1]], late)
    assert gates.before(Segment(0, 8, 0, 1)) is first
    assert gates.before(Segment(16, 20, 0, 2)) is None
    both = gates.before(Segment(4, 12, 0, 2))
    assert isinstance(both, All)
    assert set(both.events) == {first, second, late}


@given(
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.booleans()), max_size=20),
    start=st.integers(0, 60),
    rows=st.integers(1, 60),
    scale=st.sampled_from((1, 10**10)),
)
def test_a_copy_comes_after_the_events_of_all_rows_that_it_shares(
    chunks: list[tuple[int, int, bool]], start: int, rows: int, scale: int
) -> None:
    """And of no others, in whatever order and however long chunks are: a room of states alone may name any row."""
    gates, events = ReadyEvents(), [FiredEvent() for _ in chunks]
    for (first, count, fired), event in zip(chunks, events, strict=True):
        gates.add(scale * first, scale * (first + count), None, event)
        event.fired = fired
    before = gates.before(Segment(scale * start, scale * (start + rows), 0, 1))
    found = set() if before is None else set(before.events) if isinstance(before, All) else {before}
    rights = {
        event
        for (first, count, fired), event in zip(chunks, events, strict=True)
        if not fired and first < start + rows and start < first + count
    }
    assert {event for event in found if not event.query()} == rights


class Asked(FiredEvent):
    """An event that counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def query(self) -> bool:
        """True once fired."""
        self.times += 1
        return super().query()


def test_events_that_are_pending_are_asked_a_few_times_each_and_past_ones_are_forgotten() -> None:
    """A room of many chunks and layers costs in proportion to them; what is kept is at most twice what is pending."""
    gates, events = ReadyEvents(), [Asked() for _ in range(1000)]
    for row, event in enumerate(events):
        gates.add(row, row + 1, None, event)
    assert sum(event.times for event in events) <= 2 * len(events)
    for event in events:
        event.fired = True
    later = [Asked() for _ in range(len(events) + 1)]
    for row, one in enumerate(later):
        one.fired = row < len(later) - 1
        gates.add(row, row + 1, None, one)
    left = [before for row in range(len(later)) if (before := gates.before(Segment(row, row + 1, 0, 1))) is not None]
    assert left[-1] is later[-1]
    assert len(left) <= 2
