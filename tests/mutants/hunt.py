"""Running the simulator against one bug until it is found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import process_time

from attrs import asdict, evolve, frozen

from bench.machine import Machine
from sim import simulate

from .planting import Mutant

LIMIT = 10_000
"""Seeds within which each bug must be found."""


@frozen
class Kill:
    """The seed that found a bug, and how."""

    seed: int
    rule: str
    message: str


@frozen
class Hunt:
    """One bug's whole hunt.

    Args:
        mutant: which bug.
        kill: how it was found; None: it survives all seeds.
        seeds: how many were run.
        cpu_s: seconds of CPU time of the process that ran them, in which the bug was planted.
    """

    mutant: Mutant
    kill: Kill | None
    seeds: int
    cpu_s: float


@frozen
class Tally:
    """All hunts of one run, and what they cost.

    Args:
        hunts: of every bug, in the order of the list.
        cpu_s: seconds of CPU time of the whole run: of this process and all of its children, from the start on.
    """

    hunts: Sequence[Hunt]
    cpu_s: float

    @property
    def killed(self) -> int:
        """How many were found."""
        return sum(one.kill is not None for one in self.hunts)

    @property
    def killed_per_cpu_minute(self) -> float:
        """The simulator's figure of merit: it grows with the speed of worlds and with what each of them can find."""
        return self.killed / (self.cpu_s / 60)

    def record(self, commit: str | None = None) -> dict[str, object]:
        """As it is written into a file of results; ``commit``: of the checkout, where git cannot say."""
        machine = Machine.here()
        return {
            "planted": len(self.hunts),
            "killed": self.killed,
            "killed_per_cpu_minute": self.killed_per_cpu_minute,
            "cpu_seconds": self.cpu_s,
            "limit_seeds": LIMIT,
            "bugs": [
                {
                    "name": one.mutant.name,
                    "rule": None if one.kill is None else one.kill.rule,
                    "seed": None if one.kill is None else one.kill.seed,
                    "seeds": one.seeds,
                    "cpu_seconds": one.cpu_s,
                }
                for one in self.hunts
            ],
            "machine": asdict(evolve(machine, commit=commit or machine.commit)),
        }


def timed(mutant: Mutant, seeds: Iterable[int] | None = None) -> Hunt:
    """Hunt a bug, and say what that cost."""
    began, run = process_time(), list(range(LIMIT) if seeds is None else seeds)
    kill = hunt(mutant, run)
    count = len(run) if kill is None else run.index(kill.seed) + 1
    return Hunt(mutant, kill, count, process_time() - began)


def hunt(mutant: Mutant, seeds: Iterable[int] | None = None) -> Kill | None:
    """The first seed (of ``LIMIT``, unless others are given) that shows the bug; None: it survives all of them."""
    with mutant.planted():
        for seed in range(LIMIT) if seeds is None else seeds:
            outcome = simulate(seed)
            if outcome.violations:
                first = outcome.violations[0]
                return Kill(seed, first.rule, first.message)
    return None
