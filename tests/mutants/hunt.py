"""Running the simulator against one bug until it is found."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from disagg_kv.testing.sim import simulate

from .planting import Mutant

LIMIT = 10_000
"""Seeds within which each bug must be found."""


@frozen
class Kill:
    """The seed that found a bug, and how."""

    seed: int
    rule: str
    message: str


def hunt(mutant: Mutant, seeds: Iterable[int] | None = None) -> Kill | None:
    """The first seed (of ``LIMIT``, unless others are given) that shows the bug; None: it survives all of them."""
    with mutant.planted():
        for seed in range(LIMIT) if seeds is None else seeds:
            outcome = simulate(seed)
            if outcome.violations:
                first = outcome.violations[0]
                return Kill(seed, first.rule, first.message)
    return None
