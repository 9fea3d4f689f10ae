"""Path ``mapped``: kernels copy into mapped pages; a copy is quiet when its event has happened, and not before."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from bench.emulated import emulate
from disagg_kv.core import Phase
from disagg_kv.endpoints.prefill.read_pools import ReadPools
from disagg_kv.errors import ConfigurationError, RegistrationError, TransportError
from disagg_kv.ids import Peer, RegionId
from disagg_kv.memory import Buffer, MappedPool, MemoryPool, PagedMemory, PagedPool
from disagg_kv.testing import FaultyTransport, MappingFault, MappingPlan, faultless
from disagg_kv.transports import InprocTransport, Transport
from tests.support.device_copies import SPEC, DeviceKernels, Failing, launched, scene
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import FiredEvent


def test_one_launch_for_all_destinations_behind_the_engine_s_event() -> None:
    """It is queued before the rows are final, and announced only after it has ended."""
    rig, kernels, request = scene(decode_tp=2)
    ready = FiredEvent()
    request.send(9, ready=ready).finish()
    copy = launched(rig, kernels)
    assert copy.after is ready
    assert len(copy.moves) == 2
    rig.wait(1.0)
    assert [h.phase for h in request.receives] == [Phase.MOVING] * 2
    ready.fired = True
    copy.run()
    request.landed()
    report = request.sends[0].report
    assert (report.path, report.reason, report.descriptors) == ("mapped", "decode has chosen it", 2)
    rig.quiet()


def test_rows_of_two_events_are_two_launches() -> None:
    """The first rows do not wait for the event of the second."""
    rig, kernels, request = scene()
    first, second = FiredEvent(), FiredEvent()
    request.send(4, ready=first).send(9, 4, ready=second).finish()
    launched(rig, kernels, 2)
    assert [copy.after for copy in kernels.queued] == [first, second]
    first.fired = True
    kernels.queued[0].run()
    rig.until(lambda: request.receives[0].report.segments == 1, "the first rows")
    second.fired = True
    kernels.queued[1].run()
    request.landed()
    rig.quiet()


def test_a_destination_s_end_proves_nothing_about_our_copy() -> None:
    """The mapping outlives its owner: our pages are read until the event has happened."""
    rig, kernels, request = scene()
    request.send(9)
    copy = launched(rig, kernels)
    (peer,) = request.prefills[0].endpoint.peers()
    request.decodes[0].crash()
    request.prefills[0].endpoint.confirm_terminated(peer.epoch)
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the loss")
    rig.wait(5.0)
    assert not request.sends[0].released
    copy.run()
    rig.until(lambda: request.sends[0].released, "the end of the copy")
    assert request.prefills[0].endpoint.open_rooms == 0


def test_an_engine_s_event_that_raises_fails_the_room() -> None:
    """A copy behind it says so by its own event."""
    rig, kernels, request = scene()
    ready = Failing()
    request.send(9, ready=ready)
    copy = launched(rig, kernels)
    ready.error = OSError("the pass failed")
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the failure")
    assert "the pass failed" in str(request.sends[0].error)
    ready.error = None
    ready.fired = True
    copy.run()
    request.forgive()
    rig.until(lambda: all(h.released for h in request.handles), "the evidence")
    rig.quiet()


def test_a_retryable_error_of_a_launch_is_tried_again() -> None:
    """As for writes."""
    rig, kernels, request = scene()
    kernels.refuses = [TransportError("not now", retryable=True)]
    request.send(9).finish()
    launched(rig, kernels).run()
    request.landed()
    rig.quiet()


class Unmapped(InprocTransport):
    """Says why it does not map, or fails to."""

    says: str | None = None

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        return self.says

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        raise RegistrationError("no handle is left")


class Broken(InprocTransport):
    """Maps something else, or raises what is no error of this library."""

    short = False

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        if self.short:
            return Buffer(4096, 8)
        raise OSError("a library's error")


class Refuses(Unmapped):
    """As on a link without peer access."""

    says = "the two GPUs have no peer access"


class Short(Broken):
    """A mapping that is shorter than the peer's pool."""

    short = True


WRONG = {
    Refuses: "the two GPUs have no peer access",
    Unmapped: "no handle is left",
    Broken: "transport 'inproc' raised: a library's error",
    Short: "mapped pool: buffers of .* bytes, but the site's have",
}


@pytest.mark.parametrize("transport", WRONG)
def test_what_cannot_be_mapped_is_refused_by_name(transport: type[InprocTransport]) -> None:
    """An explicit path fails the room with the reason; ``auto`` takes another path, and says it."""
    memory = Memory(transport=transport)
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="mapped")
    request = rig.request("room", prefills, decodes, 9).start(9).failed()
    with pytest.raises(ConfigurationError, match=f"path 'mapped' cannot: {WRONG[transport]}"):
        raise request.sends[0].error or AssertionError
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory)
    for name in "12":
        report = rig.request(name, prefills, decodes, 9).start(9).landed().receives[0].report
    assert report.path == "staged"
    assert re.search(f"mapped cannot: prefill rank 0: {WRONG[transport]}", report.reason)
    rig.quiet()


class Uncompiled(DeviceKernels):
    """Kernels that have to be compiled, for copies between known pools; an ``error`` says why not for a peer's."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = error
        self.warmed: list[tuple[PagedMemory, PagedMemory]] = []

    def warm(self, pool: MemoryPool) -> None:
        """Nothing."""

    def warm_checksum(self, pool: MemoryPool) -> None:
        """Nothing."""

    def warm_copy(self, source: PagedMemory, target: PagedMemory) -> None:
        if self.error and isinstance(target, MappedPool):
            raise OSError(self.error)
        self.warmed.append((source, target))


def test_copies_are_compiled_at_the_start_and_for_a_mapped_pool_and_kernels_that_cannot_are_a_refusal() -> None:
    """For our own pool before there are peers. No request waits for the compiler; an error of it is in the reason."""
    for error in ("", "no compiler"):
        rig, kernels = Rig(SPEC), Uncompiled(error)
        prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=kernels)
        assert kernels.warmed == [(prefills[0].pool, prefills[0].pool)]
        request = rig.request("room", prefills, rig.decode(tp_shards(SPEC, 1), strategy="mapped"), 9).start(9)
        if error:
            refused = request.failed().sends[0].error or AssertionError()
            assert "path 'mapped' cannot: the kernels cannot copy into the mapped pool: no compiler" in str(refused)
        else:
            launched(rig, kernels).run()
            request.landed()
            _own, (source, target) = kernels.warmed
            assert source is prefills[0].pool
            assert isinstance(target, MappedPool)


class Crowded(Uncompiled):
    """A compiler that notices two threads in it."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = threading.Barrier(2)

    def warm_copy(self, source: PagedMemory, target: PagedMemory) -> None:
        with suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.2)
            raise AssertionError("two threads compile")
        super().warm_copy(source, target)


def test_one_thread_compiles_copies_at_a_time() -> None:
    """Peers that are connected at once need the same kernels."""
    kernels, pool = Crowded(), PagedPool.allocate(SPEC, tp_shards(SPEC, 1)[0], pages=1, page_size=4)
    mapped = MappedPool(pool.site, pool.buffers)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(ReadPools(pool, kernels, "off").warm, SPEC, mapped) for _ in range(2)]:
            done.result()
    assert len(kernels.warmed) == 2


def test_a_transport_that_maps_nothing_is_refused_at_once() -> None:
    """Both sides name the path and the transport."""

    def plain() -> Transport:
        return emulate(InprocTransport(), 1e9)

    rig = Rig(SPEC)
    for make in (rig.prefill, rig.decode):
        with pytest.raises(ConfigurationError, match="path 'mapped' copies into mapped pages, but transport 'inproc'"):
            make(tp_shards(SPEC, 1), memory=Memory(transport=plain), strategy="mapped")


@pytest.mark.parametrize("ends", ["withdraw", "abort"])
def test_rows_that_are_taken_away_before_a_step_saw_them_are_not_copied(ends: str) -> None:
    """The engine hands rows over, and takes them away or gives up, between two steps of the endpoint."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=DeviceKernels())
    request = rig.request("room", prefills, rig.decode(tp_shards(SPEC, 1), strategy="mapped"), 9)
    request.open_decode().expect(9).open_prefill()
    rig.until(lambda: request.sends[0].phase is Phase.READY, "the expectation")
    request.send(9)
    if ends == "abort":
        request.sends[0].abort("enough")
        request.failed()
    else:
        gone = request.sends[0].withdraw()
        rig.until(gone.query, "the withdrawal")
    assert not kernels_of(request).queued
    assert not prefills[0].observer.counters["errors.unforeseen"]
    if ends == "withdraw":
        request.send(9).finish()
        launched(rig, kernels_of(request)).run()
        request.landed()
    rig.quiet()


def faulty_rig(plan: MappingPlan, strategy: str) -> tuple[Rig, Request]:
    """A prefill rank whose transport maps with faults, and two decode ranks with a room from it."""
    rig, memory = Rig(SPEC), Memory(transport=lambda: FaultyTransport(InprocTransport(), mappings=plan))
    prefills = rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy=strategy, kernels=DeviceKernels())
    decodes = rig.decode(tp_shards(SPEC, 2), strategy="auto")
    return rig, rig.request("room", prefills, decodes, 9)


def test_a_mapping_that_fails_half_way_leaves_other_paths() -> None:
    """The second decode rank cannot be mapped; both get their bytes, and a wanted path says why it cannot."""
    why = f"injected: {MappingFault.REFUSED.value}"
    rig, request = faulty_rig({1: MappingFault.REFUSED}.get, "staged")
    request.start(9).landed()
    rig.quiet()
    rig, request = faulty_rig({1: MappingFault.REFUSED}.get, "mapped")
    request.start(9).failed()
    assert why in str(request.sends[0].error)
    rig.quiet()


def test_the_owner_of_mapped_memory_goes_away_while_a_copy_runs() -> None:
    """The room fails; its pages here are released once the copy has ended, whatever became of the owner."""
    rig, request = faulty_rig(faultless, "mapped")
    request.start(9)
    kernels = kernels_of(request)
    rig.until(lambda: bool(kernels.queued), "a launch")
    transport, send = request.prefills[0].transport, request.sends[0]
    assert isinstance(transport, FaultyTransport)
    transport.lose(transport.peer_of(request.decodes[0].transport.local_descriptor()))
    rig.until(lambda: send.phase is Phase.FAILED, "the loss")
    assert not send.released
    for copy in kernels.queued:
        copy.happened = True
    rig.until(lambda: send.released, "the end of the copy")


def test_an_owner_that_ends_while_it_is_mapped_is_lost() -> None:
    """No copy is launched."""
    rig, request = faulty_rig({0: MappingFault.PEER_LOST}.get, "mapped")
    request.start(9)
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the loss", turns=20_000)
    assert not kernels_of(request).queued


def kernels_of(request: Request) -> DeviceKernels:
    """Those of the prefill rank."""
    kernels = request.prefills[0].endpoint._transfers.mapped._kernels
    assert isinstance(kernels, DeviceKernels)
    return kernels
