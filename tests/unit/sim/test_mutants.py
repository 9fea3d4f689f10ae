"""Planted bugs: the simulator finds them, and they are the bugs that the requirements name. All: ``nox -s mutants``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cpu_tables import mutants
from disagg_kv.core.room.receive_room import ReceiveRoom
from disagg_kv.core.wire import page_runs
from disagg_kv.endpoints.decode import path_choice
from disagg_kv.errors import DisaggKVError
from sim import simulate
from tests.mutants.__main__ import main
from tests.mutants.beyond import BEYOND
from tests.mutants.bugs import BUGS
from tests.mutants.hunt import Hunt, Kill, Tally, hunt, timed
from tests.mutants.planting import Mutant

QUICK_NAMES = {
    "pages are freed on abort while a write is in flight",
    "a segment is sent again to a destination that has it",
    "links to dead subscribers are kept for ever",
    "flows of ended rooms are never forgotten",
    "heads of two sides that differ are swapped, without checksums",
    "the first success of a rank counts for all",
    "a rank that is lost takes no room with it",
    "an endpoint takes an id that it has used",
    "a rank is told of a failure as if it were none",
}
QUICK = [bug for bug in BUGS if bug.name in QUICK_NAMES]


def test_bugs_have_names_of_their_own() -> None:
    """There are many, and a few of them die within seconds."""
    assert len(BUGS) >= 80
    every = [*BUGS, *(bug for bug, _ in BEYOND)]
    assert len({bug.name for bug in every}) == len(every)
    assert len(QUICK) == len(QUICK_NAMES)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted_and_leaves_no_trace(bug: Mutant) -> None:
    """The line that it changes is still there, and is as before when the block ends."""
    before = vars(ReceiveRoom).copy()
    with bug.planted():
        pass
    assert vars(ReceiveRoom) == before


@pytest.mark.parametrize("bug", QUICK, ids=lambda bug: bug.name)
def test_bugs_are_found(bug: Mutant) -> None:
    """The simulator is not blind: seeds that are clean without the bug find it."""
    kill = hunt(bug, range(100))
    assert kill is not None
    assert not simulate(kill.seed).violations


@pytest.mark.parametrize(("bug", "test"), BEYOND, ids=[bug.name for bug, _ in BEYOND])
def test_bugs_that_no_world_shows_are_found_by_a_test(bug: Mutant, test: Callable[[], object]) -> None:
    """The test passes without the bug."""
    test()
    with bug.planted(), pytest.raises((AssertionError, DisaggKVError, pytest.fail.Exception)):
        test()


def test_a_function_is_replaced_wherever_it_is_imported() -> None:
    """Those who imported it by its name call the bug too, and the original after that."""
    bug = next(bug for bug in BUGS if bug.where == "core.wire.page_runs:excess")
    before = page_runs.excess
    assert vars(path_choice)["excess"] is before
    with bug.planted():
        assert vars(path_choice)["excess"] is page_runs.excess is not before
    assert vars(path_choice)["excess"] is page_runs.excess is before


def test_a_bug_that_is_none_survives() -> None:
    """A change that changes nothing is not found."""
    harmless = Mutant("nothing", "core.timers:Repeater.stop", "self._due.pop(key, None)", "self._due.pop(key, 0)")
    assert hunt(harmless, range(2)) is None


def test_a_hunt_says_what_it_cost() -> None:
    """Seeds up to the one that found the bug, or all of them; CPU time of the process that ran them."""
    survives = Mutant("nothing", "core.timers:Repeater.stop", "self._due.pop(key, None)", "self._due.pop(key)")
    found, nothing = timed(QUICK[0], range(40)), timed(survives, ())
    assert found.kill is not None
    assert found.seeds == found.kill.seed + 1
    assert found.cpu_s > 0
    assert (nothing.kill, nothing.seeds) == (None, 0)


def test_the_figure_of_merit_is_of_all_that_was_spent() -> None:
    """Bugs that survive cost as much as others, and count for nothing; the page adds up the bugs of a rule."""
    first, second, third = BUGS[:3]
    kill = Kill(6, "I5", "said")
    tally = Tally((Hunt(first, kill, 7, 1.0), Hunt(second, None, 10_000, 60.0), Hunt(third, kill, 7, 20.0)), 240.0)
    assert (tally.killed, tally.killed_per_cpu_minute) == (2, 0.5)
    record = json.loads(json.dumps(tally.record()))
    assert [bug["seed"] for bug in record["bugs"]] == [6, None, 6]
    assert json.loads(json.dumps(tally.record("c" * 40)))["machine"]["commit"] == "c" * 40
    shown = mutants(record).splitlines()
    assert shown[0] == "**0.5 planted bugs found per CPU minute**: 2 of 3 in 240 CPU seconds."
    assert shown[4:] == ["| I5 | 2 | 7 | 7 | 21.0 |", "| survives | 1 | 10,000 | 10,000 | 60.0 |"]


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Children's CPU time counts: their hunts are nearly all of it."""
    into = tmp_path / "mutants.json"
    assert main(["--json", str(into)], QUICK[:2]) == 0
    record = json.loads(into.read_text())
    assert (record["planted"], record["killed"]) == (2, 2)
    assert record["cpu_seconds"] > sum(bug["cpu_seconds"] for bug in record["bugs"]) > 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"planted bugs killed per CPU minute: {record['killed_per_cpu_minute']:.1f} (")
