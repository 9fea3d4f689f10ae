"""Copies into mapped pages on a device: the engine's own call launches them, and only their events end them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import torch
from attrs import define

from disagg_kv.core import Phase
from disagg_kv.endpoints import PrefillEndpoint
from disagg_kv.endpoints.prefill.movers import mapped
from disagg_kv.errors import EndpointBrokenError, LocalProtocolError, TransportError
from disagg_kv.ids import LayerId
from disagg_kv.kernels import CpuKernels, PageMove
from disagg_kv.memory import Event, Flag, parts
from disagg_kv.strategies import LayerPipelined
from tests.support.device_copies import SPEC, Failing, Pass, Unordered, awaited, driven
from tests.support.rig import KV, Rig, tp_shards
from tests.support.rig_parts import FiredEvent


def test_the_engine_s_call_launches_for_all_destinations_and_no_other_thread_has_to_run() -> None:
    """One launch behind the engine's event, in ``close``."""
    found = driven(decode_tp=2).announce()
    assert not found.kernels.queued
    ready = FiredEvent()
    found.step.close(ready)
    (copy,) = found.kernels.queued
    assert (copy.after, len(copy.moves)) == (ready, 2)
    found.request.finish()
    found.rig.wait(1.0)
    assert [h.phase for h in found.request.receives] == [Phase.MOVING] * 2
    ready.fired = True
    copy.run()
    found.request.landed()
    assert len(found.kernels.queued) == 1
    assert found.request.sends[0].report.descriptors == 2
    found.rig.quiet()


def test_rows_that_were_not_announced_are_launched_by_the_call_that_hands_them_over() -> None:
    """No pass has to be announced for that."""
    found = driven()
    found.request.send(9)
    (copy,) = found.kernels.queued
    copy.run()
    found.request.finish().landed()
    found.rig.quiet()


def test_each_group_of_layers_is_launched_by_the_layer_that_completes_it() -> None:
    """Behind the events of exactly its layers."""
    found = driven(LayerPipelined(fixed=1)).announce()
    events = [FiredEvent(), FiredEvent()]
    for layer, event in enumerate(events):
        found.step.layer_ready(LayerId(layer), event)
        assert [copy.after for copy in found.kernels.queued] == events[: layer + 1]
    found.step.close()
    found.request.finish()
    for event, copy in zip(events, found.kernels.queued, strict=True):
        event.fired = True
        copy.run()
    found.request.landed()
    found.rig.quiet()


def test_layers_of_one_function_s_event_are_launched_behind_it() -> None:
    """A layer without an event of its own is not launched before the function has made one."""
    found = driven(LayerPipelined(fixed=2)).announce()
    made: list[FiredEvent] = []

    def mark() -> Event:
        made.append(FiredEvent())
        return made[-1]

    found.step.layer_ready(LayerId(0), mark)
    assert not found.kernels.queued
    found.step.layer_ready(LayerId(1), mark)
    found.step.close()
    (copy,) = found.kernels.queued
    assert made[-1] in parts(copy.after)
    for event in made:
        event.fired = True
    copy.run()
    found.request.finish().landed()


def test_rows_behind_two_events_wait_for_both() -> None:
    """Of one group; an event that they share is waited for once."""
    found = driven().announce()
    events = FiredEvent(), FiredEvent()
    found.step.layer_ready(LayerId(0), events[0])
    found.step.close(events[1])
    (copy,) = found.kernels.queued
    assert list(parts(copy.after)) == list(events)
    for event in events:
        event.fired = True
    copy.run()
    found.request.finish().landed()


def call(found: Pass) -> None:
    """Another call of prefill's engine advances the endpoint."""
    found.request.prefills[0].endpoint.driver.drive()


def test_nothing_is_launched_while_the_engine_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of the engine launches it, or the endpoint's thread."""
    for thread in (False, True):
        found = driven().announce()
        with monkeypatch.context() as changes:
            changes.setattr(torch.cuda, "is_initialized", lambda: True)
            changes.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            found.step.close()
            call(found)
        assert not found.kernels.queued
        if thread:
            found.rig.turn()
        else:
            call(found)
        (copy,) = found.kernels.queued
        copy.run()
        found.request.finish().landed()


def test_an_event_that_no_device_awaits_keeps_no_call() -> None:
    """Rows are final once it has happened, and whoever advances then launches their copy."""
    for fired in (True, False):
        found = driven(kernels=Unordered()).announce()
        ready = FiredEvent()
        ready.fired = fired
        found.step.close(ready)
        assert len(found.kernels.queued) == fired
        found.rig.wait(1.0)
        assert len(found.kernels.queued) == fired
        ready.fired = True
        call(found)
        (copy,) = found.kernels.queued
        copy.run()
        found.request.finish().landed()


def test_an_event_that_raises_fails_the_room_and_not_the_call() -> None:
    """No copy is launched."""
    found = driven(kernels=Unordered()).announce()
    ready = Failing()
    ready.error = OSError("the pass failed")
    found.step.close(ready)
    found.request.failed()
    assert "the pass failed" in str(found.request.sends[0].error)
    assert not found.kernels.queued
    found.rig.quiet()


def test_an_error_of_a_launch_fails_the_room_and_not_the_call() -> None:
    """Nothing of it moves, so pages come back at once."""
    found, before = driven().announce(), set(mapped._RUNNING)
    found.kernels.refuses = [OSError("no launch")]
    found.step.close()
    found.request.failed()
    assert "no launch" in str(found.request.sends[0].error)
    found.rig.quiet()
    assert mapped._RUNNING.keys() == before


def test_a_retryable_error_of_a_launch_is_tried_again() -> None:
    """As for writes; the engine's call does not wait for that."""
    found = driven().announce()
    found.kernels.refuses = [TransportError("not now", retryable=True)]
    found.step.close()
    found.request.finish()
    found.rig.until(lambda: len(found.kernels.queued) == 1, "the second try")
    found.kernels.queued[0].run()
    found.request.landed()
    found.rig.quiet()


@pytest.mark.parametrize("point", ["begin", "end"])
def test_an_interrupted_launch_frees_nothing(point: str) -> None:
    """Whether it runs is never known. The interrupt reaches the engine; its pages are kept, and stay mapped."""
    interrupted_launch(point)


def interrupted_launch(point: str) -> None:
    """A launch is interrupted at a point of it."""
    found, before = driven().announce(), set(mapped._RUNNING)
    (room,) = found.request.prefills[0].endpoint.inspect().rooms.values()
    (route,) = room.routes.values()

    def interrupt(where: str) -> None:
        if where == point:
            raise KeyboardInterrupt

    found.kernels.at = interrupt
    with pytest.raises(KeyboardInterrupt):
        found.step.close()
    (send,) = found.request.sends
    assert isinstance(send.error, EndpointBrokenError)
    found.kernels.finish()
    found.rig.prefills.clear()  # it takes no calls any more
    found.rig.wait(5.0)
    assert not send.released
    assert found.request.receives[0].released is (point == "end"), "decode has the rows of a copy that has ended"
    found.request.prefills[0].close()
    assert (send.phase, send.released) == (Phase.FAILED, False)
    kept = [one for one in mapped._RUNNING if one not in before]
    assert [(m.source.pool, m.target.pool) for one in kept for m in one.moves] == [(route.pool, route.mapped)]
    del mapped._RUNNING[kept[0]]


class Noting(CpuKernels):
    """Notes which thread copies."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> None:
        self.threads.append(threading.current_thread())
        super().copy(moves, after, flags)


def test_kernels_that_copy_in_the_call_are_left_to_the_endpoint_s_thread() -> None:
    """They would keep the engine's thread."""
    rig, kernels = Rig(SPEC, threaded=True), Noting()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=kernels)
    request = awaited(rig, prefills, rig.decode(tp_shards(SPEC, 1), strategy="mapped"), "room")
    (table,) = request.pages(0, 9)
    prefills[0].endpoint.step({request.room: (9, [table])}).close()
    request.finish().landed()
    rig.close()
    assert kernels.threads
    assert threading.current_thread() not in kernels.threads


def test_withdrawn_pages_are_not_launched_and_rows_given_again_are() -> None:
    """The pass that computed the withdrawn ones is closed after that."""
    found = driven().announce()
    gone = found.request.sends[0].withdraw()
    found.step.close()
    assert not found.kernels.queued
    assert gone.query()
    found.announce().step.close()
    (copy,) = found.kernels.queued
    copy.run()
    found.request.finish().landed()
    found.rig.quiet()


@contextmanager
def without_advance(endpoint: PrefillEndpoint) -> Iterator[None]:
    """Calls of its engine do not advance it, as where another thread does."""
    driver, drive = endpoint.driver, endpoint.driver.drive
    driver.drive = lambda patience_s=0.0: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        driver.drive = drive  # type: ignore[method-assign]


def test_pages_that_are_taken_away_and_given_again_are_not_confused() -> None:
    """The copy reads the pages that were given last, also where an advance sees all of it at once."""
    found = driven().announce()
    endpoint = found.request.prefills[0].endpoint
    with without_advance(endpoint):
        gone = found.request.sends[0].withdraw()
        (again,) = found.request.pages(0, 9)
        endpoint.step({found.request.room: (9, [again])}).close()
    assert not gone.query()
    found.rig.turn()
    assert gone.query()
    (copy,) = found.kernels.queued
    assert copy.moves[0].source.tables[KV].pages.tolist() == again.pages.tolist()
    copy.run()
    found.request.finish().landed()
    found.rig.quiet()


def test_a_pass_that_is_never_closed_holds_nothing() -> None:
    """Its room ends, and a late ``close`` launches nothing."""
    found = driven().announce()
    found.request.sends[0].abort("the engine gave up")
    found.request.failed()
    found.rig.quiet()
    found.step.close()
    assert not found.kernels.queued


POINTS = ("before", "begin", "end", "after")
"""Where others can act: around the engine's ``close``, and around the launch inside it."""

INSIDE = POINTS.index("begin"), POINTS.index("end")
NEVER = len(POINTS)


@define(eq=False)
class World:
    """One interleaving of the engine's ``close`` with what else happens.

    Args:
        found: with one room of its own, whose rows are announced.
        abort: the point at which the room is given up.
        by_decode: decode's engine gives it up, or another thread of prefill's engine.
        ended: the point at which the device has ended, if it was launched by then.
        withdraw: the engine withdraws before its ``close``, after it, or never.
        steps: points at which the endpoints' threads run.
    """

    found: Pass
    abort: int
    by_decode: bool
    ended: int
    withdraw: str
    steps: frozenset[int]
    gone: Event | None = None
    aborted: bool = False
    inside: bool = False

    def run(self) -> None:
        """All of it, with the promises looked at after every act."""
        found = self.found
        found.kernels.at = lambda where: self.at(POINTS.index(where))
        self.at(0)
        if self.withdraw == "before":
            self.gone = found.request.sends[0].withdraw()
            self.check()
        found.step.close()
        found.kernels.at = lambda where: None
        self.check()
        if self.withdraw == "after":
            self.gone = found.request.sends[0].withdraw()
        self.at(NEVER - 1)
        found.request.finish()
        self.end()

    def at(self, point: int) -> None:
        """What the others do here."""
        self.inside = point in INSIDE
        if point >= self.abort and not self.aborted:  # a point inside the launch is not reached if there is none
            self.aborted = True
            handles = self.found.request.receives if self.by_decode else self.found.request.sends
            handles[0].abort("enough")
        if point in self.steps:
            for member in self.found.rig.members:
                member.endpoint.driver.step()
        if point >= self.ended:
            self.found.kernels.finish()
        self.check()
        self.inside = False

    def check(self) -> None:
        """No page is free that may be read or written; nothing is launched twice."""
        kernels, request = self.found.kernels, self.found.request
        assert len(kernels.queued) <= 1
        if self.inside or not all(copy.happened for copy in kernels.queued):
            assert not any(handle.released for handle in request.handles)
            assert self.gone is None or not self.gone.query()
        if self.withdraw == "before":
            assert not kernels.queued, "pages that were withdrawn are read"

    def end(self) -> None:
        """Everything ends, as it must."""
        rig, request = self.found.rig, self.found.request
        rig.turn()
        self.check()
        self.found.kernels.finish()
        if self.abort < NEVER:
            rig.until(lambda: all(h.released for h in request.handles), "the end")
            request.ended()
        else:
            if self.withdraw != "never":
                self.again()
            rig.until(lambda: all(h.released for h in request.handles), "the end")
            request.done()
        rig.check()
        assert self.gone is None or self.gone.query()
        rig.quiet()

    def again(self) -> None:
        """The rows are computed again, in other pages; those of a copy that had begun are there already."""
        self.found.kernels.queued = []
        self.found.request.send(9)
        for _ in range(8):
            self.found.rig.turn()
            self.found.kernels.finish()


WORLDS = [
    (abort, by_decode, ended, withdraw, frozenset(steps))
    for abort in range(NEVER + 1)
    for by_decode in ((False, True) if abort < NEVER else (True,))
    for ended in (POINTS.index("end"), POINTS.index("after"), NEVER)
    for withdraw in ("never", "before", "after")
    for count in range(len(INSIDE) + 1 if withdraw != "before" else 1)
    for steps in itertools.combinations(INSIDE, count)
]


def test_every_interleaving_of_launch_withdraw_and_abort_keeps_the_promises() -> None:
    """Every order of the engine's call, an abort, a withdrawal, the device's end and steps of endpoints' threads."""
    assert len(WORLDS) == 9 * 3 * (4 + 1 + 4)
    found = driven()
    launches = 0
    for number, world in enumerate(WORLDS):
        found.kernels.queued = []
        World(found.announce(), *world).run()
        launches += len(found.kernels.queued)
        found = found.another(f"room {number}")
    assert launches > len(WORLDS) // 2


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_an_endpoint_that_closes_at_any_point_frees_no_page_of_a_copy(point: str, ended: bool) -> None:
    """As a signal handler may close it: pages are kept if a copy was launched that has not ended."""
    found = driven().announce()
    endpoint, handle = found.request.prefills[0].endpoint, found.request.sends[0]

    def at(where: str) -> None:
        if where == point:
            if ended:
                found.kernels.finish()
            endpoint.close(0.0)

    found.kernels.at = at
    at("before")
    if point == "before":
        assert handle.released
    with suppress(LocalProtocolError):
        found.step.close()
    at("after")
    endpoint.close(0.0)
    assert handle.phase is Phase.FAILED
    assert len(found.kernels.queued) == (point != "before")
    assert handle.released == all(copy.happened for copy in found.kernels.queued)
