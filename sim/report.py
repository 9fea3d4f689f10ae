"""Many seeds: how they went together, and what no seed has reached."""

from __future__ import annotations

import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain
from multiprocessing import get_context

from attrs import define, field, frozen

from disagg_kv.core.base import Finished, Gone, Leased
from disagg_kv.core.room.tables import RECEIVING, SENDING, Receiving, Sending

from .fault import EVERY, FaultClass
from .kind import Kind
from .run import Outcome, simulate

GATE = 2000
"""Seeds from which on everything must have been reached: every fault, every kind of request, every cell of the
tables, every release."""

MARKS = frozenset(
    {
        "both ways:both rings are full",
        "links:dropped",
        "release:landed",
        "release:drained",
        "release:gone",
        "release:fenced",
        "release:confirmed",
        "release:settled",
        "release:exposed pages",
        "noticed:by the transport",
        "events:a gather waits for its rows",
        "events:a write waits for one",
        "events:it fails",
        "events:its peer has ended",
        "mapped:a copy takes its time",
        "mapped:a copy waits for its rows",
        "mapped:a copy fails before it is quiet",
        "mapped:a copy outlives its target",
        "mapped:a mapping fails",
        "mapped:cut although all paths copy",
        "mapping:prefill waits",
        "mapped:auto copies",
        "mapped:auto stages first",
        "flags:late",
        "flags:lost",
        "flags:twice",
        "flags:old",
        "flags:torn",
        "flags:there are none",
        "flags:a device raises one",
        "verdict:ranks of one side end differently",
        "votes:a vote waits",
        "votes:the follower gives up",
        "votes:the follower gives up before rank 0 ends",
        "votes:the follower stands still",
        "votes:the follower ends",
        "votes:rank 0 gives up",
        "votes:rank 0 stands still",
        "votes:rank 0 ends",
        "prepared:gather launched",
        "prepared:gather dropped",
        "prepared:scatter launched",
        "prepared:scatter dropped",
        "prepared:as much as may be",
        "at once:abort after Expect",
        "at once:abort after rows",
        "at once:abort before layers",
        "at once:abort after layers",
        "at once:withdraw after Expect",
        "at once:withdraw after rows",
        "at once:withdraw before layers",
        "at once:withdraw after layers",
        "greeting:of an older life",
        "refused:quarantine full",
        "room:another attempt",
        "used twice:refused",
        "used twice:fails",
        "used twice:succeeds",
        "engine:waits for pages",
        "replaced:rank 0 there",
        "replaced:rank 0 elsewhere",
        "replaced:another rank there",
        "replaced:another rank elsewhere",
        "superseded:refuses rooms",
    }
)
"""Rare ways that a gate run must have seen, the ways in which memory comes back first of all."""

UNREACHED: frozenset[tuple[Enum, type]] = frozenset(
    {
        (Receiving.OPENED, Gone),
        (Sending.COMPLETE, Gone),
        (Sending.ABORTING, Gone),
        (Sending.MOVING, Gone),
        (Sending.FINISHED, Gone),
        (Sending.DRAINING, Gone),
        (Receiving.DRAINING, Leased),
        (Sending.ABORTING, Finished),
        (Sending.DRAINING, Finished),
    }
)
"""Cells that endpoints do not enter today, or hardly ever, and that stay as a second line of defence.

``Lost`` comes before ``Gone``. Only open rooms request and grant leases. Engines cannot finish a room that has ended. A
flow is complete for a moment only. Unit tests enter these cells.
"""

BATCH = 25
"""Seeds that one process takes at once."""

TWICE = 51
"""One of this many seeds is run twice: its digests must be equal (I8); of every topology in turn."""

SHOWN = 20
"""Violations that are kept."""


@frozen
class Found:
    """A rule that did not hold, and the seed that shows it."""

    seed: int
    rule: str
    at: float
    message: str


@define
class Summary:
    """What many seeds have in common; merge it with :meth:`add`, in the order of the seeds.

    Args:
        seeds: how many were run.
        violated: in how many a rule did not hold.
        found: the first of those.
        events, simulated_s: in all.
        faults: how often each class happened.
        kinds: how often requests were of each kind.
        rooms, ranks: in all, for the averages.
        landed, finished: segments that landed, and the pairs of room and decode rank that they landed in.
        wall_s, cpu_s: what it took.
    """

    seeds: int = 0
    violated: int = 0
    found: list[Found] = field(factory=list)
    events: int = 0
    simulated_s: float = 0.0
    faults: Counter[FaultClass] = field(factory=Counter)
    kinds: Counter[Kind] = field(factory=Counter)
    rooms: int = 0
    ranks: int = 0
    landed: int = 0
    finished: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    marks: set[str] = field(factory=set)
    cells: set[tuple[Enum, type]] = field(factory=set)
    _digest: bytes = b""

    @property
    def trace_digest(self) -> str:
        """Of everything that happened in every seed."""
        return self._digest.hex()

    def add(self, outcome: Outcome) -> None:
        """One more seed."""
        self.seeds += 1
        self.events += outcome.events
        self.simulated_s += outcome.seconds
        self.faults += outcome.faults
        self.kinds += outcome.kinds
        self.rooms += outcome.rooms
        self.ranks += outcome.ranks
        self.landed += sum(outcome.segments)
        self.finished += len(outcome.segments)
        self.marks |= outcome.marks
        self.cells |= outcome.cells
        self._digest = hashlib.blake2b(self._digest + outcome.digest.encode(), digest_size=16).digest()
        if outcome.violations:
            self.violated += 1
            if len(self.found) < SHOWN:
                first = outcome.violations[0]
                self.found.append(Found(outcome.seed, first.rule, first.at, first.message))

    def missing(self) -> list[str]:
        """Everything that a gate run must have reached and this one has not."""
        cells = [f"cell:{s.value}/{type(s).__name__.lower()}/{e.__name__}" for s, e in self._unseen()]
        faults = [f"fault:{f.name.lower()}" for f in FaultClass if f not in self.faults]
        kinds = [f"kind:{k.name.lower()}" for k in Kind if k not in self.kinds]
        return [*faults, *kinds, *cells, *sorted(MARKS - self.marks)]

    def _unseen(self) -> Iterator[tuple[Enum, type]]:
        return (cell for cell in chain(RECEIVING, SENDING) if cell not in self.cells and cell not in UNREACHED)


def run_batch(seeds: range, faults: frozenset[FaultClass]) -> tuple[list[Outcome], float]:
    """Run some seeds in this process; their outcomes, and the CPU seconds that they took."""
    started = time.process_time()
    outcomes = []
    with _collected_by_world() as collect:
        for seed in seeds:
            outcome = simulate(seed, faults)
            if seed % TWICE == 0:
                again = simulate(seed, faults)
                if again.digest != outcome.digest:
                    digests = f"{outcome.digest}, {again.digest}"
                    raise AssertionError(f"I8: seed {seed} ran twice and went two ways: {digests}")
            outcomes.append(outcome)
            collect()
    return outcomes, time.process_time() - started


@contextmanager
def _collected_by_world() -> Iterator[Callable[[], int]]:
    """Garbage is collected between worlds: during a world, nearly all objects of a collection are still in use.

    The garbage of a world is of the youngest generation then, so that the collector skips all older objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield partial(gc.collect, 0)
    finally:
        if enabled:
            gc.enable()


def simulate_many(
    seeds: int,
    first: int = 0,
    *,
    faults: frozenset[FaultClass] = EVERY,
    jobs: int = 1,
    done: Callable[[int], None] | None = None,
) -> Summary:
    """Run the seeds ``first`` to ``first + seeds - 1``; the summary does not depend on ``jobs``.

    Args:
        seeds: how many.
        first: the first one.
        faults: classes that may be switched on.
        jobs: processes.
        done: called with the number of seeds that have just been run.
    """
    summary = Summary()
    started = time.perf_counter()
    stop = first + seeds
    batches = [range(s, min(s + BATCH, stop)) for s in range(first, stop, BATCH)]
    for outcomes, cpu_s in _results(batches, faults, jobs):
        for outcome in outcomes:
            summary.add(outcome)
        summary.cpu_s += cpu_s
        if done is not None:
            done(len(outcomes))
    summary.wall_s = time.perf_counter() - started
    return summary


def _results(batches: list[range], faults: frozenset[FaultClass], jobs: int) -> Iterable[tuple[list[Outcome], float]]:
    work = partial(run_batch, faults=faults)
    if jobs == 1:
        yield from map(work, batches)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, batches)
