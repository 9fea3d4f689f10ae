"""Scatters keep to a pace, so that what arrives does not hold up what is being decoded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.core import Phase
from disagg_kv.endpoints.decode.scatter import BURST_S, RateLimiter
from disagg_kv.errors import ConfigurationError, UnsupportedError
from disagg_kv.geometry import CacheSpec
from disagg_kv.kernels import Move
from disagg_kv.memory import Buffer, Event, MemoryPool
from tests.support.rig import STEP_S, Memory, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, FiredEvent

SPEC = CacheSpec.kv(4, 4, 8, "float16")
ROW_BYTES = 4 * 2 * 4 * 16
ROWS = 128


def world(pace: float | None) -> tuple[Rig, CountingKernels]:
    """One rank to one rank, in segments of eight rows."""
    rig, kernels = Rig(SPEC), CountingKernels()
    memory = Memory(page_size=8, pages=64)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=8 * ROW_BYTES, slots=16)
    rig.decode(
        tp_shards(SPEC, 1),
        memory=memory,
        strategy="staged",
        ring_bytes=1 << 17,
        kernels=kernels,
        scatter_bytes_per_s=pace,
    )
    return rig, kernels


def test_bytes_per_second_stay_below_the_pace() -> None:
    """Two segments a turn; a pause saves up a burst and one piece of work, never more. Every byte arrives."""
    segment = 8 * ROW_BYTES
    pace = 2 * segment / STEP_S
    rig, kernels = world(pace)
    request = rig.request("room", rig.prefills, rig.decodes, ROWS).start()
    began: float | None = None
    while not all(h.released for h in request.handles):
        before = len(kernels.scatters)
        rig.turn()
        if began is None and len(kernels.scatters) > before:
            began = rig.clock()
        if began is not None:
            most = pace * (rig.clock() - began + BURST_S) + 2 * segment
            assert len(kernels.scatters) * segment <= most
    assert rig.clock() - (began or 0) >= (ROWS * ROW_BYTES - 4 * segment) / pace - BURST_S
    request.landed()
    rig.quiet()


def test_without_a_pace_everything_is_scattered_as_it_comes() -> None:
    """The control."""
    rig, kernels = world(None)
    request = rig.request("room", rig.prefills, rig.decodes, ROWS).start()
    most = 0
    while not all(h.released for h in request.handles):
        before = len(kernels.scatters)
        rig.turn()
        most = max(most, len(kernels.scatters) - before)
    assert most > 3
    request.landed()


def test_a_room_that_fails_does_not_wait_for_its_pace() -> None:
    """A scatter that has not begun is given up, its pages and leases come back, and others go on."""
    rig, kernels = world(8 * ROW_BYTES / 5.0)
    request = rig.request("room", rig.prefills, rig.decodes, ROWS).start()
    rig.wait(1.0)
    begun = len(kernels.scatters)
    assert 1 <= begun <= 2
    request.receives[0].abort("changed its mind")
    rig.wait(2.0)
    assert request.receives[0].released
    assert len(kernels.scatters) == begun
    rig.quiet()
    request.forgive()
    rig.request("other", rig.prefills, rig.decodes, 16).start().landed()


def test_the_bucket() -> None:
    """Work of any size begins; what follows waits the longer. Unused time counts up to the burst."""
    pacer = RateLimiter(100.0, 0.5)
    assert pacer.ready(10.0)
    pacer.begin(40, 10.0)
    assert pacer.ready(10.0), "half a second is saved up"
    pacer.begin(200, 10.0)
    assert not pacer.ready(11.8)
    assert pacer.ready_at == pytest.approx(11.9)
    pacer.begin(10, 100.0)
    assert pacer.ready_at == pytest.approx(99.6)
    for pace, burst in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(ConfigurationError):
            RateLimiter(pace, burst)


class Queued(CountingKernels):
    """Launches are queued, as on a GPU; they have ended when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.events = []

    def orders(self, event: Event) -> bool:
        """Whatever it is."""
        return True


@pytest.mark.parametrize("queued", [True, False])
def test_what_came_together_is_one_launch_where_launches_are_queued(queued: bool) -> None:
    """A launch costs the thread more than a segment does; a CPU that copies by itself takes them one by one."""
    rig, kernels = Rig(SPEC), Queued() if queued else CountingKernels()
    memory = Memory(page_size=8, pages=64)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=8 * ROW_BYTES, slots=64)
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=kernels)
    requests = [rig.request(name, rig.prefills, rig.decodes, 32) for name in ("a", "b")]
    for request in requests:
        request.start()
    rig.until(lambda: sum(kernels.scatters) == 8, "all scatters")
    rig.wait(1.0)
    assert len(kernels.scatters) == (1 if queued else 8)
    if kernels.events is not None:
        assert all(request.receives[0].phase is Phase.MOVING for request in requests)
        assert rig.decodes[0].endpoint.usage().ring_used_bytes > 0
        for event in kernels.events:
            event.fired = True
    for request in requests:
        request.released().done()
    rig.check()
    rig.quiet()


class Picky(Queued):
    """Launches no more than one move at a time."""

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Refuse, or count and pass on."""
        if len(moves) > 1:
            raise UnsupportedError("too many")
        event = super().scatter(pool, moves, staging)
        assert isinstance(event, FiredEvent)
        event.fired = True
        return event


def test_a_launch_of_several_segments_that_fails_is_tried_one_by_one() -> None:
    """One room's error is no other room's; and what is too much for one launch is not too much for several."""
    rig, kernels = Rig(SPEC), Picky()
    memory = Memory(page_size=8, pages=64)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=8 * ROW_BYTES, slots=64)
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=kernels)
    rig.request("room", rig.prefills, rig.decodes, 32).start().landed()
    assert kernels.scatters == [1] * 4
    rig.quiet()


def test_a_launch_takes_no_more_than_was_prepared_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launch needs must not be allocated while others run."""
    monkeypatch.setattr("disagg_kv.endpoints.decode.scatter.ENTRIES", 9)
    rig, kernels = Rig(SPEC), Queued()
    memory = Memory(page_size=8, pages=64)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=8 * ROW_BYTES, slots=64)
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=kernels)
    request = rig.request("room", rig.prefills, rig.decodes, 32).start()
    rig.until(lambda: sum(kernels.scatters) == 4, "all scatters")
    assert kernels.scatters == [2, 2]
    assert kernels.events is not None
    for event in kernels.events:
        event.fired = True
    request.landed()
    rig.quiet()


def test_launches_that_fail_fail_their_rooms_and_free_their_leases() -> None:
    """Each with its error."""
    rig, kernels = Rig(SPEC), Queued()
    memory = Memory(page_size=8, pages=64)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged")
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=kernels)
    requests = [rig.request(name, rig.prefills, rig.decodes, 32) for name in ("a", "b")]
    kernels.fail = RuntimeError("no launch")
    for request in requests:
        request.start()
    for request in requests:
        request.failed()
        assert "no launch" in request.errors()
    rig.quiet()
