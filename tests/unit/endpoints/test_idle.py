"""Rooms that wait cost nothing between the times at which something is due for them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from disagg_kv.core import Options
from disagg_kv.endpoints.loop.timing import IDLE_S
from disagg_kv.geometry import CacheSpec
from tests.support.calls import calls
from tests.support.device_copies import DeviceKernels
from tests.support.rig import Memory, Rig, tp_shards
from tests.support.rig_parts import FiredEvent

SPEC = CacheSpec.kv(1, 1, 4, "float16")
QUIET_S = 1.5


def waiting(rooms: int, case: str) -> Rig:
    """A network in which so many rooms wait: each for rows, for prefill's engine, for pages, or for an instance."""
    options = Options(parked=2000)
    rig = Rig(SPEC, options=options)
    few = Memory(pages=2 * rooms)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1), memory=few), rig.decode(tp_shards(SPEC, 1), memory=few)
    rig.request("first", prefills, decodes, 2).start().landed()
    for i in range(rooms):
        request = rig.request(f"{i}", prefills, decodes, 2, of="nowhere" if case == "instance" else "P")
        if case == "rows":
            request.sends = [m.endpoint.open(request.room) for m in prefills]
        request.receives = [m.endpoint.open(request.room, request.source) for m in decodes]
        if case != "pages":
            request.expect(2)
    for _ in range(20):
        turn(rig)
    return rig


def turn(rig: Rig) -> None:
    """Every endpoint makes a turn, and 5 ms pass; nothing is checked, as that looks at every room."""
    for member in rig.members:
        member.endpoint.driver.step(0.0)
    rig.clock.advance(0.005)


def quiet(rig: Rig) -> int:
    """Calls of both endpoints while nothing is due for any room."""

    def act() -> None:
        until = rig.clock() + QUIET_S
        while rig.clock() < until:
            turn(rig)

    return calls(act).total()


@pytest.mark.parametrize("case", ["rows", "parked", "pages", "instance"])
def test_an_endpoint_does_nothing_for_rooms_that_wait(case: str) -> None:
    """The calls of a quiet second are the same for a few rooms and for many."""
    rigs = [waiting(rooms, case) for rooms in (10, 300)]
    for rig in rigs:
        # What is known to wait is repeated rarely: past the repeats that may still be quick.
        until = rig.clock() + 0.5
        while rig.clock() < until:
            turn(rig)
    few, many = (quiet(rig) for rig in rigs)
    assert many <= 1.1 * few, (few, many)


def test_a_step_in_which_nothing_comes_and_nothing_is_due_is_short() -> None:
    """It asks no peer, no room and no timer one by one. An engine may poll at any rate."""
    rig = Rig(SPEC)
    prefills, decodes = rig.prefill(tp_shards(SPEC, 1)), rig.decode(tp_shards(SPEC, 1))
    rig.request("first", prefills, decodes, 2).start().landed()
    rig.quiet()
    for driver in (prefills[0].endpoint.driver, decodes[0].endpoint.driver):
        driver.step(0.0)
        assert calls(partial(driver.step, 0.0)).total() <= 25


def test_nothing_goes_on_for_a_transfer_that_waited_for_a_gpu_and_was_given_up() -> None:
    """Its event, which only polling finds, is asked no more."""
    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="direct", kernels=DeviceKernels())
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="direct")
    request = rig.request("room", prefills, decodes, 2).open_decode().expect(2).open_prefill()
    for _ in range(10):
        turn(rig)
    request.sends[0].send_chunk(2, prefills[0].pages(prefills[0].take(2)), FiredEvent())
    turn(rig)
    loop = prefills[0].endpoint.driver.loop
    assert loop.pending
    request.sends[0].abort("enough")
    rig.until(lambda: request.sends[0].released and request.receives[0].released, "the end")
    turn(rig)
    assert not loop.pending


@pytest.mark.parametrize("heartbeat_s", [1.0, 20.0])
def test_ends_of_processes_are_looked_for_however_busy_the_endpoint_is(
    heartbeat_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that goes on makes every step do something."""
    rig = Rig(SPEC, options=Options(heartbeat_s=heartbeat_s, silence_s=30.0))
    prefills = rig.prefill(tp_shards(SPEC, 1), strategy="mapped", kernels=(kernels := DeviceKernels()))
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="mapped")
    request = rig.request("room", prefills, decodes, 2).open_decode().expect(2).open_prefill()
    for _ in range(10):
        turn(rig)
    request.sends[0].send_chunk(2, prefills[0].pages(prefills[0].take(2)))
    turn(rig)
    looked = [began := rig.clock()]
    loop = prefills[0].endpoint.driver.loop
    monkeypatch.setattr(loop, "_notice_exits", lambda: looked.append(rig.clock()))
    while rig.clock() < began + 5.0:
        turn(rig)
        loop.rest(1.0)
    assert kernels.queued
    assert max(after - before for before, after in pairwise((*looked, rig.clock()))) <= IDLE_S + 0.01
