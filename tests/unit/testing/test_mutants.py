"""Planted bugs: the simulator finds them, and they are the bugs that the requirements name. All: ``nox -s mutants``."""

from __future__ import annotations

import pytest

from disagg_kv.protocol.receiving import ReceiveRoom
from disagg_kv.testing.sim import simulate
from tests.mutants.bugs import BUGS
from tests.mutants.hunt import hunt
from tests.mutants.planting import Mutant

QUICK = [bug for bug in BUGS if bug.item in ("E1", "E5", "E6", "E14", "E15", "E16")]


def test_every_promise_has_a_bug() -> None:
    """At least 20 bugs, and one for each of E1 to E16."""
    assert len(BUGS) >= 20
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {f"E{number}" for number in range(1, 17)} <= {bug.item for bug in BUGS}


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
    kill = hunt(bug, range(40))
    assert kill is not None
    assert not simulate(kill.seed).violations


def test_a_bug_that_is_none_survives() -> None:
    """A change that changes nothing is not found."""
    harmless = Mutant(
        "nothing", "I2", "protocol.retry:Repeater.stop", "self._due.pop(key, None)", "self._due.pop(key, 0)"
    )
    assert hunt(harmless, range(2)) is None
