"""Flags that a device raises behind a copy: decode knows before any thread of prefill has looked for the end."""

from __future__ import annotations

import itertools

from attrs import define

from disagg_kv.core import Phase
from disagg_kv.errors import TransportError
from disagg_kv.strategies import LayerPipelined
from disagg_kv.transports.flags import HostFlags, words_of
from tests.support.device_copies import Copy, Pass, driven
from tests.support.rig_parts import FiredEvent


def flagged(schedule: LayerPipelined | None = None) -> Pass:
    """A room with flags that decode awaits and prefill has open; decode knows that prefill has it."""
    found = driven(schedule)
    found.rig.wait(0.3)
    return found


def seen(found: Pass) -> Phase:
    """What decode's engine sees after a poll."""
    found.request.decodes[0].endpoint.poll()
    return found.request.receives[0].phase


def page(found: Pass) -> list[int]:
    """Decode's words."""
    (room,) = found.request.prefills[0].endpoint.inspect().rooms.values()
    flags = next(iter(room.routes.values())).flags
    assert isinstance(flags, HostFlags)
    return words_of(flags.buffer).tolist()


def copies(found: Pass) -> list[Copy]:
    """What the device has to copy."""
    return found.kernels.queued


def test_decode_knows_although_prefill_has_not_run_since_the_launch() -> None:
    """All between the engine's ``close`` and decode's ``poll`` is the device's."""
    found = flagged().announce()
    ready = FiredEvent()
    found.step.close(ready)
    (copy,) = copies(found)
    assert [(flag.value, len(copy.flags)) for flag in copy.flags] == [(1, 1)]
    assert seen(found) is Phase.MOVING
    ready.fired = True
    copy.run()
    assert seen(found) is Phase.DONE
    found.request.wanted(0, 9)
    found.rig.check()
    assert found.request.receives[0].released
    found.request.finish().landed()
    assert [handle.error for handle in found.request.handles] == [None, None]
    found.rig.quiet()


def test_each_launch_raises_the_flag_of_its_own_layers_and_all_are_needed() -> None:
    """In any order of their ends."""
    found = flagged(LayerPipelined(fixed=1)).announce()
    found.step.close()
    armed = {flag.addr for copy in copies(found) for flag in copy.flags}
    assert len(armed) == 2
    for copy in copies(found)[::-1]:
        assert seen(found) is Phase.MOVING
        copy.run()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_pages_that_are_taken_away_raise_no_flag() -> None:
    """The rows given again raise the flag of the same slot, once."""
    found = flagged().announce()
    gone = found.request.sends[0].withdraw()
    found.step.close()
    assert gone.query()
    assert not page(found)[0]
    assert seen(found) is Phase.MOVING
    found.announce().step.close()
    (copy,) = copies(found)
    assert [flag.value for flag in copy.flags] == [1]
    copy.run()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_a_launch_that_fails_raises_no_flag_and_its_second_try_does() -> None:
    found = flagged().announce()
    found.kernels.refuses = [TransportError("not now", retryable=True)]
    found.step.close()
    assert not page(found)[0]
    assert seen(found) is Phase.MOVING
    found.rig.until(lambda: len(copies(found)) == 1, "the second try")
    copies(found)[0].run()
    assert seen(found) is Phase.DONE
    found.request.finish().landed()
    found.rig.quiet()


def test_a_flag_stays_mapped_until_the_copy_has_ended() -> None:
    """Also where the endpoint has closed."""
    found = flagged().announce()
    found.step.close()
    (copy,) = copies(found)
    found.request.prefills[0].endpoint.close(0.0)
    assert all(isinstance(flag.owner, HostFlags) for flag in copy.flags)
    copy.run()
    assert [flag.value for flag in copy.flags] == [1]


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
        found.rig.until(self.over, "the end")
        found.request.ended()
        assert self.outcome in (None, seen(found)), "an outcome has changed"
        assert self.aborted or found.request.all(Phase.DONE)
        found.rig.check()
        found.rig.quiet()

    def over(self) -> bool:
        """Whether every handle is released, as decode's engine sees it."""
        self.look()
        return all(handle.released for handle in self.found.request.handles)

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


def test_every_interleaving_of_launch_withdraw_and_abort_with_a_flag() -> None:
    """Decode's engine sees one outcome, and success only with the bytes."""
    assert len(WORLDS) == 5 * 3 * (8 + 1) * 2
    found = flagged()
    done = 0
    for number, world in enumerate(WORLDS):
        found.kernels.queued = []
        World(found.announce(), *world).run()
        done += seen(found) is Phase.DONE
        found = found.another(f"room {number}")
        found.rig.wait(0.3)
    assert done > len(WORLDS) // 8, "few of them succeed"
