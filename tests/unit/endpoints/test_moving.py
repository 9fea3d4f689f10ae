"""How bytes get from prefill's pages to decode's: gathers, writes, leases, look-ahead, withdrawal."""

from __future__ import annotations

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.errors import GeometryError, LocalProtocolError
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import LayerId, RoomId
from disagg_kv.transports import InprocTransport
from tests.support.rig import KV, Memory, Rig, put, tp_shards
from tests.support.rig_parts import CountingKernels, FiredEvent, RecordingTransport

SPEC = CacheSpec.kv(4, 4, 8, "float16")
ROW_BYTES = 4 * 2 * 4 * 16


def recorders(rig: Rig) -> tuple[list[RecordingTransport], Memory]:
    """Transports of ranks to come, in order, and the memory that makes them."""
    made: list[RecordingTransport] = []

    def transport() -> RecordingTransport:
        made.append(RecordingTransport(InprocTransport()))
        return made[-1]

    return made, Memory(transport=transport, pages=300)


def test_one_bulk_write_per_segment_writer_and_destination() -> None:
    """Each writer posts one descriptor per segment and decode rank, of all its head slices."""
    rig = Rig(SPEC)
    sent, memory = recorders(rig)
    prefills = rig.prefill(tp_shards(SPEC, 4), memory=memory, strategy="staged", slot_bytes=1 << 16)
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="staged", ring_bytes=1 << 20)
    rig.request("room", prefills, decodes, 64).start(64).landed()
    for transport in sent:
        assert [len(w) for _, w in transport.batches] == [1]
        assert transport.batches[0][1].total() == 64 * ROW_BYTES // 4
    assert all(h.report.descriptors == 1 for m in prefills for h in [m.endpoint.poll()[0]])


def test_one_gather_for_all_destinations_granted_by_then() -> None:
    """With fewer prefill than decode ranks, a segment that all of them wait for is gathered by one launch."""
    rig = Rig(SPEC)
    sent, memory = recorders(rig)
    kernels, event = CountingKernels(), FiredEvent()
    prefills = rig.prefill(
        tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels, slot_bytes=1 << 16, slots=4
    )
    decodes = rig.decode(tp_shards(SPEC, 4), strategy="staged", ring_bytes=1 << 20)
    request = rig.request("room", prefills, decodes, 32).open_decode().expect(32).open_prefill().send(32, ready=event)
    rig.wait(1.0)
    assert not kernels.gathers
    assert all(m.endpoint.usage().ring_used_bytes for m in decodes)
    event.fired = True
    request.finish().landed()
    assert kernels.gathers == [4]
    assert len(sent[0].batches) == 4
    rig.quiet()


def test_replicas_of_a_head_are_gathered_once() -> None:
    """Decode ranks that need the very same bytes share one place in the slot."""
    spec = CacheSpec.mla(4, 24, "int8")
    rig = Rig(spec)
    kernels, event = CountingKernels(), FiredEvent()
    prefills = rig.prefill(tp_shards(spec, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(spec, 4), strategy="staged")
    request = rig.request("room", prefills, decodes, 20).open_decode().expect(20).open_prefill().send(20, ready=event)
    rig.wait(1.0)
    event.fired = True
    request.finish().landed()
    assert kernels.gathers == [1]


def test_one_scatter_for_all_writers() -> None:
    """A segment is scattered by one launch when all its writers have arrived."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 4), strategy="staged", slot_bytes=1 << 16)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", kernels=kernels, ring_bytes=1 << 20)
    rig.request("room", prefills, decodes, 32).start(32).landed()
    assert kernels.scatters == [4]


@pytest.mark.parametrize("path", ["staged", "slice"])
def test_nothing_is_read_before_the_engine_s_event(path: str) -> None:
    """A chunk whose bytes are not final yet is not read, however long that takes."""
    rig = Rig(SPEC)
    sent, memory = recorders(rig)
    kernels, event = CountingKernels(), FiredEvent()
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path, kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill().send(9, ready=event)
    table = request.given[0][0]
    put(prefills[0].pool, table, 0, 9, None)
    request.finish()
    rig.wait(20.0)
    assert not kernels.gathers
    assert not sent[0].batches
    assert request.receives[0].phase is Phase.MOVING
    put(prefills[0].pool, table, 0, 9, request.truth)
    event.fired = True
    request.landed()


def test_aux_is_read_at_its_event() -> None:
    """The aux row of ``finish`` may be final later than the call."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    event = FiredEvent()
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9, aux=1).open_prefill().send(9)
    request.sends[0].finish(9, aux=0, ready=event)
    rig.wait(3.0)
    assert request.receives[0].phase is Phase.MOVING
    prefills[0].pool.write_aux(0, b"at last")
    event.fired = True
    request.landed()
    assert decodes[0].pool.read_aux(1) == b"at last\0"


def test_kernels_that_finish_later() -> None:
    """Gathers and scatters on a stream of their own are awaited: slot, lease and success depend on their events."""
    rig = Rig(SPEC)
    gather, scatter = CountingKernels(), CountingKernels()
    gather.events, scatter.events = [], []
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=gather)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", kernels=scatter)
    request = rig.request("room", prefills, decodes, 8).start(8)
    rig.until(lambda: bool(gather.events), "a gather")
    rig.wait(1.0)
    assert prefills[0].endpoint.usage().slots_used == 1
    gather.events[0].fired = True
    rig.until(lambda: bool(scatter.events), "a scatter")
    rig.wait(1.0)
    assert decodes[0].endpoint.usage().ring_used_bytes
    assert request.receives[0].phase is Phase.MOVING
    scatter.events[0].fired = True
    request.landed()
    rig.quiet()


def test_a_request_far_larger_than_the_ring() -> None:
    """Twenty times the ring passes through it, in few slots, while another request does too."""
    rig = Rig(SPEC)
    source, target = Memory(pages=700), Memory(pages=256, page_size=16)
    ring = 64 << 10
    rows = 20 * ring // ROW_BYTES
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=source, strategy="staged", slot_bytes=2048, slots=3)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=target, strategy="staged", ring_bytes=ring)
    long = rig.request("long", prefills, decodes, 3 * rows // 4).start(3 * rows // 4)
    short = rig.request("short", prefills, decodes, rows // 4).start(rows // 4)
    rig.until(lambda: long.all(Phase.DONE) and short.all(Phase.DONE), "both")
    long.wanted(0, long.rows)
    short.wanted(0, short.rows)
    rig.check()
    assert long.receives[0].report.segments > 15
    rig.quiet()


def test_a_row_too_large_for_a_slot() -> None:
    """An explicit path that cannot is an error with the reason; ``auto`` falls back."""
    for path, done in (("staged", False), ("auto", True)):
        rig = Rig(SPEC)
        prefills = rig.prefill(tp_shards(SPEC, 2), strategy=path, slot_bytes=256, slots=2)
        decodes = rig.decode(tp_shards(SPEC, 1), ring_bytes=1024)
        request = rig.request("room", prefills, decodes, 8).start(8)
        if done:
            request.landed()
            assert request.sends[0].report.path == "slice"
            assert "staged cannot" in request.receives[0].report.reason
        else:
            request.failed()
            assert "staging" in request.errors()
        rig.quiet()


def test_grants_are_asked_for_before_the_forward_pass_ends() -> None:
    """``step`` announces rows; leases are there when the pass closes, and nothing was read before."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(12).open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    (table,) = request.pages(0, 12)
    put(prefills[0].pool, table, 0, 12, None)
    step = prefills[0].endpoint.step({request.room: (12, [table])})
    rig.wait(1.0)
    assert decodes[0].endpoint.usage().ring_used_bytes
    assert not kernels.gathers
    put(prefills[0].pool, table, 0, 12, request.truth)
    event = FiredEvent()
    for layer in (2, 0):
        step.layer_ready(LayerId(layer), event)
    step.close(event)
    rig.wait(1.0)
    assert not kernels.gathers
    event.fired = True
    request.finish().landed()
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
def test_an_engine_may_reuse_its_arrays_of_page_ids(path: str) -> None:
    """What was checked is what is used: engines keep one block table and write the next step's ids over it."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), strategy=path), rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 8).open_decode().open_prefill()
    (source,) = request.pages(0, 8)
    request.taken = [decodes[0].take(8)]
    target = request.taken[0].pages.copy()
    ids = source.pages.copy()
    request.receives[0].expect(Expectation(8, [PageTable(KV, target)]))
    request.sends[0].send_chunk(8, [PageTable(KV, ids)])
    target[:], ids[:] = 0, 0
    request.finish().landed()


@pytest.mark.parametrize("closing", [False, True])
def test_a_pass_is_over_when_the_events_of_its_layers_have_happened(closing: bool) -> None:
    """``close`` speaks of the layers that were not announced: those that were keep the events they came with."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 12).open_decode().expect(12).open_prefill()
    step = prefills[0].endpoint.step({request.room: (12, request.pages(0, 12))})
    first, second, rest = FiredEvent(), FiredEvent(), FiredEvent()
    step.layer_ready(LayerId(0), first)
    if closing:
        step.layer_ready(LayerId(1), second)
    step.close(rest if closing else None)
    request.finish()
    for event in (second, rest, first) if closing else (first,):
        rig.wait(1.0)
        assert not kernels.gathers
        event.fired = True
    request.landed()
    rig.quiet()


def test_look_ahead_leaves_room_for_data_that_is_ready() -> None:
    """A room whose forward pass never ends does not stop the others."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=16 << 10)
    stuck = [rig.request(f"stuck {i}", prefills, decodes, 20) for i in range(4)]
    for request in stuck:
        request.open_decode().expect(20).open_prefill()
        prefills[0].endpoint.step({request.room: (20, request.pages(0, 20))})
    rig.wait(1.0)
    assert 0 < decodes[0].endpoint.usage().ring_used_bytes <= 4 << 10
    rig.request("ready", prefills, decodes, 40).start(40).landed()
    for request in stuck:
        request.sends[0].abort("never mind")
        request.failed()
    rig.quiet()


def test_a_step_is_all_or_nothing() -> None:
    """A step with one bad room announces nothing of the good ones."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    a, b = (rig.request(name, prefills, decodes, 8).open_decode().expect(8).open_prefill() for name in "ab")
    (table,) = a.pages(0, 8)
    with pytest.raises(GeometryError, match=f"room {b.room.decode()}: .* rows up to 8, but 1 pages end at 4"):
        prefills[0].endpoint.step({a.room: (8, [table]), b.room: (8, [PageTable(KV, table.pages[:1])])})
    with pytest.raises(LocalProtocolError, match="not open"):
        prefills[0].endpoint.step({a.room: (8, [table]), RoomId(b"nobody"): (8, [table])})
    a.sends[0].send_chunk(8, [table])
    a.finish().landed()
    step = prefills[0].endpoint.step({b.room: (8, b.pages(0, 8))})
    with pytest.raises(GeometryError, match="layer 9"):
        step.layer_ready(LayerId(9))
    step.layer_ready(LayerId(1))
    with pytest.raises(LocalProtocolError, match="twice"):
        step.layer_ready(LayerId(1))
    step.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        step.close()
    with pytest.raises(LocalProtocolError, match="after close"):
        step.layer_ready(LayerId(2))
    b.finish().landed()


@pytest.mark.parametrize("path", ["staged", "slice", "mapped"])
@pytest.mark.parametrize("edges", [(16,), (5, 16), (3, 11, 16)])
@pytest.mark.parametrize("finished", [False, True])
def test_withdrawn_pages_are_not_read(edges: tuple[int, ...], path: str, finished: bool) -> None:
    """Preemption: once the event of ``withdraw`` fires the pages are free; the rows come again from other pages."""
    rig = Rig(SPEC)
    event = FiredEvent()
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(16).open_prefill()
    request.send(6)
    rig.until(lambda: request.receives[0].report.segments > 0, "the first chunk")
    request.send(16, 6, ready=event)
    if finished:
        request.finish()
    fired = [handle.withdraw() for handle in request.sends]
    rig.until(lambda: all(e.query() for e in fired), "the end of all reads")
    for member, tables in zip(prefills, request.given.values(), strict=True):
        for table in tables:
            rows = len(table.pages) * 4
            for pool in (member.pool, member.want):
                put(pool, PageTable(KV, table.pages), 0, rows, None)
    event.fired = True
    rig.wait(1.0)
    assert request.receives[0].phase is Phase.MOVING
    start = 0
    for edge in edges:
        request.send(edge, start)
        start = edge
    if not finished:
        request.finish()
    request.landed()
    assert request.sends[0].withdraw().query()
    rig.quiet()


@pytest.mark.parametrize("how", ["withdrawn", "late"])
def test_rooms_that_cannot_go_on_do_not_hold_the_ring(how: str) -> None:
    """Preempted rooms give their leases back; rows whose event is late have a quarter of the ring at most."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=16 << 10)
    event, stuck = FiredEvent(), []
    for i in range(4):
        request = rig.request(f"stuck {i}", prefills, decodes, 20).open_decode().expect(20).open_prefill()
        stuck.append(request.send(20, ready=event))
    rig.wait(1.0)
    held = decodes[0].endpoint.usage().ring_used_bytes
    assert 0 < held <= 4 << 10
    if how == "withdrawn":
        for request in stuck:
            for handle in request.sends:
                handle.withdraw()
        rig.wait(1.0)
        assert decodes[0].endpoint.usage().ring_used_bytes == 0
        return
    rig.request("ready", prefills, decodes, 40).start(40).landed()
    event.fired = True
    for request in stuck:
        request.finish()
    rig.until(lambda: all(request.all(Phase.DONE) for request in stuck), "the others")
    for request in stuck:
        request.wanted(0, 20)
    rig.check()
    rig.quiet()


def test_a_granted_room_that_is_preempted_before_it_moves_gives_its_leases_back() -> None:
    """What waited for a slot has a lease, and after a withdrawal it has none; the rows come again and arrive."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    events: list[FiredEvent] = []
    kernels.events = events
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels, slots=1)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    first = rig.request("first", prefills, decodes, 8).start(8)
    rig.until(lambda: bool(kernels.events), "the only slot's gather")
    held = decodes[0].endpoint.usage().ring_used_bytes
    second = rig.request("second", prefills, decodes, 8).open_decode().expect(8).open_prefill().send(8)
    rig.until(lambda: decodes[0].endpoint.usage().ring_used_bytes > held, "the second room's lease")
    assert second.sends[0].withdraw() is not None
    rig.until(lambda: decodes[0].endpoint.usage().ring_used_bytes == held, "its return")
    second.send(8).finish()
    events[0].fired = True
    first.landed()
    rig.until(lambda: len(events) == 2, "the second room's gather")
    events[1].fired = True
    second.landed()
    rig.quiet()


def test_reads_under_way_delay_the_withdrawal() -> None:
    """The event of ``withdraw`` waits for a gather that has begun."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    kernels.events = []
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).start(8)
    rig.until(lambda: bool(kernels.events), "a gather")
    fired = request.sends[0].withdraw()
    rig.wait(2.0)
    assert not fired.query()
    kernels.events[0].fired = True
    rig.until(fired.query, "the end of reads")
    fired.synchronize()
    request.landed()


def test_a_pass_from_before_the_withdrawal_says_nothing_of_new_pages() -> None:
    """A forward pass that ends after its room was withdrawn does not make the new pages final."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    old = prefills[0].endpoint.step({request.room: (8, request.pages(0, 8))})
    request.sends[0].withdraw()
    new = prefills[0].endpoint.step({request.room: (8, request.pages(0, 8))})
    old.close()
    rig.wait(1.0)
    assert not kernels.gathers
    new.close()
    request.finish().landed()


def test_pages_given_again_are_final_when_all_events_have_happened() -> None:
    """Rows that come again in two chunks wait for the events of both."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    first, second = FiredEvent(), FiredEvent()
    request = rig.request("room", prefills, decodes, 16).open_decode().expect(16).open_prefill().send(16, ready=first)
    rig.wait(1.0)
    request.sends[0].withdraw()
    request.send(8, ready=first)
    request.send(16, 8, ready=second)
    second.fired = True
    rig.wait(1.0)
    assert not kernels.gathers
    first.fired = True
    request.finish().landed()


def test_more_descriptors_than_a_transport_takes_at_once() -> None:
    """Batches are cut to the transport's limit, and the part ends when all of them have."""

    class Small(InprocTransport):
        caps = InprocTransport.caps.__class__(in_process_only=True, max_batch=7)

    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=Memory(transport=Small), strategy="slice")
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="slice")
    rig.request("room", prefills, decodes, 9).start(9).landed()
    rig.quiet()


def test_many_rooms_share_one_small_ring() -> None:
    """Rooms with all leases held by others wait and go on; every lease is free at the end."""
    rig = Rig(SPEC, options=Options(window=2))
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy="staged", memory=Memory(pages=200), slots=2)
    decodes = rig.decode(tp_shards(SPEC, 4), strategy="staged", memory=Memory(pages=200), ring_bytes=8 << 10)
    requests = [rig.request(f"{i}", prefills, decodes, 7 + 3 * i).start() for i in range(12)]
    rig.until(lambda: all(r.all(Phase.DONE) for r in requests), "all rooms")
    for request in requests:
        request.wanted(0, request.rows)
    rig.check()
    rig.quiet()
