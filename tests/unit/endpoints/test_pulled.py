"""Path ``mapped_pull``: kernels of decode read prefill's pages, which wait until decode has read them or has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec, PageTable, Shard
from disagg_kv.ids import Peer, RegionId
from disagg_kv.memory import PagedPool
from disagg_kv.planning import tables_of
from disagg_kv.protocol import Options, Phase
from disagg_kv.transports import InprocTransport, ShmTransport
from tests.support.device_copies import SPEC, Failing, launched, scene
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import Flag

QUICK = Options(silence_s=2.0, heartbeat_s=0.5)


def test_pages_that_no_peer_can_map_are_refused_at_the_start() -> None:
    """Not by each room on decode."""

    def own(spec: CacheSpec, part: Shard, memory: Memory) -> PagedPool:
        return PagedPool.allocate(spec, part, pages=memory.pages, page_size=memory.page_size)

    with pytest.raises(ConfigurationError, match="allocate the pool with it"):
        Rig(SPEC).prefill(tp_shards(SPEC, 1), memory=Memory(transport=ShmTransport, pool=own), strategy="mapped_pull")


def test_rows_are_offered_when_they_are_final_and_land_when_they_are_read() -> None:
    """No earlier, either of them; writers that offer together share a launch."""
    rig, kernels, request = scene("mapped_pull", prefill_tp=4)
    ready = Flag()
    request.send(9, ready=ready).finish()
    rig.wait(1.0)
    assert not kernels.queued, "rows that are not final were offered"
    ready.fired = True
    rig.until(lambda: sum(len(copy.moves) for copy in kernels.queued) == 4, "the pulls")
    assert len(kernels.queued) < 4
    rig.wait(1.0)
    assert [h.phase for h in request.receives] == [Phase.MOVING]
    assert not any(h.released for h in request.handles)
    for copy in kernels.queued:
        copy.run()
    request.landed()
    assert request.receives[0].report.path == "mapped_pull"
    assert request.sends[0].report.reason == "mapped_pull was asked for"
    pulls = [span for span in request.decodes[0].observer.spans if span.name == "pull"]
    assert sum(span.nbytes for span in pulls) == request.receives[0].report.nbytes > 0
    assert {span.labels["peer"] for span in pulls} == {peer.epoch.hex() for peer in request.decodes[0].endpoint.peers()}
    rig.quiet()


def test_decode_needs_no_evidence_about_prefill() -> None:
    """No process writes: a failed room's pages are free although prefill is silent."""
    rig, kernels, request = scene("mapped_pull", options=QUICK)
    request.send(9)
    launched(rig, kernels).run()
    rig.until(lambda: request.receives[0].report.segments == 1, "the rows")
    request.prefills[0].crash()
    rig.until(lambda: request.receives[0].phase is Phase.FAILED, "the loss")
    assert request.receives[0].released


@pytest.mark.parametrize("goes_on", [True, False])
def test_silence_of_decode_frees_nothing(goes_on: bool) -> None:
    """What decode reads when it goes on must be what was offered: only its word, or its end, frees the pages."""
    rig, kernels, request = scene("mapped_pull", options=QUICK)
    request.send(9).finish()
    copy = launched(rig, kernels)
    (peer,) = request.prefills[0].endpoint.peers()
    request.decodes[0].frozen = True
    rig.until(lambda: request.sends[0].phase is Phase.FAILED, "the loss")
    rig.wait(5.0)
    assert not request.sends[0].released
    (held,) = request.prefills[0].endpoint.peers()
    assert (held.state, held.page_bytes) == ("lost", 2304)
    if not goes_on:
        request.prefills[0].endpoint.confirm_terminated(peer.epoch)
        rig.until(lambda: request.sends[0].released, "the evidence")
        return
    request.decodes[0].frozen = False
    rig.wait(5.0)
    assert request.receives[0].phase is Phase.FAILED
    assert not request.sends[0].released, "its kernel still reads"
    copy.run()
    rig.until(lambda: all(h.released for h in request.handles), "the end of the kernel")


def test_pages_of_decode_that_are_not_writable_yet_hold_a_pull_back() -> None:
    """Rows are read once the engine's event says so."""
    rig, kernels, request = scene("mapped_pull")
    ready = Flag()
    other = rig.request("other", request.prefills, request.decodes, 9).open_decode().expect(9, ready=ready)
    other.open_prefill().send(9).finish()
    rig.wait(1.0)
    assert not kernels.queued
    ready.fired = True
    launched(rig, kernels).run()
    other.landed()


def test_a_launch_that_fails_for_several_parts_is_made_for_each() -> None:
    """One of them may be at fault, or they are too many for one."""
    rig, kernels, request = scene("mapped_pull", prefill_tp=2)
    kernels.refuses = [OSError("too many")]
    request.send(9).finish()
    rig.until(lambda: sum(len(copy.moves) for copy in kernels.queued) == 2, "the pulls")
    for copy in kernels.queued:
        copy.run()
    request.landed()
    rig.quiet()


def test_pages_that_prefill_does_not_have_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered is checked before a kernel reads it; the room fails, and the next one does not."""
    rig, kernels, request = scene("mapped_pull")

    def wrong(*args: Any) -> Iterator[PageTable]:
        for table in tables_of(*args):
            yield PageTable(table.group, table.pages + (1 << 20), table.first)

    with monkeypatch.context() as patch:
        patch.setattr("disagg_kv.endpoints.prefill.routes.tables_of", wrong)
        request.send(9).failed()
    assert "offers pages that cannot be" in str(request.receives[0].error)
    assert not kernels.queued
    other = rig.request("other", request.prefills, request.decodes, 9).start(9)
    launched(rig, kernels).run()
    other.landed()
    rig.quiet()


def test_an_event_of_decode_s_engine_that_raises_fails_the_room() -> None:
    """It says when decode's pages may be written; nothing was read until then."""
    rig, kernels, request = scene("mapped_pull")
    ready = Failing()
    other = rig.request("other", request.prefills, request.decodes, 9).open_decode().expect(9, ready=ready)
    other.open_prefill().send(9)
    rig.wait(1.0)
    ready.error = RuntimeError("the step failed")
    other.failed()
    assert "the step failed" in str(other.receives[0].error)
    assert not kernels.queued
    request.send(9).finish()
    launched(rig, kernels).run()
    request.landed()
    rig.quiet()


def test_pulls_keep_to_the_pace_of_scatters() -> None:
    """``scatter_bytes_per_s`` bounds what comes into pages, over any path."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 4), strategy="mapped_pull")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped_pull", scatter_bytes_per_s=576.0)
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()
    began = rig.clock()
    request.send(9).finish().landed()
    assert 2.5 < rig.clock() - began < 10.0
    rig.quiet()


class Unmapped(InprocTransport):
    """Maps nothing, and says why."""

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        return "no link between the GPUs"


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    """On decode, which maps; prefill learns that the room has failed."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped_pull")
    memory = Memory(transport=Unmapped)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="mapped_pull", options=QUICK)
    request = rig.request("room", prefills, decodes, 9).start(9).failed()
    assert "path 'mapped_pull' cannot: no link between the GPUs" in str(request.receives[0].error)
    rig.quiet()


def test_both_sides_have_to_name_it() -> None:
    """``auto`` of decode maps no prefill rank, and allows no pull."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped_pull")
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 9).start(9).failed()
    assert "theirs is [('mapped_pull', 1)]" in str(request.receives[0].error)
