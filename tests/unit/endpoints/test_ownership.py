"""Memory that a peer may still write to, or that a write may still read, comes back on evidence only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from disagg_kv.channels import Channel
from disagg_kv.core import Options, Phase
from disagg_kv.errors import DeadlineError, QuarantineFullError, TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import RoomId
from disagg_kv.planning import StagedLayout
from disagg_kv.rendezvous import Source
from disagg_kv.strategies import Job
from disagg_kv.strategies.paths import StagedPlanner
from disagg_kv.testing import Fault, FaultyTransport
from disagg_kv.testing.faults import Plan
from disagg_kv.transports import InprocTransport
from tests.support.drawn_faults import seeded
from tests.support.rig import Memory, Prefills, Request, Rig, put, tp_shards
from tests.support.rig_parts import CountingKernels, FiredEvent, RecordingTransport, Unreliable

SPEC = CacheSpec.kv(2, 2, 8, "float16")


def faulty(plan: Plan) -> tuple[list[FaultyTransport], Memory]:
    """Transports of ranks to come, in order, and the memory that makes them."""
    made: list[FaultyTransport] = []

    def transport() -> FaultyTransport:
        made.append(FaultyTransport(InprocTransport(), plan))
        return made[-1]

    return made, Memory(transport=transport)


def poison(request: Request) -> None:
    """Decode's engine gives the room's pages to somebody else."""
    for member, table in zip(request.decodes, request.taken, strict=True):
        rows = len(table.pages) * member.pool.site.groups[0].rows_per_page
        for pool in (member.pool, member.want):
            put(pool, table, 0, rows, None)


HELD = [Fault.LATE, Fault.DELAYED, Fault.UNACKNOWLEDGED]


class _Sending(Unreliable):
    """A channel that does something before each frame: what another thread could do at that moment."""

    def __init__(self, inner: Channel, look: Callable[[], None]) -> None:
        super().__init__(inner, lambda number, address: (0,))
        self._look = look

    def send(self, address: str, frame: bytes) -> bool:
        self._look()
        return super().send(address, frame)


def test_whoever_sees_a_room_fail_sees_its_leases_in_quarantine() -> None:
    """The outcome is not told, to no thread, before all that follows from it is done."""
    seen: list[tuple[Phase, bool, int]] = []

    def look() -> None:
        for handle in request.receives:
            seen.append((handle.phase, handle.released, decodes[0].endpoint.usage().quarantined_bytes))

    rig = Rig(SPEC)
    transports, memory = faulty({0: Fault.DELAYED}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), memory=Memory(channel=partial(_Sending, look=look)), strategy="staged")
    request = rig.request("room", prefills, decodes, 12)
    request.start(12)
    rig.until(lambda: bool(transports[0].held), "the held write")
    request.receives[0].abort("changed my mind")
    request.failed()
    rig.wait(2.0)
    look()
    lease = decodes[0].endpoint.usage().ring_used_bytes
    assert {one for one in seen if one[0] is Phase.FAILED} == {(Phase.FAILED, True, lease)}
    assert lease > 0
    transports[0].release()
    rig.quiet()
    rig.close()


@pytest.mark.parametrize("fault", HELD)
def test_staged_pages_come_back_before_the_lease(fault: Fault) -> None:
    """After an abort decode's pages are free at once; the lease waits until the late write is over."""
    rig = Rig(SPEC)
    transports, memory = faulty({0: fault}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=1 << 16)
    request = rig.request("room", prefills, decodes, 12).start(12)
    rig.until(lambda: bool(transports[0].held), "the held write")
    request.receives[0].abort("changed my mind")
    request.failed()
    poison(request)
    rig.wait(20.0)
    assert decodes[0].endpoint.usage().quarantined_bytes == decodes[0].endpoint.usage().ring_used_bytes > 0
    assert prefills[0].endpoint.usage().slots_used == 1
    assert decodes[0].endpoint.open_rooms == 1
    rig.request("next", prefills, decodes, 20).start(20).landed()
    transports[0].release()
    rig.quiet()
    rig.check()
    assert decodes[0].endpoint.usage().quarantined_bytes == 0


def test_pages_that_are_gathered_for_others_are_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one destination's part cannot be planned the room fails, but the gather for the other one reads on."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="staged")
    request = rig.request("room", prefills, decodes, 8).open_decode().expect(8).open_prefill()
    computed = FiredEvent()
    request.send(8, ready=computed)
    rig.until(lambda: all(d.endpoint.usage().ring_used_bytes for d in decodes), "both grants")
    rig.wait(0.5)
    planned: list[StagedLayout] = []

    def send(path: StagedPlanner, job: Job) -> StagedLayout:
        if planned:
            raise ValueError("not this one")
        planned.append(job.pair.source_view.layout(job.segment))
        return planned[0]

    monkeypatch.setattr(StagedPlanner, "send", send)
    kernels.events = []
    computed.fired = True
    rig.until(lambda: bool(kernels.gathers), "the gather")
    assert request.sends[0].phase is Phase.FAILED
    assert not request.sends[0].released
    kernels.events[0].fired = True
    request.failed()
    assert "not this one" in str(request.sends[0].error)
    rig.quiet()


def test_nothing_is_posted_to_a_peer_whose_end_was_seen() -> None:
    """Evidence counts from then on, so a gather that ends later must not begin a write that nobody waits for."""
    rig = Rig(SPEC)
    kernels = CountingKernels()
    memory = Memory(transport=lambda: RecordingTransport(FaultyTransport(InprocTransport(), lambda number: None)))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    kernels.events = []
    request = rig.request("room", prefills, decodes, 8).start()
    rig.until(lambda: bool(kernels.gathers), "the gather")
    (peer,) = prefills[0].endpoint.peers()
    decodes[0].closed = True
    prefills[0].endpoint.confirm_terminated(peer.epoch)
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the loss")
    assert not request.sends[0].released
    kernels.events[0].fired = True
    rig.until(lambda: request.sends[0].released, "the end of the gather")
    rig.quiet()
    transport = prefills[0].transport
    assert isinstance(transport, RecordingTransport)
    assert not transport.batches


@pytest.mark.parametrize("path", ["slice", "direct"])
@pytest.mark.parametrize("fault", HELD)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_exposed_pages_wait_for_evidence(fault: Fault, path: str, side: str) -> None:
    """Pages that a write in flight reads or writes are not released before it is quiet, though the room failed."""
    rig = Rig(SPEC)
    transports, memory = faulty({0: fault}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 12).start(12)
    rig.until(lambda: bool(transports[0].held), "the held write")
    (request.sends if side == "prefill" else request.receives)[0].abort("changed my mind")
    rig.until(lambda: all(h.phase is Phase.FAILED for h in request.handles), "the failure")
    rig.wait(20.0)
    assert not any(h.released for h in request.handles)
    transports[0].release()
    request.failed()
    poison(request)
    rig.quiet()
    rig.check()


@pytest.mark.parametrize("path", ["staged", "slice"])
def test_a_hung_write_ends_by_deadline_and_never_frees_memory(path: str) -> None:
    """A write that never ends fails its room in time; memory stays until the process is known to have ended."""
    rig = Rig(SPEC)
    transports, memory = faulty({0: Fault.HUNG}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 12).open_decode(5.0).expect(12).open_prefill(50.0).send(12)
    request.finish()
    rig.until(lambda: all(h.phase is Phase.FAILED for h in request.handles), "the failure")
    assert isinstance(request.receives[0].error, DeadlineError)
    rig.wait(100.0, 0.5)
    assert request.receives[0].released == (path == "staged")
    assert request.sends[0].released == (path == "staged")
    assert decodes[0].endpoint.open_rooms == 1
    (peer,) = decodes[0].endpoint.peers()
    prefills[0].frozen = True
    decodes[0].endpoint.confirm_terminated(peer.epoch)
    rig.until(lambda: request.receives[0].released and decodes[0].endpoint.open_rooms == 0, "the evidence")
    assert decodes[0].endpoint.usage().ring_used_bytes == 0
    assert transports[0].held


@pytest.mark.parametrize("path", ["staged", "slice"])
def test_a_transport_that_proves_a_peer_s_end_is_evidence(path: str) -> None:
    """A closed prefill endpoint whose transport is fenced gives decode its memory back."""
    rig = Rig(SPEC)
    transports, memory = faulty({0: Fault.HUNG}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=path)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path)
    request = rig.request("room", prefills, decodes, 12).start(12)
    rig.until(lambda: bool(transports[0].held), "the hung write")
    rig.wait(1.0)
    prefills[0].close()
    # The real transport under the faulty one tells of its end only where it was connected to.
    decodes[0].endpoint.confirm_terminated(decodes[0].endpoint.peers()[0].epoch)
    rig.until(lambda: request.receives[0].released, "the evidence")
    assert request.receives[0].phase is Phase.FAILED
    assert decodes[0].endpoint.usage().ring_used_bytes == 0


def test_a_refused_write_is_tried_again() -> None:
    """A retryable error of a quiet write costs a retry; three of them the room."""
    rig = Rig(SPEC)
    _, memory = faulty({0: Fault.REFUSED, 1: Fault.PARTIAL}.get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    rig.request("room", prefills, decodes, 12).start(12).landed()
    rig.quiet()
    rig = Rig(SPEC)
    _, memory = faulty(lambda number: Fault.REFUSED)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = rig.request("room", prefills, decodes, 12).start(12).failed()
    assert isinstance(request.sends[0].error, TransportError)
    rig.quiet()


@pytest.mark.parametrize("path", ["staged", "slice", "auto"])
@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_faults(seed: int, path: str) -> None:
    """Whatever becomes of writes, rooms end as one, and memory comes back when all of them are quiet."""
    rig = Rig(SPEC, options=Options(total_s=30.0, silence_s=20.0))
    shares = dict.fromkeys([Fault.REFUSED, Fault.PARTIAL, *HELD], 0.06)
    transports, memory = faulty(seeded(seed, shares))
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=memory, strategy=path, slot_bytes=512)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy=path, ring_bytes=16 << 10)
    requests = [rig.request(f"{i}", prefills, decodes, 16) for i in range(6)]
    for request in requests:
        request.start()
    rig.wait(60.0)
    assert all(h.phase in (Phase.DONE, Phase.FAILED) for r in requests for h in r.handles)
    for transport in transports:
        transport.release()
    rig.until(lambda: all(h.released for r in requests for h in r.handles), "evidence")
    for request in requests:
        if not request.all(Phase.DONE):
            request.forgive()
        else:
            request.wanted(0, 16)
    rig.check()
    rig.quiet()


def stuck(rig: Rig, prefills: Prefills, transports: list[FaultyTransport], name: str, of: str) -> Request:
    """A request that fails while its write hangs."""
    before = len(transports[-1].held)
    request = rig.request(name, prefills, rig.decodes, 16, of).start(16)
    rig.until(lambda: len(transports[-1].held) > before, "the hung write")
    request.receives[0].abort("never mind")
    request.failed()
    rig.wait(1.0)
    return request


def test_quarantine_is_bounded_per_peer_and_in_all() -> None:
    """A peer that owes too much evidence gets no new rooms, and when half the ring waits nobody does."""
    rig = Rig(SPEC)
    transports, memory = faulty(lambda number: Fault.HUNG)
    ring = 16 << 10
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=ring)
    a = rig.prefill(tp_shards(SPEC, 1), "A", memory, strategy="staged", slots=32)
    for number in range(3):
        stuck(rig, a, transports, f"a{number}", "A")
    assert decodes[0].endpoint.usage().quarantined_bytes == 3 * ring / 8
    refused = rig.request("refused", a, decodes, 16, "A").start(16).failed()
    assert isinstance(refused.receives[0].error, QuarantineFullError)
    b = rig.prefill(tp_shards(SPEC, 1), "B", memory, strategy="staged", slots=32)
    for number in range(2):
        stuck(rig, b, transports, f"b{number}", "B")
    with pytest.raises(QuarantineFullError, match=f"of {ring} ring bytes"):
        decodes[0].endpoint.open(RoomId(b"more"), Source("B"))


def test_staging_slots_in_quarantine_are_bounded() -> None:
    """A prefill rank whose slots are read by hung writes refuses new rooms."""
    rig = Rig(SPEC)
    transports, memory = faulty(lambda number: Fault.HUNG)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slots=1)
    rig.decode(tp_shards(SPEC, 1), strategy="staged")
    request = stuck(rig, prefills, transports, "room", "P")
    assert request.sends[0].phase is Phase.FAILED
    with pytest.raises(QuarantineFullError, match="1 of 1 staging slots"):
        prefills[0].endpoint.open(RoomId(b"more"))


def test_a_destination_that_fills_its_slots_is_refused() -> None:
    """A room whose destination has all the slots that it may pin in quarantine fails at once, not at its deadline."""
    rig = Rig(SPEC)
    transports, memory = faulty(lambda number: Fault.HUNG)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slots=8)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged")
    for number in range(2):
        stuck(rig, prefills, transports, f"{number}", "P")
    refused = rig.request("refused", prefills, decodes, 16).start(16).failed()
    assert isinstance(refused.sends[0].error, QuarantineFullError)


def test_a_slow_destination_does_not_delay_the_others() -> None:
    """A decode rank whose writes hang pins at most a quarter of the slots."""
    rig = Rig(SPEC)
    transports, memory = faulty(dict.fromkeys(range(2), Fault.HUNG).get)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slots=8, slot_bytes=512)
    slow, quick = (rig.decode(tp_shards(SPEC, 1), name, strategy="staged") for name in ("slow", "quick"))
    hung = rig.request("hung", prefills, slow, 40).start(40)
    rig.until(lambda: len(transports[0].held) == 2, "the hung writes")
    rig.wait(1.0)
    assert prefills[0].endpoint.usage().slots_used == 2
    rig.request("quick", prefills, quick, 40).start(40).landed()
    assert hung.receives[0].phase is Phase.MOVING
