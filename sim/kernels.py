"""Kernels of a simulated rank, which sometimes take their time and sometimes fail, and what they prepare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from attrs import evolve

from disagg_kv.kernels import KERNELS, Checksums, Move, PageMove
from disagg_kv.memory import Buffer, Event, Flag, MemoryPool, bytes_of, parts
from disagg_kv.staging import Lease

from .copies import copy
from .dma import SimTransport
from .events import SimEvent
from .fault import FaultClass
from .simulation import SimProcess, Simulation

CPU = KERNELS["cpu"]()

MOST_PREPARED = 3
"""Launches of one rank: few, so that there are both those that are prepared and those that are not."""


class SimKernels:
    """The CPU's kernels, which sometimes take their time and sometimes fail; checks what they read.

    They keep a thread while they copy pages, so that none of their copies has more bytes than a slot.
    """

    name = "sim"

    def __init__(self, world: Simulation, node: SimProcess, transport: SimTransport) -> None:
        self._world = world
        self._node = node
        self._transport = transport
        self.copies = 0
        """Launches of copies into mapped pages."""
        self._most: float = world.scenario.slot_bytes

    def gather(
        self,
        pool: MemoryPool,
        moves: Sequence[Move],
        staging: Buffer,
        after: Event | None,
    ) -> Event | None:
        """Copy pages into staging, now or later, and not before ``after``."""

        def act() -> None:
            self._node.memory.version += 1
            CPU.gather(pool, moves, staging, None)

        return self._run(act, after)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Copy staging into pages, now or later: what landed must still be there by then."""
        ring = bytes_of(staging)
        parts = [(move.base, move.layout.nbytes, self._landed(move)) for move in moves]

        def act() -> None:
            for base, nbytes, lease in parts:
                there = self._transport.landed.get(base)
                same = there is not None and there.lease is lease and self._node.holds(lease)
                if there is None or not same or ring[base : base + nbytes].tobytes() != there.data:
                    self._world.violation(
                        "I1",
                        f"{self._node.address}: staged bytes at {base} changed before scatter",
                    )
            self._node.memory.version += 1
            CPU.scatter(pool, moves, staging)

        return self._run(act)

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        """Copy pages into mapped pages, now or later, and not before ``after``; see :mod:`.copies`."""
        self.copies += 1
        nbytes = max((move.copy.source.nbytes for move in moves), default=0)
        if nbytes > self._most:
            what = f"a copy of {nbytes} bytes keeps a thread, and a slot has {self._most}"
            self._world.violation("I4", f"{self._node.address}: {what}")
        return copy(self._transport.dma, self._transport, moves, after, flags)

    def prepare_scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> SimPrepared | None:
        """Sometimes; what is prepared is for leases that are live now."""
        world, node = self._world, self._node
        if not self._prepares():
            return None
        live = node.leases()
        leases = [one for move in moves for one in live if one.offset <= move.base < one.offset + one.nbytes]
        if len(leases) < len(moves):
            world.violation("I1", f"{node.address}: a scatter is prepared from bytes that no lease has")
        return SimPrepared(world, node, leases, lambda: self.scatter(pool, moves, staging))

    def prepare_gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> SimPreparedGather | None:
        """Sometimes; whether its pages are still the room's is seen by what it brings."""
        if not self._prepares():
            return None

        def gather(base: int, after: Event | None) -> Event | None:
            return self.gather(pool, [evolve(move, base=move.base + base) for move in moves], staging, after)

        return SimPreparedGather(self._world, self._node, gather)

    def _prepares(self) -> bool:
        world = self._world
        if world.faulty and world.chance(FaultClass.KERNEL):
            world.hit(FaultClass.KERNEL)
            raise RuntimeError("sim: the kernel failed")
        if len(self._node.prepared) < MOST_PREPARED:
            return True
        world.mark("prepared:as much as may be")
        return False

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Sum pages."""
        return CPU.checksum(pool, moves, after)

    def _landed(self, move: Move) -> Lease | None:
        there = self._transport.landed.get(move.base)
        if there is None or not self._node.holds(there.lease) or len(there.data) != move.layout.nbytes:
            self._world.violation(
                "I1",
                f"{self._node.address}: a scatter from {move.base}, where nothing landed",
            )
            return None
        return there.lease

    def _run(self, act: Callable[[], object], after: Event | None = None) -> Event | None:
        world = self._world
        waits = [one for one in dict.fromkeys(parts(after)) if not one.query()]
        failed = world.faulty and world.chance(FaultClass.KERNEL)
        if failed:
            world.hit(FaultClass.KERNEL)
        if not waits and (not world.scenario.slow_kernels or world.random.random() < 0.3):
            if failed:
                raise RuntimeError("sim: the kernel failed")
            act()
            return None
        event = SimEvent(RuntimeError("sim: the kernel failed") if failed else None)

        def happen() -> None:
            if self._node.alive:
                if not failed:
                    act()
                event.happen()
                self._node.touch()

        def begin() -> None:
            if all(one.query() for one in waits):
                world.later(world.random.randint(1, 4) / 1000, happen)

        for one in waits:
            assert isinstance(one, SimEvent)
            world.mark("events:a gather waits for its rows")
            one.then(begin)
        if not waits:
            begin()
        return event


class QueueingKernels(SimKernels):
    """The same, as on a GPU: it queues copies, and no thread waits for them."""

    def __init__(self, world: Simulation, node: SimProcess, transport: SimTransport) -> None:
        super().__init__(world, node, transport)
        self._most = inf

    def orders(self, event: Event) -> bool:
        """In some worlds gathers are queued behind what the engine still computes."""
        return self._world.scenario.orders


class SimHeld:
    """What is prepared on a rank, until it is launched or dropped."""

    def __init__(self, world: Simulation, node: SimProcess, what: str) -> None:
        self._world = world
        self._node = node
        self._what = what
        node.prepared.add(self)

    def drop(self) -> None:
        """Nothing is launched."""
        if self in self._node.prepared:
            self._world.mark(f"prepared:{self._what} dropped")
        self._node.prepared.discard(self)

    def _end(self) -> None:
        node = self._node
        if self not in node.prepared:
            self._world.violation("I1", f"{node.address}: a {self._what} is launched after its end")
        node.prepared.discard(self)
        self._world.mark(f"prepared:{self._what} launched")


class SimPreparedGather(SimHeld):
    """A prepared gather: it is launched once or dropped."""

    def __init__(
        self, world: Simulation, node: SimProcess, gather: Callable[[int, Event | None], Event | None]
    ) -> None:
        super().__init__(world, node, "gather")
        self._gather = gather

    def launch(self, base: int, after: Event | None) -> Event | None:
        """Read the pages now, and not before."""
        self._end()
        return self._gather(base, after)


class SimPrepared(SimHeld):
    """A prepared scatter: it is launched once or dropped, and launched only while its leases live."""

    def __init__(
        self, world: Simulation, node: SimProcess, leases: Sequence[Lease], scatter: Callable[[], Event | None]
    ) -> None:
        super().__init__(world, node, "scatter")
        self._leases = leases
        self._scatter = scatter

    def launch(self) -> Event | None:
        """Read the ring now, and not before."""
        node = self._node
        if not all(node.holds(lease) for lease in self._leases):
            self._world.violation("I1", f"{node.address}: a scatter is launched that was prepared for an earlier lease")
        self._end()
        return self._scatter()
