"""Path ``mapped_pull``: kernels of decode read prefill's pages, which wait until decode has read them or has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from disagg_kv.core import Options, Phase
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec, PageTable, Shard
from disagg_kv.ids import Peer, RegionId
from disagg_kv.memory import PagedPool
from disagg_kv.planning import tables_of
from disagg_kv.transports import InprocTransport, ShmTransport
from tests.support.device_copies import SPEC, Failing, launched, scene
from tests.support.rig import Memory, Request, Rig, tp_shards
from tests.support.rig_parts import Flag

QUICK = Options(silence_s=2.0, heartbeat_s=0.5)


def own(spec: CacheSpec, part: Shard, memory: Memory) -> PagedPool:
    """A pool in memory that no transport allocated."""
    return PagedPool.allocate(spec, part, pages=memory.pages, page_size=memory.page_size)


def test_pages_that_no_peer_can_map_are_refused_at_the_start() -> None:
    """Not by each room on decode."""
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


class Unmappable(InprocTransport):
    """Must not be asked."""

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        raise AssertionError("it maps what no path reads")


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    """On decode, which maps; prefill learns that the room has failed."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped_pull")
    memory = Memory(transport=Unmapped)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="mapped_pull", options=QUICK)
    request = rig.request("room", prefills, decodes, 9).start(9).failed()
    assert "path 'mapped_pull' cannot: no link between the GPUs" in str(request.receives[0].error)
    rig.quiet()


def test_an_engine_that_waits_for_peers_has_its_pages_written() -> None:
    """``auto`` of its decode maps no prefill rank, and allows no pull."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped_pull")
    decodes = rig.decode(tp_shards(SPEC, 1))
    request = rig.request("room", prefills, decodes, 9).start(9).failed()
    assert "theirs is [('mapped_pull', 1)]" in str(request.receives[0].error)


def by_itself(
    there: Memory | None = None, here: Memory | None = None, *, waits: bool = True, strategy: str = "auto"
) -> Request:
    """A request whose decode engine waits for no peer, and takes ``auto``; ``waits``: prefill's engine does."""
    rig = Rig(SPEC, options=QUICK)
    prefills = rig.prefill(tp_shards(SPEC, 2), memory=there, strategy=strategy, waits_for_peers=waits)
    decodes = rig.decode(tp_shards(SPEC, 1), memory=here, waits_for_peers=False)
    assert not decodes[0].endpoint.inspect().exposes
    return rig.request("room", prefills, decodes, 9).start(9)


def test_auto_pulls_where_decode_s_engine_waits_for_no_peer_and_prefill_s_does() -> None:
    """Decode allows that path alone, so that all writers cut segments by the same limits."""
    request = by_itself().landed()
    assert request.receives[0].report.path == "mapped_pull"
    for handle in request.sends:
        assert handle.report.reason.startswith("mapped_pull takes 0.")
        assert "staged cannot: decode does not allow it" in handle.report.reason
    request.rig.quiet()


@pytest.mark.parametrize("why", ["prefill", "mapping", "strategy", "memory"])
def test_auto_stages_where_it_may_not_pull(why: str) -> None:
    """As prefill's engine does not wait, as its memory cannot be mapped, or as prefill's strategy says so."""
    there = Memory(transport=ShmTransport, pool=own) if why == "memory" else None
    here = {"mapping": Memory(transport=Unmapped), "memory": Memory(transport=ShmTransport)}.get(why)
    strategy = "staged" if why == "strategy" else "auto"
    request = by_itself(there, here, waits=why != "prefill", strategy=strategy).landed()
    assert {handle.report.path for handle in request.handles} == {"staged"}
    request.rig.quiet()


def test_ranks_of_prefill_whose_strategies_differ_cut_alike() -> None:
    """One may be read, and one stages: both paths are allowed, and staging memory cuts the segments of both."""
    rig = Rig(SPEC, options=QUICK)
    shards = tp_shards(SPEC, 2)
    prefills = [*rig.prefill(shards, only=[0]), *rig.prefill(shards, only=[1], strategy="staged")]
    decodes = rig.decode(tp_shards(SPEC, 1), waits_for_peers=False)
    request = rig.request("room", prefills, decodes, 9).start(9).landed()
    assert [handle.report.path for handle in request.sends] == ["mapped_pull", "staged"]
    assert request.receives[0].report.path == "mapped_pull+staged"
    rig.quiet()


def test_a_cache_that_is_converted_is_not_mapped() -> None:
    """No kernel of decode converts, so ``auto`` stages it."""
    rig = Rig(CacheSpec.kv(2, 4, 8, "float32"), decoded=CacheSpec.kv(2, 4, 8, "float16"), options=QUICK)
    prefills = rig.prefill(tp_shards(rig.spec, 1))
    decodes = rig.decode(tp_shards(rig.decode_spec, 1), memory=Memory(transport=Unmappable), waits_for_peers=False)
    request = rig.request("room", prefills, decodes, 9).start(9).landed()
    assert request.receives[0].report.path == "staged"


def test_a_failed_room_of_an_engine_that_waits_for_no_peer_is_released_at_once() -> None:
    """Its pages depend on no peer, whatever that does."""
    request = by_itself()
    request.rig.until(lambda: request.receives[0].report.segments > 0, "the rows")
    again = request.rig.request("again", request.prefills, request.decodes, 9).open_decode().expect(9).open_prefill()
    again.send(4)
    request.rig.until(lambda: again.receives[0].report.segments > 0, "rows")
    for member in request.prefills:
        member.frozen = True
    again.receives[0].abort("enough")
    request.rig.wait(0.1, 0.01)
    assert (again.receives[0].phase, again.receives[0].released) == (Phase.FAILED, True)


@pytest.mark.parametrize(
    ("side", "strategy", "why"),
    [
        ("decode", "mapped", "has peers write into pages, and the engine does not wait for them"),
        ("decode", "direct", "has peers write into pages, and the engine does not wait for them"),
        ("prefill", "mapped_pull", "keeps pages until decode has read them or has ended, and the engine does not wait"),
    ],
)
def test_a_path_for_which_the_engine_would_have_to_wait_is_refused_at_the_start(
    side: str, strategy: str, why: str
) -> None:
    """By name, with the argument that says so."""
    rig = Rig(SPEC)

    def make(path: str) -> object:
        if side == "decode":
            return rig.decode(tp_shards(SPEC, 1), path, strategy=path, waits_for_peers=False)
        return rig.prefill(tp_shards(SPEC, 1), path, strategy=path, waits_for_peers=False)

    with pytest.raises(ConfigurationError, match=rf"path '{strategy}' {why}.*\(waits_for_peers\)"):
        make(strategy)
    for path in ("staged", "mapped_pull") if side == "decode" else ("staged", "mapped", "direct"):
        make(path)
