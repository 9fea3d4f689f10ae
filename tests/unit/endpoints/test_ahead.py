"""Gathers are planned and prepared while their rows are computed, and launched, once a slot is free, when those are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from disagg_kv.core import Codec
from disagg_kv.core.wire.frames import Return
from disagg_kv.endpoints.loop.buffers import SendBuffer
from disagg_kv.endpoints.peers.limited_log import LimitedLog
from disagg_kv.endpoints.prefill.movers.prepared import PreparedGathers
from sim.accounts import check_gathers, check_side
from tests.support.prepared import ROW_BYTES, ROWS, SEGMENT, SEGMENTS, SPEC, granted
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import CountingKernels, FiredEvent, Over, PreparingKernels


def world(kernels: CountingKernels, decode: int = 1, slots: int = 64, rows: int = SEGMENT) -> Rig:
    """One rank to some ranks, in segments of as many rows as fill a slot, or of all."""
    rig, memory = Rig(SPEC), Memory(page_size=8)
    rig.prefill(
        tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=rows * ROW_BYTES, slots=slots,
        kernels=kernels,
    )  # fmt: skip
    rig.decode(tp_shards(SPEC, decode), memory=memory, strategy="staged", ring_bytes=1 << 17)
    return rig


def ahead(rig: Rig) -> PreparedGathers:
    """The prefill rank's."""
    prepared = rig.prefills[0].endpoint.inspect().transfers.staged.prepared
    assert prepared is not None
    return prepared


@pytest.mark.parametrize("slots", [64, 1])
def test_gathers_are_prepared_when_granted_and_launched_when_their_rows_are_there(slots: int) -> None:
    """Into whatever slot is free by then, however few there are."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, slots=slots)
    request = granted(rig, event)
    assert len(kernels.held) == SEGMENTS
    assert not kernels.launched
    event.fired = True
    request.landed()
    assert kernels.launched == [1] * SEGMENTS
    assert not kernels.gathers
    assert not kernels.held
    rig.quiet()


def test_one_gather_for_several_destinations_is_prepared_for_all_of_them() -> None:
    """Destinations granted by then are served by one gather."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, decode=2, rows=2 * ROWS)
    request = granted(rig, event)
    assert len(kernels.held) == 1
    event.fired = True
    request.landed()
    assert kernels.launched == [2]
    assert not kernels.gathers
    assert not kernels.held
    rig.quiet()


def test_destinations_of_the_same_bytes_are_prepared_as_one() -> None:
    """Ranks that keep the same heads get what is gathered once."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig, memory = Rig(SPEC), Memory(page_size=8)
    rig.prefill(
        tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=2 * ROWS * ROW_BYTES, slots=64,
        kernels=kernels,
    )  # fmt: skip
    rig.decode(tp_shards(SPEC, 8), memory=memory, strategy="staged", ring_bytes=1 << 17)
    request = granted(rig, event)
    rig.until(lambda: bool(kernels.held), "what is prepared for all eight")
    event.fired = True
    request.landed()
    assert kernels.launched == [4]
    assert not kernels.gathers
    rig.quiet()


def test_what_fills_more_than_a_slot_is_planned_alone() -> None:
    """Two destinations, each of whose parts takes a whole slot."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, decode=2, rows=ROWS // 2)
    request = granted(rig, event)
    assert not kernels.held
    assert sum(map(len, ahead(rig).planned.values())) == 2
    event.fired = True
    request.landed()
    assert kernels.gathers == [1, 1]
    assert not kernels.launched
    rig.quiet()


def test_what_was_prepared_for_all_is_not_launched_for_some() -> None:
    """Whoever is full is served later; the others' gather is another one then, whichever was prepared."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, decode=2, rows=2 * ROWS)
    request = granted(rig, event)
    mover = rig.prefills[0].endpoint._transfers.staged
    other = rig.decodes[1].endpoint.driver.loop.me.epoch
    mover.slots.full = lambda to: to == other  # type: ignore[method-assign]
    event.fired = True
    rig.wait(1.0)
    assert kernels.gathers == [1]
    assert not kernels.held
    mover.slots.full = lambda to: False  # type: ignore[method-assign]
    request.landed()
    assert kernels.gathers == [1, 1]
    assert not kernels.launched
    rig.quiet()


def test_what_is_prepared_goes_where_it_was_prepared_to_whichever_rows_are_handed_over_first() -> None:
    """Places depend on an order, which is the one that was prepared."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels, decode=2, rows=2 * ROWS)
    request = granted(rig, event)
    mover = rig.prefills[0].endpoint._transfers.staged
    add, later = mover.add, list[Callable[[], None]]()
    mover.add = lambda room, transfer: later.insert(0, partial(add, room, transfer))
    event.fired = True
    rig.wait(0.1)
    assert len(later) == 2
    for one in later:
        one()
    request.landed()
    assert kernels.launched == [2]
    rig.quiet()


def test_what_kernels_do_not_prepare_is_gathered_as_ever() -> None:
    kernels, event = PreparingKernels(most=1), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    event.fired = True
    request.landed()
    assert kernels.launched == [1]
    assert kernels.gathers == [1] * (SEGMENTS - 1)
    rig.quiet()


def test_nothing_is_foreseen_for_kernels_that_prepare_nothing() -> None:
    kernels, event = CountingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    assert rig.prefills[0].endpoint.inspect().transfers.staged.prepared is None
    event.fired = True
    request.landed()


@pytest.mark.parametrize("early", [False, True])
def test_pages_that_were_taken_away_are_not_gathered(early: bool) -> None:
    """A preempted room gives its grants back; what was prepared for them reads pages that it has no more.

    The rows are there before or after the new grants.
    """
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    first = list(kernels.held)
    fired = request.sends[0].withdraw()
    rig.until(fired.query, "the end of reads")
    event.fired = early
    request.send(ROWS, ready=event)
    rig.wait(1.0)
    assert early or not set(kernels.held) & set(first)
    event.fired = True
    request.landed()
    assert kernels.launched == ([] if early else [1] * SEGMENTS)
    assert not kernels.held
    rig.quiet()


def test_a_prepared_gather_of_what_is_compared() -> None:
    kernels, event = PreparingKernels(), FiredEvent()
    rig, memory = Rig(SPEC), Memory(page_size=8)
    rig.prefill(
        tp_shards(SPEC, 1), memory=memory, strategy="staged", slot_bytes=SEGMENT * ROW_BYTES, slots=64,
        kernels=kernels, verify="full",
    )  # fmt: skip
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17)
    request = granted(rig, event)
    event.fired = True
    request.landed()
    assert len(kernels.launched) == len(kernels.checksums) == SEGMENTS
    rig.quiet()


def test_a_gather_that_is_prepared_again_takes_the_place_of_the_first() -> None:
    """Nothing that was prepared is ever forgotten without being dropped."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    key, members = next(iter(ahead(rig).planned.items()))
    ahead(rig).gathers.prepare(key, lambda: ahead(rig)._gather(key[0], list(members.values())))
    assert len(kernels.held) == SEGMENTS
    event.fired = True
    request.landed()
    assert not kernels.held
    rig.quiet()


def test_the_accounts_see_what_is_foreseen_for_nobody() -> None:
    kernels, event = PreparingKernels(), FiredEvent()
    rig = world(kernels)
    request = granted(rig, event)
    endpoint = rig.prefills[0].endpoint
    check_side(endpoint.inspect())
    room, _ = next(iter(ahead(rig).gathers.ready))
    with pytest.raises(AssertionError, match="prepared for a room that is over"):
        check_gathers(ahead(rig), set(endpoint.inspect().rooms.values()) - {room})
    event.fired = True
    request.landed()


class WithoutReturns(Over):
    """Loses what says that a grant is given back."""

    def send(self, address: str, frame: bytes) -> bool:
        return isinstance(Codec().decode(frame), Return) or super().send(address, frame)


@pytest.mark.parametrize("case", ["two writers", "a Return is lost"])
def test_pages_that_were_taken_away_are_not_gathered_under_a_grant_that_outlives_them(case: str) -> None:
    """Decode grants the same lease again while another writer has it still, or while it knows of nothing."""
    kernels, event = PreparingKernels(), FiredEvent()
    rig, memory = Rig(SPEC), Memory(page_size=8)
    writers = 2 if case == "two writers" else 1
    rig.prefill(
        tp_shards(SPEC, writers), memory=memory, strategy="staged", slot_bytes=SEGMENT * ROW_BYTES, slots=64,
        kernels=kernels,
    )  # fmt: skip
    rig.decode(tp_shards(SPEC, 1), memory=memory, strategy="staged", ring_bytes=1 << 17)
    if writers == 1:
        node = rig.prefills[0].endpoint.driver.loop
        channel = WithoutReturns(node.channel)
        node._send_buffer = SendBuffer(channel, node.observer, LimitedLog(node.clock), node.failures.defer)
    request = granted(rig, event)
    assert kernels.held
    for one in request.sends:
        one.withdraw()
    for rank, member in enumerate(rig.prefills):
        for table in request.given[rank]:
            for pool in (member.pool, member.want):
                for plane in range(len(pool.site.planes)):
                    pool.view(plane)[table.pages] = 7
    event.fired = True
    request.send(ROWS)
    request.landed()
    assert not kernels.launched
    assert not kernels.held
    rig.quiet()
