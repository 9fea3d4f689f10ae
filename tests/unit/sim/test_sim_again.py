"""Requests that come when all is calm, to instances in which a process was replaced."""

from __future__ import annotations

from collections.abc import Iterator

from disagg_kv.core import Phase
from sim.fault import FaultClass
from sim.recovery_probe import check_served, last_requests
from sim.scenario import Scenario
from sim.world import World


def worlds(*faults: FaultClass) -> Iterator[World]:
    """Worlds that have been run, of the seeds in which all of these faults are on."""
    for seed in range(1000):
        scenario = Scenario.draw(seed, frozenset(faults))
        if scenario.faults.keys() == set(faults):
            world = World(scenario)
            world.run()
            assert not world.violations
            yield world


def test_whoever_was_replaced_serves_again() -> None:
    """On every rank, the one that has come included; here beside ranks that lived on."""
    crashed = worlds(FaultClass.REPLACED, FaultClass.DECODE_CRASH)
    world = next(w for w in crashed if last_requests(w) and any(m.startswith("replaced:") for m in w.marks))
    requests = last_requests(world)
    last = world.rooms[-len(requests) :]
    assert [room.plan.room for room in last] == [request.room for request in requests]
    assert {entry.phase for room in last for entry in room.entries} == {Phase.DONE}


def test_nothing_more_is_asked_where_nobody_was_replaced() -> None:
    """Worlds with other faults are what was drawn."""
    world = next(worlds(FaultClass.ABORT))
    assert last_requests(world) == []
    assert len(world.rooms) == len(world.scenario.requests)


def test_a_last_request_that_fails_is_told() -> None:
    """I4: the room, a rank, and why."""
    world = next(w for w in worlds(FaultClass.ABORT) if any(e.phase is Phase.FAILED for e in w.rooms[-1].entries))
    check_served(world, [world.rooms[-1].plan])
    (violation,) = world.violations
    assert violation.rule == "I4"
    assert "began when all was calm, and failed: " in violation.message
