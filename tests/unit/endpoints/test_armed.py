"""Copies that are armed: the engine's own call launches them, and one atomic take decides against an abort."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import pytest
from attrs import define, field

from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.prefill.armed import Armed
from disagg_kv.endpoints.prefill.handle import ForwardPass
from disagg_kv.errors import TransportError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import LayerId
from disagg_kv.kernels import PageMove, PreparedCopy
from disagg_kv.memory import Bell, Event, bytes_of, parts
from disagg_kv.strategies import LayerPipelined
from tests.support.device_copies import DeviceKernels
from tests.support.rig import KV, Decodes, PrefillOptions, Prefills, Request, Rig, tp_shards
from tests.support.rig_parts import Flag

SPEC = CacheSpec.kv(2, 4, 8, "float16")


@define(eq=False)
class Prepared:
    """A prepared copy; counts what becomes of it."""

    kernels: ArmingKernels
    moves: Sequence[PageMove]
    bells: Sequence[Bell]

    def launch(self, after: Event | None) -> Event | None:
        self.kernels.ends.append("launched")
        self.kernels.at("begin")
        event = self.kernels.copy(self.moves, after, self.bells)
        self.kernels.at("end")
        return event

    def drop(self) -> None:
        self.kernels.ends.append("dropped")


class ArmingKernels(DeviceKernels):
    """Kernels whose copies are prepared; ``at`` is called where the engine's thread may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = False
        self.ends: list[str] = []
        self.at: Callable[[str], None] = lambda where: None

    def prepare_copy(self, moves: Sequence[PageMove], bells: Sequence[Bell] = ()) -> PreparedCopy | None:
        return Prepared(self, moves, bells)

    def may_launch(self) -> bool:
        self.at("due")
        return not self.captures


@define(eq=False)
class Scene:
    """One prefill rank with kernels that copy at the test's word, and the rooms that it sends to a decode rank."""

    rig: Rig
    kernels: ArmingKernels
    request: Request
    step: ForwardPass = field(init=False)

    def finish(self) -> None:
        """The device gets to what is launched."""
        for copy in self.kernels.queued:
            if not copy.happened:
                copy.run()

    def announce(self, stop: int = 9) -> Scene:
        """A forward pass begins, and what it computes is armed."""
        (table,) = self.request.pages(0, stop)
        self.step = self.request.prefills[0].endpoint.step({self.request.room: (stop, [table])})
        self.rig.turn()
        self.rig.turn()
        return self

    def another(self, name: str) -> Scene:
        """A room beside it, once pages of earlier ones are free again."""
        for table in self.request.given.pop(0, []):
            self.request.prefills[0].give(table)
        self.request.decodes[0].give(self.request.taken[0])
        return Scene(self.rig, self.kernels, awaited(self.rig, self.request.prefills, self.request.decodes, name))

    @property
    def armed(self) -> int:
        """Copies that are armed."""
        return len(self.request.prefills[0].endpoint.inspect().transfers.copies.armed)


def scene(
    schedule: LayerPipelined | None = None,
    decode_tp: int = 1,
    kernels: ArmingKernels | None = None,
    options: Options | None = None,
) -> Scene:
    """A room that decode awaits and prefill has open, with nothing announced yet."""
    rig, kernels = Rig(SPEC, options=options), kernels or ArmingKernels()
    more: PrefillOptions = {"strategy": "mapped", "kernels": kernels}
    if schedule is not None:
        more["schedule"] = schedule
    prefills = rig.prefill(tp_shards(SPEC, 1), **more)
    decodes = rig.decode(tp_shards(SPEC, decode_tp), strategy="mapped")
    return Scene(rig, kernels, awaited(rig, prefills, decodes, "room"))


def awaited(rig: Rig, prefills: Prefills, decodes: Decodes, name: str) -> Request:
    """A room of nine rows that decode awaits and prefill has open."""
    request = rig.request(name, prefills, decodes, 9).open_decode().expect(9).open_prefill()
    rig.until(lambda: request.sends[0].held is not None, "the expectation")
    return request


def test_the_engine_s_call_launches_for_all_destinations_and_no_endpoint_has_to_run() -> None:
    """One launch behind the engine's event, in ``close``; what was planned before is used."""
    found = scene(decode_tp=2).announce()
    assert found.armed == 1
    assert not found.kernels.queued
    ready = Flag()
    found.step.close(ready)
    (copy,) = found.kernels.queued
    assert (copy.after, len(copy.moves)) == (ready, 2)
    assert found.kernels.ends == ["launched"]
    found.request.finish()
    found.rig.wait(1.0)
    assert [h.phase for h in found.request.receives] == [Phase.MOVING] * 2
    ready.fired = True
    copy.run()
    found.request.landed()
    assert len(found.kernels.queued) == 1
    assert found.request.sends[0].report.descriptors == 2
    found.rig.quiet()


def test_each_group_of_layers_is_launched_by_the_layer_that_completes_it() -> None:
    """Behind the events of exactly its layers."""
    found = scene(LayerPipelined(fixed=1)).announce()
    assert found.armed == 2
    events = [Flag(), Flag()]
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
    found = scene(LayerPipelined(fixed=2)).announce()
    made: list[Flag] = []

    def mark() -> Event:
        made.append(Flag())
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
    found = scene().announce()
    events = Flag(), Flag()
    found.step.layer_ready(LayerId(0), events[0])
    found.step.close(events[1])
    (copy,) = found.kernels.queued
    assert list(parts(copy.after)) == list(events)
    for event in events:
        event.fired = True
    copy.run()
    found.request.finish().landed()


def test_nothing_is_launched_while_the_engine_captures_a_graph() -> None:
    """The endpoint's thread launches what was armed, as soon as it knows that the rows are final."""
    found = scene().announce()
    found.kernels.captures = True
    found.step.close()
    assert not found.kernels.queued
    found.kernels.captures = False
    found.rig.turn()
    (copy,) = found.kernels.queued
    assert found.kernels.ends == ["launched"]
    copy.run()
    found.request.finish().landed()


class Unordered(ArmingKernels):
    """As kernels that wait for events by blocking."""

    def orders(self, event: Event) -> bool:
        return False


def test_an_event_that_no_device_awaits_is_left_to_the_endpoint_s_thread() -> None:
    """Unless it has happened: the engine's thread never waits."""
    for fired in (True, False):
        found = scene(kernels=Unordered()).announce()
        ready = Flag()
        ready.fired = fired
        found.step.close(ready)
        assert len(found.kernels.queued) == fired
        found.rig.wait(1.0)
        assert len(found.kernels.queued) == fired
        ready.fired = True
        found.rig.turn()
        (copy,) = found.kernels.queued
        copy.run()
        found.request.finish().landed()


class Raising(Flag):
    """An engine's event that raises."""

    def query(self) -> bool:
        raise OSError("the pass failed")


def test_an_event_that_raises_fails_the_room_and_not_the_call() -> None:
    """As where the endpoint's thread asks it."""
    found = scene(kernels=Unordered()).announce()
    found.step.close(Raising())
    found.request.failed()
    assert "the pass failed" in str(found.request.sends[0].error)
    assert found.kernels.ends == ["dropped"]
    found.rig.quiet()


def test_an_error_of_the_launch_fails_the_room_and_not_the_call() -> None:
    """Nothing of it moves, so pages come back at once."""
    found = scene().announce()
    found.kernels.refuses = [OSError("no launch")]
    found.step.close()
    found.request.failed()
    assert "no launch" in str(found.request.sends[0].error)
    assert found.armed == 0
    found.rig.quiet()


def test_a_retryable_error_of_the_launch_is_tried_again_on_the_endpoint_s_thread() -> None:
    """As for writes."""
    found = scene().announce()
    found.kernels.refuses = [TransportError("not now", retryable=True)]
    found.step.close()
    found.request.finish()
    found.rig.until(lambda: len(found.kernels.queued) == 1, "the second try")
    found.kernels.queued[0].run()
    found.request.landed()


def test_a_copy_that_cannot_be_prepared_fails_the_room() -> None:
    """Before a row is final."""
    found = scene(kernels=Unpreparable()).announce()
    found.request.failed()
    assert "too many pieces" in str(found.request.sends[0].error)
    found.step.close()
    assert not found.kernels.queued
    found.rig.quiet()


class Unpreparable(ArmingKernels):
    """Kernels that refuse a copy when it is prepared."""

    def prepare_copy(self, moves: Sequence[PageMove], bells: Sequence[Bell] = ()) -> PreparedCopy | None:
        raise OSError("too many pieces")


def test_an_interrupted_launch_fails_the_room_and_frees_nothing() -> None:
    """Whether it runs is never known: pages of both sides are kept. The interrupt reaches the engine."""
    found = scene().announce()

    def interrupt(where: str) -> None:
        if where == "end":
            raise KeyboardInterrupt

    found.kernels.at = interrupt
    with pytest.raises(KeyboardInterrupt):
        found.step.close()
    found.rig.until(lambda: all(h.phase is Phase.FAILED for h in found.request.handles), "the failure")
    assert "interrupted: KeyboardInterrupt" in str(found.request.sends[0].error)
    found.kernels.queued[0].run()
    found.rig.wait(5.0)
    assert not any(h.released for h in found.request.handles)


def test_kernels_that_copy_in_the_call_are_left_to_the_endpoint_s_thread() -> None:
    """They would keep the engine's thread: nothing is in decode's pages when ``close`` returns."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped")
    found = Scene(rig, ArmingKernels(), awaited(rig, prefills, decodes, "room")).announce()
    before = bytes_of(decodes[0].pool.buffers[0]).copy()
    found.step.close()
    assert found.armed == 0
    assert bytes_of(decodes[0].pool.buffers[0]).tobytes() == before.tobytes()
    found.request.finish().landed()
    rig.quiet()


def test_rows_that_are_compared_are_not_armed() -> None:
    """Their checksums come behind the same event; the endpoint's thread launches both."""
    rig, kernels = Rig(SPEC), ArmingKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=kernels, verify="full")
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped", verify="full")
    request = rig.request("room", prefills, decodes, 9).open_decode().expect(9).open_prefill()
    rig.until(lambda: request.sends[0].held is not None, "the expectation")
    found = Scene(rig, kernels, request).announce()
    assert found.armed == 0
    found.step.close()
    assert not kernels.queued
    rig.until(lambda: bool(kernels.queued), "the copy")
    kernels.queued[0].run()
    request.finish().landed()


def test_withdrawn_pages_are_not_launched_and_rows_given_again_are_armed_anew() -> None:
    """Even if the pass that computed them is closed before the endpoint's thread has seen the withdrawal."""
    found = scene().announce()
    handle = found.request.sends[0]
    gone = handle.withdraw()
    found.step.close()
    assert not found.kernels.queued
    found.rig.turn()
    assert gone.query()
    assert found.kernels.ends == ["dropped"]
    found.announce()
    assert found.armed == 1
    found.step.close()
    (copy,) = found.kernels.queued
    copy.run()
    found.request.finish().landed()
    found.rig.quiet()


def test_pages_that_are_taken_away_and_given_again_in_one_step_are_not_confused() -> None:
    """What was armed for the first ones is dropped, also where the endpoint sees all of it at once."""
    found = scene().announce()
    gone = found.request.sends[0].withdraw()
    (table,) = found.request.pages(0, 9)
    found.step = found.request.prefills[0].endpoint.step({found.request.room: (9, [table])})
    found.rig.turn()
    found.rig.turn()
    assert gone.query()
    assert (found.kernels.ends, found.armed) == (["dropped"], 1)
    found.step.close()
    (copy,) = found.kernels.queued
    assert copy.moves[0].source.tables[KV].pages.tolist() == table.pages.tolist()
    copy.run()
    found.request.finish().landed()


def test_a_pass_that_is_never_closed_holds_nothing_for_ever() -> None:
    """Its room ends, and what was armed is dropped."""
    found = scene().announce()
    found.request.sends[0].abort("the engine gave up")
    found.request.failed()
    assert (found.kernels.ends, found.armed) == (["dropped"], 0)
    found.step.close()
    assert not found.kernels.queued
    found.rig.quiet()


def test_one_thread_of_many_takes_a_launch() -> None:
    """However they meet: on a real race of threads, each launch has one taker."""
    launches = [Armed(frozenset(), lambda after: None) for _ in range(500)]
    barrier, taken = threading.Barrier(4), list[Armed]()

    def take() -> None:
        barrier.wait()
        taken.extend(one for one in launches if one.take())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(taken) == len(set(taken)) == len(launches)


POINTS = ("before", "due", "begin", "end", "after")
"""Where the other side can act: around the engine's call, and inside it: before the take, and around the launch."""

NEVER = len(POINTS)


@define(eq=False)
class World:
    """One interleaving of the engine's ``close`` with what else happens.

    Args:
        found: with one room of its own, which is armed.
        abort: the point at which decode's abort reaches prefill.
        ended: the point at which the device has ended, if it was launched by then.
        withdraw: the engine withdraws before its ``close``, after it, or never.
        steps: points at which the endpoint's thread runs.
    """

    found: Scene
    abort: int
    ended: int
    withdraw: str
    steps: frozenset[int]
    gone: Event | None = None
    aborted: bool = False

    def run(self) -> None:
        """All of it, with the promises looked at after every act."""
        found = self.found
        found.kernels.at = lambda where: self.at(POINTS.index(where))
        self.at(0)
        if self.withdraw == "before":
            self.gone = found.request.sends[0].withdraw()
            self.check()
        found.step.close()
        self.check()
        found.kernels.at = lambda where: None
        if self.withdraw == "after":
            self.gone = found.request.sends[0].withdraw()
        self.at(4)
        found.request.finish()
        self.end()

    def at(self, point: int) -> None:
        """What the others do here."""
        found = self.found
        if point >= self.abort and not self.aborted:  # a point inside the launch is not reached if there is none
            self.aborted = True
            found.request.receives[0].abort("enough")
            found.rig.turn(0.0)
        if point in self.steps:
            found.rig.turn(0.0)
        if point >= self.ended:
            self.found.finish()
        self.check()

    def check(self) -> None:
        """No page is free that may be read or written; nothing is launched twice, or after it was dropped."""
        kernels, request = self.found.kernels, self.found.request
        assert len(kernels.ends) <= 1, kernels.ends
        assert len(kernels.queued) <= 1
        begun = kernels.ends == ["launched"] and not all(copy.happened for copy in kernels.queued)
        begun |= kernels.ends == ["launched"] and not kernels.queued
        if begun:
            assert not any(handle.released for handle in request.handles)
            assert self.gone is None or not self.gone.query()
        if self.withdraw == "before" and self.gone is not None:
            assert not kernels.queued, "pages that were withdrawn are read"

    def end(self) -> None:
        """Everything ends, as it must."""
        rig, request = self.found.rig, self.found.request
        rig.turn()
        self.check()
        self.found.finish()
        if self.abort < NEVER:
            rig.until(lambda: all(h.released for h in request.handles), "the end")
            assert request.all(Phase.FAILED)
            request.forgive()
        else:
            if self.withdraw != "never":
                self.again()
            rig.until(lambda: all(h.released for h in request.handles), "the end")
            request.done()
        rig.check()
        assert self.gone is None or self.gone.query()
        assert self.found.armed == 0
        rig.quiet()

    def again(self) -> None:
        """The rows are computed again, in other pages; those of a copy that had begun are there already."""
        kernels, request = self.found.kernels, self.found.request
        kernels.ends, kernels.queued = [], []
        request.send(9)
        for _ in range(8):
            self.found.rig.turn()
            self.found.finish()


INSIDE = (POINTS.index("due"), POINTS.index("begin"), POINTS.index("end"))
"""Points at which the endpoint's thread may run: before and after the call it runs anyhow."""

WORLDS = [
    (abort, ended, withdraw, frozenset(steps))
    for abort in range(NEVER + 1)
    for ended in (POINTS.index("end"), POINTS.index("after"), NEVER)
    for withdraw in ("never", "before", "after")
    for count in range(len(INSIDE) + 1 if withdraw != "before" else 1)
    for steps in itertools.combinations(INSIDE, count)
]


def test_every_interleaving_of_launch_withdraw_and_abort_keeps_the_promises() -> None:
    """Every order of the engine's call, an abort, a withdrawal, the device's end and steps of the endpoint's thread."""
    assert len(WORLDS) == 6 * 3 * (8 + 1 + 8)
    found = scene()
    for number, world in enumerate(WORLDS):
        found.kernels.ends, found.kernels.queued = [], []
        World(found.announce(), *world).run()
        found = found.another(f"room {number}")


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_an_endpoint_that_closes_at_any_point_frees_no_page_of_a_copy(point: str, ended: bool) -> None:
    """Either it drops the launch, or the engine's call has it: then pages are kept unless the copy has ended."""
    found = scene().announce()
    endpoint, handle = found.request.prefills[0].endpoint, found.request.sends[0]

    def at(where: str) -> None:
        if where == point:
            if ended and found.kernels.queued:
                found.kernels.queued[0].run()
            endpoint.close(0.0)

    found.kernels.at = at
    at("before")
    found.step.close()
    at("after")
    assert handle.phase is Phase.FAILED
    assert found.kernels.ends == (["dropped"] if point in ("before", "due") else ["launched"])
    assert len(found.kernels.queued) == (found.kernels.ends == ["launched"])
    assert handle.released == (found.kernels.ends == ["dropped"] or (ended and point == "after"))
