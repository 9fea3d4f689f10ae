"""Simulated fleets: what they show, and what the library promises to a fleet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from disagg_kv.errors import ConfigurationError, UnknownNameError
from sim.__main__ import run
from sim.fleet import ALL_FAULTS, FleetFault, FleetPlan, FleetResult, fleet_size, named_faults, run_fleet

TIMES = ("cpu_share", "joining_cpu_s", "wall_s", "memory_bytes")


def without_times(result: FleetResult) -> dict[str, object]:
    return {name: value for name, value in attrs.asdict(result).items() if name not in TIMES}


@pytest.fixture(scope="module")
def calm() -> FleetResult:
    """A fleet without faults, once for all tests."""
    return run_fleet(FleetPlan(3, 3, seconds=12.0))


def test_a_fleet_joins_and_serves_every_request(calm: FleetResult) -> None:
    """No request fails, and no lease is withheld."""
    assert calm.ok
    assert calm.requests > 3 * 12
    assert (calm.failed, calm.withheld, calm.unfinished, calm.restarts) == (0, 0, 0, 0)
    assert calm.joined_s < 1.0
    assert calm.peers_per_rank == 3.0


def test_requests_of_connected_ranks_ask_nobody(calm: FleetResult) -> None:
    """Look-ups are made for new instances, and now and then; the number of requests does not matter."""
    busy = run_fleet(FleetPlan(3, 3, seconds=12.0, rate=5.0))
    assert busy.requests > 2 * calm.requests
    assert busy.lookups_per_rank_min * 6 * 12 / 60 <= 3 * 3
    assert busy.store_requests_per_rank_min <= 60 / 12


def test_the_same_plan_is_the_same_fleet() -> None:
    """But for processor time; another seed is another one."""
    plan = FleetPlan(3, 2, seconds=5.0, faults=ALL_FAULTS)
    first = run_fleet(plan)
    assert without_times(first) == without_times(run_fleet(plan))
    assert without_times(first) != without_times(run_fleet(attrs.evolve(plan, seed=1)))


def test_faults_harm_only_requests_of_faulty_ranks() -> None:
    """Restarts, an outage of the store for a minute, and a rack that is cut off for 20 s."""
    result = run_fleet(FleetPlan(6, 4, seconds=60.0, rate=0.7, faults=ALL_FAULTS))
    assert result.restarts
    assert result.failed
    assert result.failed == result.excused
    assert result.ok, result.errors


def test_a_rank_that_restarts_during_an_outage_registers_after_it() -> None:
    """The launcher of its process tries until the store is back; leases are renewed then, too."""
    faults = frozenset({FleetFault.RESTARTS, FleetFault.STORE})
    result = run_fleet(FleetPlan(2, 2, seconds=100.0, rate=0.3, faults=faults, seed=3))
    assert result.ok, result.errors
    assert result.store_requests_per_rank_min > 0
    assert "store_requests_per_rank_min" not in result.limits


def test_limits_that_do_not_hold_are_named() -> None:
    """Each limit by itself; processor time says nothing about the library on a busy machine."""
    good = run_fleet(FleetPlan(1, 1, seconds=1.0))
    for name, bad in [
        ("joined_s", attrs.evolve(good, joined_s=61.0)),
        ("store_requests_per_rank_min", attrs.evolve(good, plan=FleetPlan(100, 100), store_requests_per_rank_min=1.0)),
        ("failed_not_excused", attrs.evolve(good, unfinished=1)),
        ("withheld", attrs.evolve(good, withheld=1)),
    ]:
        assert [one for one, (_, _, holds) in bad.limits.items() if not holds and one != "cpu_share"] == [name]
        assert not bad.ok
    assert attrs.evolve(good, cpu_share=1.0).ok


@pytest.mark.parametrize(
    "text", ["", "5", "x", "5x", "x5", "5x5x5", "-1x5", "5 x5", "٣x5", "1" * 10 + "x1", "0x5", "5x99999"]
)
def test_a_size_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigurationError):
        FleetPlan(*fleet_size(text))


@pytest.mark.parametrize(
    "arguments",
    [{"seconds": 0.0}, {"seconds": 1e9}, {"rate": 0.0}, {"rate": float("nan")}, {"seed": -1}, {"faults": ("rack",)}],
)
def test_a_plan_that_cannot_be(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        FleetPlan(2, 2, **arguments)  # type: ignore[arg-type]


def test_faults_by_name() -> None:
    assert named_faults("all") == ALL_FAULTS
    assert named_faults("") == frozenset()
    assert named_faults("rack, store") == {FleetFault.RACK, FleetFault.STORE}
    with pytest.raises(UnknownNameError, match="restarts"):
        named_faults("flood")


def document(capsys: pytest.CaptureFixture[str], line: Sequence[str], code: int) -> Any:
    assert run([*line, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``simulate --fleet`` prints plan, counters and limits; a wrong use is exit code 2."""
    found = document(capsys, ["--fleet", "2x3", "--seconds", "3", "--faults", "restarts"], 0)
    assert found["ok"] is True
    assert (found["plan"]["prefills"], found["plan"]["decodes"]) == (2, 3)
    assert found["result"]["restarts"] == 1
    assert found["limits"]["withheld"] == {"value": 0, "limit": 0, "holds": True}
    assert run(["--fleet", "2x1", "--seconds", "1"]) == 0
    assert "ranks usable after" in capsys.readouterr().out
    for wrong in (["--fleet", "2y3"], ["--fleet", "2x3", "--jobs", "2"], ["--fleet", "2x3", "--faults", "flood"]):
        document(capsys, wrong, 2)
