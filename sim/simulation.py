"""Time, chance and the record of one simulation, and the processes in it, as all its parts see them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappush
from math import inf
from typing import cast

import numpy as np
from attrs import frozen

from disagg_kv.ids import Epoch
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.staging import ALIGNMENT, Lease, RingStagingAllocator
from disagg_kv.transports.process import Process

from .describe import describe
from .fault import FaultClass
from .kind import Kind
from .memory import RankMemory
from .scenario import Scenario, Split

AWAY_S = (0.2, 0.4, 0.6)
"""How long the rendezvous is away. Rooms that wait for it meanwhile must not fail: they may wait for longer."""

FEW = 3
"""How often a fault of helper threads, or of what they call, happens in a world."""


@frozen
class Violation:
    """A rule that did not hold, when, and how."""

    rule: str
    at: float
    message: str

    def __str__(self) -> str:
        return f"{self.rule} at {self.at:.4f} s: {self.message}"


class Simulation:
    """Time, chance, and what has happened. Equal scenarios give equal runs, event by event.

    Args:
        scenario: what is drawn.
        trace: takes a line per event, for people.
    """

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.random = random.Random(f"world {scenario.seed}")
        self.now = 0.0
        self.healed = False
        self.known_at = 0.0
        """By then processes know of each end, and helper threads have returned."""
        self.hits: Counter[FaultClass] = Counter()
        self.kinds: Counter[Kind] = Counter()
        self.marks: set[str] = set()
        self.violations: list[Violation] = []
        self.dirty: list[SimProcess] = []
        self.processes: dict[Process, SimProcess] = {}
        self.rendezvous = StaticRendezvous()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._trace = trace
        self._digest = blake2b(digest_size=16)
        self._noted_at, self._stamp = 0.0, f"{0.0:.6f}"
        self._order = 0
        self.junk = random.Random(f"junk {scenario.seed}")
        self.outside = Outside(self)

    @property
    def digest(self) -> str:
        """Of everything that has happened so far (I8)."""
        return self._digest.hexdigest()

    @property
    def faulty(self) -> bool:
        """Whether faults may still happen."""
        return not self.healed

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Do something at a time."""
        self._order += 1
        heappush(self._heap, (when, self._order, act))

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Do something after some seconds."""
        self._order += 1
        heappush(self._heap, (self.now + seconds, self._order, act))

    def chance(self, fault: FaultClass) -> bool:
        """Whether a fault happens now."""
        rate = self.scenario.faults.get(fault)
        return rate is not None and self.random.random() < rate

    def hit(self, fault: FaultClass) -> None:
        """A fault has happened."""
        self.hits[fault] += 1
        if self._trace is not None:
            self._trace(f"{self.now:9.4f} FAULT {fault.name.lower()}: {fault.value}")

    def saw(self, kind: Kind) -> None:
        """A request did something of this kind."""
        self.kinds[kind] += 1
        self.note("kind", kind.name.lower(), "", b"")

    def mark(self, name: str) -> None:
        """Something that a gate run must have seen."""
        self.marks.add(name)

    def note(self, kind: str, where: str, to: object, data: object) -> None:
        """Something happened: it goes into the digest, and into the trace if there is one."""
        if self.now != self._noted_at:
            self._noted_at, self._stamp = self.now, f"{self.now:.6f}"
        self._digest.update(f"{self._stamp} {kind} {where} {to}".encode())
        self._digest.update(data if isinstance(data, bytes) else str(data).encode())
        if self._trace is not None:
            self._trace(f"{self.now:9.4f} {kind} {where} -> {to}: {describe(kind, data)}")

    def violation(self, rule: str, message: str) -> None:
        """A rule does not hold: the simulation ends after this event."""
        self.violations.append(Violation(rule, self.now, message))

    def count(self, number: int) -> int:
        """The same number, with the fault ``JUNK`` in one of the types in which some engines keep their counts."""
        if FaultClass.JUNK not in self.scenario.faults:
            return number
        kinds: tuple[Callable[[int], object], ...] = (int, np.int64, np.uint32, np.intp)
        return cast("int", self.junk.choice(kinds)(number))


class Outside:
    """When what an endpoint is given fails. Its draws do not shift those of the rest of a seed."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.random = world.scenario.outside()
        self.helping = random.Random(f"helping {world.scenario.seed}")
        self._away_until = -1.0
        if FaultClass.RENDEZVOUS in world.scenario.faults:
            world.later(self.random.choice((0.0, 0.0, 0.3)) * self.random.random(), self._leave)

    @property
    def away(self) -> bool:
        """Whether the rendezvous is away."""
        return self._world.now < self._away_until

    def happens(self, fault: FaultClass, rate: float) -> bool:
        """Whether a fault of a helper thread, or of what it calls, happens now: a few times, until faults stop."""
        world = self._world
        if not world.faulty or fault not in world.scenario.faults or world.hits[fault] >= FEW:
            return False
        happens = self.helping.random() < rate
        if happens:
            world.hit(fault)
        return happens

    def _leave(self) -> None:
        self._away_until = self._world.now + self.random.choice(AWAY_S)

    def observer_raises(self) -> bool:
        """Whether an observer raises now."""
        faults = self._world.scenario.faults
        raises = FaultClass.OBSERVER in faults and self.random.random() < faults[FaultClass.OBSERVER]
        if raises:
            self._world.hit(FaultClass.OBSERVER)
        return raises


class SimRing(RingStagingAllocator):
    """The library's ring, and which leases of it live; ``live_leases`` by their place."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.live_leases: dict[int, Lease] = {}

    def reserve(self, nbytes: int) -> Lease | None:
        """See :meth:`RingStagingAllocator.reserve`."""
        lease = super().reserve(nbytes)
        if lease is not None:
            self.live_leases[lease.offset] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """See :meth:`RingStagingAllocator.release`."""
        super().release(lease)
        if self.live_leases.get(lease.offset) is lease:
            del self.live_leases[lease.offset]


class SimProcess:
    """What the parts of a simulation know of one process.

    Args:
        world: the simulation.
        index: its number among the processes of its side.
        side: ``"prefill"`` or ``"decode"``.
        instance, rank, split: its place.
        life: 1 for the first process in this place.
        elsewhere: at an address of its own, not at that of the life before.
        beside: the endpoint with which it shares a process and the pool, where rooms go both ways; None: it is alone,
            or the first of the two.

    ``other``: the other endpoint of the process.
    ``back``: it serves the rooms from decode to prefill.
    ``maps``: it maps the pool of a peer as it connects it.
    ``mapped_at``: by then the last one that takes long has returned.
    ``raised_at``: when a flag of its page was raised last.
    """

    def __init__(
        self,
        world: Simulation,
        index: int,
        side: str,
        instance: str,
        split: Split,
        rank: int,
        life: int,
        elsewhere: bool = False,
        beside: SimProcess | None = None,
    ) -> None:
        self.world = world
        self.other = beside
        self.back = beside is not None
        self.process: Process
        self.memory: RankMemory
        self.index = index
        self.side = side
        self.instance = instance
        self.rank = rank
        self.life = life
        self.split = split
        self.address = f"sim://{side}{index}" + f".{life}" * elsewhere
        self.epoch = Epoch(b"%b%04d%02d%08d" % (side[:2].encode(), index, life % 100, world.scenario.seed % 10**8))
        self.alive = True
        self.paused = False
        self.died_at: float | None = None
        self.confirmed = False
        self.followed = False
        self.frozen_at: float | None = None
        self.stood_still = 0.0
        self.losses = 0
        self.touched = False
        self.helping = False
        self.maps = False
        self.mapped_at = 0.0
        self.poll_raises = False
        self.polls_left = 0
        self.overdue, self.overdue_since = 0, inf
        self.must_break = False
        self.send_raises = False
        self.handling_raises = False
        self.steps = 0
        self.checked_at = 0.0
        self.prepared: set[object] = set()
        self.ring = SimRing(ALIGNMENT)
        self.raised_at = -1.0
        self.offset = 0.0
        self.wake_at = 0.0
        if beside is not None:
            beside.other, self.process, self.memory = self, beside.process, beside.memory
            return
        # A later life may be in a process that was there before: only its birth says which is the later one.
        started = 7 * life % 10
        self.process = Process(1000 * life + 100 * (side == "decode") + index, started, self._host())
        world.processes[self.process] = self
        self.memory = RankMemory(world.scenario.model, split, rank, self.epoch)

    def _host(self) -> str:
        return "host" if self.world.scenario.one_host else f"host {self.side}"

    def touch(self) -> None:
        """It has something to do."""
        if not self.touched:
            self.touched = True
            self.world.dirty.append(self)

    @property
    def failing(self) -> bool:
        """Whether its process has ended, or what its endpoint is given raises now."""
        return self.poll_raises or not self.alive

    def may_block(self, what: str) -> None:
        """Something is called that may block: not on the endpoint's thread (I4)."""
        if not self.helping:
            self.world.violation("I4", f"{self.address} {what} on the endpoint's thread, where that may block")

    def clock(self) -> float:
        """This process's time."""
        return self.world.now + self.offset

    def leases(self) -> list[Lease]:
        """The live leases of the ring."""
        return list(self.ring.live_leases.values())

    def holds(self, lease: Lease | None) -> bool:
        """Whether a lease is still live."""
        return lease is not None and self.ring.live_leases.get(lease.offset) is lease
