"""The conformance suite for paths: the library's own pass, and broken ones do not."""

from __future__ import annotations

import pytest
from attrs import evolve

from disagg_kv.planning import PairPlan, StagedLayout, Writes
from disagg_kv.strategies import Job, SlicePlanner, TransferPlanner
from disagg_kv.strategies.paths import DirectPlanner, MappedPlanner, StagedPlanner
from disagg_kv.testing.planner import CASES, Transfer, TransferPlannerSuite


class TestDirect(TransferPlannerSuite):
    """Only between equal layouts."""

    def planner(self) -> TransferPlanner:
        return DirectPlanner()


class TestSlice(TransferPlannerSuite):
    """Between any two."""

    def planner(self) -> TransferPlanner:
        return SlicePlanner()


class TestStaged(TransferPlannerSuite):
    """Between any two, through staging."""

    def planner(self) -> TransferPlanner:
        return StagedPlanner()


class TestMapped(TransferPlannerSuite):
    """Between any two, through mapped pages."""

    def planner(self) -> TransferPlanner:
        return MappedPlanner()


class Shifted(SlicePlanner):
    """It writes one byte too far."""

    def send(self, job: Job) -> Writes:
        sound = super().send(job)
        return evolve(sound, remote_off=sound.remote_off + 1)


class Forgets(SlicePlanner):
    """It leaves out a write."""

    def send(self, job: Job) -> Writes:
        sound = super().send(job)
        cut = slice(len(sound) - 1)
        return Writes(sound.local[cut], sound.local_off[cut], sound.remote[cut], sound.remote_off[cut],
                      sound.nbytes[cut])  # fmt: skip


class Turned(StagedPlanner):
    """Its two sides have the bytes in different orders."""

    def receive(self, job: Job) -> StagedLayout:
        sound = super().receive(job)
        return evolve(sound, plane=sound.plane[::-1].copy())


class TwoFaced(StagedPlanner):
    """It says that it exposes no pages, and plans writes."""

    def send(self, job: Job) -> Writes:  # type: ignore[override]
        return Writes.one(0, 0, 0, 0, 1)


class Undercounts(SlicePlanner):
    """It takes more writes than it says."""

    def count(self, job: Job) -> int:
        return 1


class Moody(SlicePlanner):
    """It refuses every second question."""

    asked = 0

    def refuse(self, pair: PairPlan) -> str | None:
        type(self).asked += 1
        return None if type(self).asked % 2 else "not now"


class Useless(SlicePlanner):
    """It refuses everything."""

    def refuse(self, pair: PairPlan) -> str | None:
        return "never"


class Nameless(SlicePlanner):
    """Nobody could ask for it."""

    name = "two words"


BYTES, COUNT = "test_every_byte_arrives_and_no_other_is_touched", "test_the_count_is_a_bound_and_needs_no_tables"


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Shifted, BYTES),
        (Forgets, BYTES),
        (Turned, BYTES),
        (TwoFaced, BYTES),
        (TwoFaced, "test_pages_are_given_only_where_they_are_exposed"),
        (Undercounts, COUNT),
        (Moody, "test_it_can_carry_something"),
        (Useless, "test_it_can_carry_something"),
        (Nameless, "test_it_says_what_it_is"),
    ],
)
def test_a_broken_path_is_noticed(kind: type[TransferPlanner], test: str) -> None:
    """By the test that its fault is the subject of."""

    class Suite(TransferPlannerSuite):
        def planner(self) -> TransferPlanner:
            return kind()

    check = getattr(Suite(), test)
    arguments = [] if test.startswith("test_it_") else [Transfer.of(CASES["two ranks to one"])]
    with pytest.raises(AssertionError):
        check(*arguments)
