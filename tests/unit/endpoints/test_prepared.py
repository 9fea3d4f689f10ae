"""Scatters are prepared while their bytes are on the way: launched when those are there, dropped with their lease."""

from __future__ import annotations

import attrs
import pytest

from disagg_kv.core import Phase, RoomKey
from disagg_kv.endpoints.decode.scatter import ScatterQueue
from disagg_kv.ids import Generation
from sim.accounts import check_side
from tests.support.prepared import ROW_BYTES, ROWS, SEGMENT, SEGMENTS, SPEC, granted
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import FiredEvent, PreparingKernels


def world(kernels: PreparingKernels, ranks: int = 1, pace: float | None = None) -> Rig:
    """Some ranks to one rank, in segments of eight rows."""
    rig, memory = Rig(SPEC), Memory(page_size=8)
    nbytes = SEGMENT * ROW_BYTES
    rig.prefill(tp_shards(SPEC, ranks), memory=memory, strategy="staged", slot_bytes=nbytes // ranks, slots=64)
    rig.decode(
        tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=kernels,
        scatter_bytes_per_s=pace,
    )  # fmt: skip
    return rig


def scatterer(rig: Rig) -> ScatterQueue:
    """The decode rank's."""
    return rig.decodes[0].endpoint._side.scatters


@pytest.mark.parametrize("ranks", [1, 2])
def test_segments_are_prepared_when_granted_and_launched_when_all_of_their_bytes_are_there(ranks: int) -> None:
    """One launch each; nothing is left to do then but to launch."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, ranks)
    request = granted(rig, event)
    assert len(kernels.held) == SEGMENTS
    assert not kernels.launched
    event.fired = True
    request.landed()
    assert kernels.launched == [ranks] * (SEGMENTS)
    assert not kernels.scatters
    assert not kernels.held
    rig.quiet()


def test_one_is_prepared_in_a_turn_so_that_what_comes_meanwhile_does_not_wait() -> None:
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = rig.request("room", rig.prefills, rig.decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    request.send(ROWS, ready=event).finish()
    seen: list[int] = []
    while len(kernels.held) < SEGMENTS:
        rig.turn()
        seen.append(len(kernels.held))
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 2, "a turn looks twice"
    event.fired = True
    request.landed()


def test_what_kernels_do_not_prepare_is_scattered_at_once_as_ever() -> None:
    """Prepared ones are launches of their own; the others, come together, are one."""
    kernels, event = PreparingKernels(most=2), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    event.fired = True
    request.landed()
    assert kernels.launched == [1, 1]
    assert sum(kernels.scatters) == SEGMENTS - 2
    rig.quiet()


def test_what_is_prepared_does_not_overtake_what_is_not() -> None:
    """And nothing that waits for the turn's work is forgotten for it."""
    kernels, event = PreparingKernels(), FiredEvent()
    kernels.fail_to_prepare = RuntimeError("not now")
    rig = world(kernels)
    request = rig.request("room", rig.prefills, rig.decodes, ROWS).open_decode().expect(ROWS).open_prefill()
    request.send(ROWS, ready=event).finish()
    counters = rig.decodes[0].observer.counters
    while not counters["scatters.not_prepared"]:
        rig.turn()
    kernels.fail_to_prepare = None
    rig.wait(1.0)
    unprepared = counters["scatters.not_prepared"]
    assert len(kernels.held) == SEGMENTS - unprepared
    event.fired = True
    request.landed()
    assert sum(kernels.scatters) == unprepared
    assert len(kernels.launched) == SEGMENTS - unprepared
    rig.quiet()


def test_what_was_prepared_ends_with_its_lease_and_is_prepared_anew_for_the_next() -> None:
    """A preempted room gives its leases back; the new ones may lie elsewhere."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    first = list(kernels.held)
    fired = request.sends[0].withdraw()
    rig.until(fired.query, "the end of reads")
    rig.until(lambda: not kernels.held, "the leases to come back")
    other = granted(rig, FiredEvent(), "other")
    request.send(ROWS, ready=event)
    rig.wait(1.0)
    assert len(kernels.held) == 2 * SEGMENTS
    assert not set(kernels.held) & set(first)
    event.fired = True
    rig.until(lambda: request.receives[0].phase is Phase.DONE, "the room")
    assert len(kernels.launched) == SEGMENTS
    other.receives[0].abort("is over")
    other.failed()
    rig.quiet()


def test_what_was_prepared_for_other_places_is_not_launched() -> None:
    """Whatever else goes wrong: a launch reads where the bytes are, or is none."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    prepared = scatterer(rig).prepared.ready
    for at, ready in prepared.items():
        prepared[at] = attrs.evolve(ready, condition={rank: base + 1 for rank, base in ready.condition.items()})
    event.fired = True
    request.landed()
    assert not kernels.launched
    assert not kernels.held
    assert sum(kernels.scatters) == SEGMENTS
    rig.quiet()


def test_a_prepared_scatter_keeps_to_the_pace() -> None:
    """A launch costs as much of it as any."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, pace=SEGMENT * ROW_BYTES / 5.0)
    request = granted(rig, event)
    event.fired = True
    rig.wait(2.0)
    assert 1 <= len(kernels.launched) <= 2
    request.landed()
    assert len(kernels.launched) == SEGMENTS
    rig.quiet()


def test_the_lease_stays_until_the_prepared_launch_has_ended() -> None:
    """I1: its event is what is waited for."""
    kernels, event = PreparingKernels(), FiredEvent()
    kernels.events = []
    rig = world(kernels)
    request = granted(rig, event)
    event.fired = True
    rig.wait(1.0)
    assert len(kernels.launched) == len(kernels.events) == SEGMENTS
    assert rig.decodes[0].endpoint.usage().ring_used_bytes
    assert request.receives[0].phase is Phase.MOVING
    for launched in kernels.events:
        launched.fired = True
    request.landed()
    rig.quiet()


def test_what_a_prepared_launch_brings_is_compared() -> None:
    kernels = PreparingKernels()
    rig, memory = Rig(SPEC), Memory(page_size=8)
    rig.prefill(tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=SEGMENT * ROW_BYTES, slots=64)
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17, kernels=kernels, verify="full")
    event = FiredEvent()
    request = granted(rig, event)
    event.fired = True
    request.landed()
    assert len(kernels.launched) == len(kernels.checksums) == SEGMENTS
    rig.quiet()


def test_the_accounts_see_what_is_prepared_for_nobody() -> None:
    """No room, no lease, or a place beside it."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    prepared, endpoint = scatterer(rig).prepared.ready, rig.decodes[0].endpoint
    (key, segment), ready = next(iter(prepared.items()))
    check_side(endpoint.inspect())
    for at, what in (
        ((RoomKey(key.room, Generation(99)), segment), ready),
        ((key, segment._replace(start=segment.start + 1)), ready),
        ((key, segment), attrs.evolve(ready, condition=dict.fromkeys(ready.condition, 1 << 20))),
    ):
        kept = prepared.copy()
        prepared[at] = what
        with pytest.raises(AssertionError):
            check_side(endpoint.inspect())
        prepared.clear()
        prepared.update(kept)
    event.fired = True
    request.landed()
