"""Running seeds: one at a time, or many in several processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from attrs import frozen

from disagg_kv.core.room.machine import Machine

from .fault import EVERY, FaultClass
from .kind import Kind
from .scenario import Scenario
from .simulation import Violation
from .world import World


@frozen
class Outcome:
    """How one seed went.

    Args:
        seed: it.
        violations: rules that did not hold; normally none.
        digest: of every frame, write and end, in order.
        events: how many there were.
        seconds: simulated.
        faults: how often each class happened.
        kinds: how often requests were of each kind.
        marks: which releases and rare ways were seen.
        cells: of the transition tables, as ``(state, event)``.
        rooms, ranks: how many.
        segments: that landed, per room and decode rank that succeeded.
    """

    seed: int
    violations: tuple[Violation, ...]
    digest: str
    events: int
    seconds: float
    faults: Counter[FaultClass]
    kinds: Counter[Kind]
    marks: frozenset[str]
    cells: frozenset[tuple[Enum, type]]
    rooms: int
    ranks: int
    segments: tuple[int, ...]


def simulate(
    seed: int,
    faults: frozenset[FaultClass] = EVERY,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Run one seed from beginning to end.

    Args:
        seed: any integer that is not negative; equal seeds and faults give equal runs.
        faults: classes that may be switched on.
        trace: takes a line per event.
    """
    scenario = Scenario.draw(seed, faults)
    with _watched() as (cells, errors):
        world = World(scenario, trace)
        world.errors = errors
        world.run()
    return Outcome(
        seed,
        tuple(world.violations),
        world.digest,
        world.events,
        world.now,
        world.hits,
        world.kinds,
        frozenset(world.marks),
        frozenset(cells),
        len(scenario.requests),
        scenario.ranks,
        tuple(world.segments),
    )


def trace(seed: int, tell: Callable[[str], None], faults: frozenset[FaultClass] = EVERY) -> Outcome:
    """Run one seed: ``tell`` takes the scenario, and then a line per event."""
    tell(str(Scenario.draw(seed, faults)))
    return simulate(seed, faults, tell)


class _Errors(logging.Handler):
    """What endpoints log of errors that they did not foresee."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.logged.append(logging.Formatter().format(record))


@contextmanager
def _watched() -> Iterator[tuple[set[tuple[Enum, type]], list[str]]]:
    """Watch the transition tables, and keep the library's log to ourselves."""
    log = logging.getLogger("disagg_kv")
    level, propagate, before = log.level, log.propagate, Machine.seen
    handler = _Errors()
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    cells: set[tuple[Enum, type]] = set()
    Machine.seen = cells
    try:
        yield cells, handler.logged
    finally:
        Machine.seen = before
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
