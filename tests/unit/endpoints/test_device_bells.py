"""Bells that a device rings behind a copy: decode's engine knows before any endpoint has looked for the end."""

from __future__ import annotations

import itertools

from attrs import define, evolve

from disagg_kv.core import Options, Phase
from disagg_kv.errors import TransportError
from disagg_kv.strategies import LayerPipelined
from disagg_kv.transports.bells import HostBells, words_of
from tests.support.device_copies import SPEC, Copy, DeviceKernels, Pass, awaited, driven
from tests.support.rig import Rig, tp_shards
from tests.support.rig_parts import Flag

BELLS = Options(bells=512)


def belled(schedule: LayerPipelined | None = None) -> Pass:
    """A room with bells that decode awaits and prefill has open; decode knows that prefill has it."""
    found = driven(schedule, options=BELLS)
    found.rig.wait(0.3)
    return found


def seen(found: Pass) -> Phase:
    """What decode's engine sees."""
    return found.request.receives[0].phase


def board(found: Pass) -> list[int]:
    """Decode's words."""
    (room,) = found.request.prefills[0].endpoint.inspect().rooms.values()
    bells = next(iter(room.routes.values())).bells
    assert isinstance(bells, HostBells)
    return words_of(bells.buffer).tolist()


def copies(found: Pass) -> list[Copy]:
    """What the device has to copy."""
    return found.kernels.queued


def test_decode_s_engine_knows_although_no_endpoint_s_thread_has_run() -> None:
    """All between the engine's ``close`` and decode's ``phase`` is the device's."""
    found = belled().announce()
    ready = Flag()
    found.step.close(ready)
    (copy,) = copies(found)
    assert [(bell.value, len(copy.bells)) for bell in copy.bells] == [(1, 1)]
    assert seen(found) is Phase.MOVING
    ready.fired = True
    copy.run()
    assert seen(found) is Phase.DONE
    found.request.wanted(0, 9)
    found.rig.check()
    assert found.request.receives[0].report.bells
    found.request.finish().landed()
    assert [handle.error for handle in found.request.handles] == [None, None]
    found.rig.quiet()


def test_each_launch_rings_for_its_own_layers_and_all_are_needed() -> None:
    """In any order of their ends."""
    found = belled(LayerPipelined(fixed=1)).announce()
    found.step.close()
    rung = {bell.addr for copy in copies(found) for bell in copy.bells}
    assert len(rung) == 2
    for copy in copies(found)[::-1]:
        assert seen(found) is Phase.MOVING
        copy.run()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_both_writers_devices_ring() -> None:
    """Each for its heads."""
    rig, kernels = Rig(SPEC, options=BELLS), DeviceKernels()
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy="mapped", kernels=kernels)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped")
    request = awaited(rig, prefills, decodes, "room")
    rig.wait(0.3)
    request.send(9)
    rig.until(lambda: len(kernels.queued) == 2, "both copies")
    for copy in kernels.queued:
        assert request.receives[0].phase is Phase.MOVING
        copy.run()
    assert request.receives[0].phase is Phase.DONE
    request.finish().landed()
    rig.quiet()


def test_kernels_that_ring_no_bells_leave_them_to_the_endpoint() -> None:
    """It rings once it has seen the end of the copy."""
    found = belled().announce()
    found.step.close()
    (copy,) = copies(found)
    copy.bells = ()
    copy.run()
    assert seen(found) is Phase.MOVING
    for _ in range(3):
        found.request.prefills[0].endpoint.driver.step()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_pages_that_are_taken_away_ring_nothing() -> None:
    """The rows given again ring in the same slot, and once."""
    found = belled().announce()
    gone = found.request.sends[0].withdraw()
    found.step.close()
    assert gone.query()
    assert not board(found)[0]
    assert seen(found) is Phase.MOVING
    found.announce().step.close()
    (copy,) = copies(found)
    assert [bell.value for bell in copy.bells] == [1]
    copy.run()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_a_launch_that_fails_rings_nothing_and_its_second_try_does() -> None:
    found = belled().announce()
    found.kernels.refuses = [TransportError("not now", retryable=True)]
    found.step.close()
    assert not board(found)[0]
    assert seen(found) is Phase.MOVING
    found.rig.until(lambda: len(copies(found)) == 1, "the second try")
    copies(found)[0].run()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_rows_that_are_compared_are_not_rung_by_the_device() -> None:
    """Prefill compares on its own account: decode has no say in it, and its room has bells."""
    rig, kernels = Rig(SPEC, options=BELLS), DeviceKernels()
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=kernels, verify="full")
    request = awaited(rig, prefills, rig.decode(tp_shards(SPEC, 1), strategy="mapped"), "room")
    request.send(9)
    rig.until(lambda: bool(kernels.queued), "the copy")
    assert kernels.queued[0].bells == []
    kernels.queued[0].run()
    request.finish().landed()
    assert not request.receives[0].report.bells


def test_what_rings_stays_mapped_until_the_copy_has_ended() -> None:
    """Also where the endpoint has closed."""
    found = belled().announce()
    found.step.close()
    (copy,) = copies(found)
    found.request.prefills[0].endpoint.close(0.0)
    assert all(isinstance(bell.owner, HostBells) for bell in copy.bells)
    copy.run()
    assert seen(found) is Phase.DONE


def test_a_slot_outside_the_board_costs_nothing_but_the_bell() -> None:
    """Decode names it; the copy is launched, and the frame follows."""
    found = belled()
    (room,) = found.request.prefills[0].endpoint.inspect().rooms.values()
    (flow,) = room.machine.flows.values()
    assert flow.plan is not None
    flow.plan = evolve(flow.plan, bells=(1 << 40, 32, 1))
    found.announce().step.close()
    (copy,) = copies(found)
    assert copy.bells == []
    copy.run()
    found.request.finish().landed()
    assert found.request.prefills[0].observer.counters["bells.refused"] == 2
    found.rig.quiet()


POINTS = ("before", "begin", "end", "after")
"""Where others can act: around the engine's ``close``, and around the launch inside it."""

NEVER = len(POINTS)


@define(eq=False)
class World:
    """One interleaving of the engine's ``close``, its device, decode's abort, a withdrawal and endpoints' threads.

    Args:
        found: with one room of its own, whose rows are announced.
        abort: the point at which decode's engine gives up.
        ended: the point at which the device has ended, if it was launched by then.
        withdraw: whether the engine withdraws before its ``close``.
        steps: points at which the endpoints' threads run.
        looks: whether decode's engine looks at every point, or only at the end.
    """

    found: Pass
    abort: int
    ended: int
    withdraw: bool
    steps: frozenset[int]
    looks: bool
    aborted: bool = False
    outcome: Phase | None = None

    def run(self) -> None:
        """All of it."""
        found = self.found
        found.kernels.at = lambda where: self.at(POINTS.index(where))
        self.at(0)
        if self.withdraw:
            found.request.sends[0].withdraw()
        found.step.close()
        found.kernels.at = lambda where: None
        self.at(NEVER - 1)
        found.request.finish()
        found.rig.turn()
        found.kernels.finish()
        if self.withdraw and not self.aborted:
            found.kernels.queued = []
            found.request.send(9)
            for _ in range(8):
                found.rig.turn()
                found.kernels.finish()
        self.look()
        found.request.ended()
        assert self.outcome in (None, seen(found)), "an outcome has changed"
        assert self.aborted or found.request.all(Phase.DONE)
        found.rig.check()
        found.rig.quiet()

    def at(self, point: int) -> None:
        """What the others do here."""
        if point >= self.abort and not self.aborted:
            self.aborted = True
            self.found.request.receives[0].abort("enough")
        if point in self.steps:
            for member in self.found.rig.members:
                member.endpoint.driver.step()
        if point >= self.ended:
            self.found.kernels.finish()
        if self.looks:
            self.look()

    def look(self) -> None:
        """Decode's engine looks: it is done only if the bytes are there, and stays so."""
        phase = seen(self.found)
        assert self.outcome in (None, phase), "an outcome has changed"
        if phase is Phase.DONE:
            assert copies(self.found)
            assert all(copy.happened for copy in copies(self.found))
            if self.outcome is None:
                self.found.request.wanted(0, 9)
                self.found.rig.check()
        if phase in (Phase.DONE, Phase.FAILED):
            self.outcome = phase


WORLDS = [
    (abort, ended, withdraw, frozenset(steps), looks)
    for abort in range(NEVER + 1)
    for ended in (POINTS.index("end"), POINTS.index("after"), NEVER)
    for withdraw in (False, True)
    for count in range(1 if withdraw else NEVER)
    for steps in itertools.combinations(range(1, NEVER), count)
    for looks in (False, True)
]


def test_every_interleaving_of_launch_withdraw_and_abort_with_a_ring() -> None:
    """Decode's engine sees one outcome, and success only with the bytes."""
    assert len(WORLDS) == 5 * 3 * (8 + 1) * 2
    found = belled()
    done = 0
    for number, world in enumerate(WORLDS):
        found.kernels.queued = []
        World(found.announce(), *world).run()
        done += found.request.receives[0].report.bells
        found = found.another(f"room {number}")
        found.rig.wait(0.3)
    assert done > len(WORLDS) // 8, "bells took part in few of them"
