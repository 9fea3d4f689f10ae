"""One life of a simulated rank: its memory, its endpoint, and what the world does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING

from attrs import evolve

from ...channels import Arrived
from ...endpoints import DecodeEndpoint, Environment, Incarnation, PrefillEndpoint
from ...endpoints.decode.inspection import DecodeInspection
from ...endpoints.prefill.inspection import PrefillInspection
from ...endpoints.runtime.background import Background
from ...errors import DisaggKVError, PeerLostError, TransportError
from ...ids import Epoch
from ...kernels import KERNELS, Checksums, Move
from ...memory import Buffer, Event, MemoryPool, bytes_of, parts
from ...protocol import Flow, RoomKey
from ...protocol.receive_room import ReceiveRoom
from ...staging import ALIGNMENT, Lease, RingStagingAllocator
from ...trace import Observer, Span
from ...transports.process import Process
from .dma import SimTransport
from .environment import SimBackground, SimRendezvous
from .fault import FaultClass
from .memory import RankMemory
from .network import SimBatchChannel, SimChannel
from .scenario import Split, shards_of

if TYPE_CHECKING:
    from .forward_passes import ForwardPasses
    from .prefixes import Prefixes
    from .world import World

CPU = KERNELS["cpu"]

MOST_PREPARED = 3
"""Launches of one rank: few, so that there are both those that are prepared and those that are not."""


class SimEvent:
    """Something that happens when the world says so; a failed one raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.happened = False
        self._error = error
        self._next: list[Callable[[], None]] = []

    def happen(self) -> None:
        """Now."""
        self.happened = True
        for act in self._next:
            act()

    def then(self, act: Callable[[], None]) -> None:
        """What comes as soon as it has happened."""
        self._next.append(act)

    def query(self) -> bool:
        """True once it has happened."""
        if self.happened and self._error is not None:
            raise self._error
        return self.happened

    def synchronize(self) -> None:
        """A simulation never waits."""
        assert self.happened, "a simulation never waits"


class SimKernels:
    """The CPU's kernels, which sometimes take their time and sometimes fail; checks what they read."""

    name = "sim"

    def __init__(self, world: World, node: SimNode) -> None:
        self._world = world
        self._node = node

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

    def orders(self, event: Event) -> bool:
        """In some worlds, as on a GPU, gathers are queued behind what the engine still computes."""
        return self._world.scenario.orders

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Copy staging into pages, now or later: what landed must still be there by then."""
        ring = bytes_of(staging)
        parts = [(move.base, move.layout.nbytes, self._landed(move)) for move in moves]

        def act() -> None:
            for base, nbytes, lease in parts:
                there = self._node.transport.landed.get(base)
                same = there is not None and there.lease is lease and self._node.holds(lease)
                if there is None or not same or ring[base : base + nbytes].tobytes() != there.data:
                    self._world.violation(
                        "I1",
                        f"{self._node.address}: staged bytes at {base} changed before scatter",
                    )
            self._node.memory.version += 1
            CPU.scatter(pool, moves, staging)

        return self._run(act)

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
        there = self._node.transport.landed.get(move.base)
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
                world.touch(self._node)

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


class SimHeld:
    """What is prepared on a rank, until it is launched or dropped."""

    def __init__(self, world: World, node: SimNode, what: str) -> None:
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

    def __init__(self, world: World, node: SimNode, gather: Callable[[int, Event | None], Event | None]) -> None:
        super().__init__(world, node, "gather")
        self._gather = gather

    def launch(self, base: int, after: Event | None) -> Event | None:
        """Read the pages now, and not before."""
        self._end()
        return self._gather(base, after)


class SimPrepared(SimHeld):
    """A prepared scatter: it is launched once or dropped, and launched only while its leases live."""

    def __init__(
        self, world: World, node: SimNode, leases: Sequence[Lease], scatter: Callable[[], Event | None]
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


class SimWatch:
    """Sees a process's end as soon as it is looked at."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def ended(self, *, at_once: bool = False) -> bool:
        """Whether it has ended."""
        return not self._node.alive


class SimObserver:
    """An engine's observer, which may raise."""

    def __init__(self, world: World) -> None:
        self._world = world

    def span(self, span: Span) -> None:
        """Spans are ignored."""
        if self._world.outside.observer_raises():
            raise RuntimeError("sim: the observer failed")

    def count(self, name: str, amount: int = 1) -> None:
        """:class:`Counters` keeps them."""
        if self._world.outside.observer_raises():
            raise RuntimeError("sim: the observer failed")


class Counters:
    """The endpoint's counters, also once its observer was dropped: some of them are violations."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self.of: dict[str, int] = {}

    def span(self, span: Span) -> None:
        """Pass it on."""
        self._inner.span(span)

    def count(self, name: str, amount: int = 1) -> None:
        """Keep it, and pass it on."""
        self.of[name] = self.of.get(name, 0) + amount
        self._inner.count(name, amount)


class SimNode:
    """One process: the world steps it, and it may stand still, jump in time, or end."""

    endpoint: PrefillEndpoint | DecodeEndpoint
    view: PrefillInspection | DecodeInspection
    _unprepared: Sequence[Sized]
    prefixes: Prefixes | None = None
    passes: ForwardPasses

    def __init__(
        self,
        world: World,
        index: int,
        side: str,
        instance: str,
        split: Split,
        rank: int,
        life: int,
        elsewhere: bool = False,
    ) -> None:
        self.world = world
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
        self.poll_raises = False
        self.polls_left = 0
        self.overdue = 0
        self.must_break = False
        self.send_raises = False
        self.handling_raises = False
        self.steps = 0
        self.checked_at = 0.0
        self.prepared: set[SimHeld] = set()
        self.ring = SimRing(ALIGNMENT)
        self.leased: dict[tuple[RoomKey, int], ReceiveRoom] = {}
        self.offset = 0.0
        self.wake_at = 0.0
        # A later life may be in a process that was there before: only its birth says which is the later one.
        started = 7 * life % 10
        self.process = Process(1000 * life + 100 * (side == "decode") + index, started, self._host())
        self.memory = RankMemory(world.scenario.model, split, rank, self.epoch)
        self.channel = (SimBatchChannel if world.scenario.together else SimChannel)(world, self)
        self.transport = SimTransport(world, self)
        world.transports[self.transport.me] = self.transport
        world.processes[self.process] = self
        # An endpoint is made on a thread of its engine.
        self.helping = True
        self._build(index)
        self.helping = False

    def _allocate(self, nbytes: int) -> SimRing:
        self.ring = SimRing(nbytes)
        return self.ring

    def _host(self) -> str:
        return "host" if self.world.scenario.one_host else f"host {self.side}"

    def _build(self, index: int) -> None:
        world, scenario = self.world, self.world.scenario
        life = Incarnation(self.epoch, self.process, self._watch, born=self.life)
        environment = Environment(clock=self.clock, sleep=_never, thread=False, life=life, background=self._helpers)
        if self.side == "decode":
            decode = DecodeEndpoint(
                self.memory.pool, transport=self.transport, channel=self.channel, rendezvous=SimRendezvous(world, self),
                instance=self.instance, rank=self.rank, shards=shards_of(scenario.model, self.split.tp, self.split.pp),
                strategy=scenario.decode_path, verify=scenario.verify, ring_bytes=scenario.ring_bytes,
                allocator=self._allocate, options=scenario.options, kernels=SimKernels(world, self),
                observer=SimObserver(world), environment=environment,
            )  # fmt: skip
            self.endpoint, self.view = decode, decode.inspect()
            self._unprepared = (self.view.scatters.unprepared,)
        else:
            prefill = PrefillEndpoint(
                self.memory.pool, transport=self.transport, channel=self.channel, rendezvous=SimRendezvous(world, self),
                instance=self.instance, rank=self.rank, shards=shards_of(scenario.model, self.split.tp, self.split.pp),
                strategy=scenario.prefill_paths[world.source_of(index)],
                schedule=scenario.schedule, verify=scenario.verify, slot_bytes=scenario.slot_bytes,
                slots=scenario.slots, options=scenario.options, kernels=SimKernels(world, self),
                observer=SimObserver(world), environment=environment,
            )  # fmt: skip
            self.endpoint, self.view = prefill, prefill.inspect()
            self._unprepared = (self.view.transfers.pending, self.view.transfers.prepared.gathers.waiting)
        self.loop = self.endpoint.driver.loop
        self._end_rooms = self.loop.side.integrity_failure
        self.loop.side.integrity_failure = self._handle_error  # type: ignore[method-assign]
        self.counters = self.loop.observer = Counters(self.loop.observer)
        self.loop.most = scenario.pieces

    def _handle_error(self, error: DisaggKVError, *, unmet: bool = False) -> None:
        """What the endpoint does about an error that it did not foresee; it may fail half way."""
        if not self.handling_raises or self.world.outside.random.random() < 0.5:
            self._end_rooms(error, unmet=unmet)
        if self.handling_raises:
            self.must_break = True
            raise RuntimeError("sim: the handling of an error failed")

    @property
    def exposes(self) -> bool:
        """Whether prefill may write straight to its pages."""
        return isinstance(self.view, DecodeInspection) and self.view.exposes

    @property
    def busy(self) -> bool:
        """Whether another step would do something at once."""
        return self.behind or any(map(len, self._unprepared))

    @property
    def behind(self) -> bool:
        """Whether commands or frames did not fit into its last step."""
        return any(self.view.loop.backlog)

    def step(self) -> None:
        """One step. However much waits for the process, it gets to its heartbeats and deadlines (I4)."""
        inbox = len(self.channel.inbox)
        before = self.view.loop.backlog
        self.endpoint.driver.step()
        after = self.view.loop.backlog
        commands, frames = before[0] - after[0], before[1] + inbox - after[1] - len(self.channel.inbox)
        if max(commands, frames) > 2 * self.loop.most:
            what = f"{commands} commands and {frames} frames in one step"
            self.world.violation("I4", f"{self.address}: {what}, in which a heartbeat may be due")

    @property
    def failing(self) -> bool:
        """Whether its process has ended, or what its endpoint is given raises now."""
        return self.poll_raises or not self.alive

    def may_block(self, what: str) -> None:
        """Something is called that may block: not on the endpoint's thread (I4)."""
        if not self.helping:
            self.world.violation("I4", f"{self.address} {what} on the endpoint's thread, where that may block")

    def take_in(self, frame: bytes) -> None:
        """Take in a frame, and do nothing else: its consequences are left to the next step."""
        self.loop.take_in(Arrived(frame))

    def machines(self) -> Sequence[ReceiveRoom | Flow]:
        """What drives its rooms: one machine per room of decode, one per room and decode rank of prefill."""
        view = self.view
        if isinstance(view, DecodeInspection):
            return [room.machine for room in view.rooms.values()]
        return [flow for room in view.flows.values() for flow in room.machine.flows.values()]

    def clock(self) -> float:
        """This process's time."""
        return self.world.now + self.offset

    def leases(self) -> list[Lease]:
        """The live leases of the ring."""
        return list(self.ring.live_leases.values())

    def holds(self, lease: Lease | None) -> bool:
        """Whether a lease is still live."""
        return lease is not None and self.ring.live_leases.get(lease.offset) is lease

    def _helpers(self, name: str, most: int) -> Background:
        return SimBackground(self.world, self, name)

    def _watch(self, process: Process) -> SimWatch:
        if process.host != self.process.host:
            raise TransportError(f"sim: {process.host} is not seen from {self.process.host}")
        other = self.world.processes[process]
        if not other.alive:
            raise PeerLostError("sim: the process has ended")
        return SimWatch(other)

    def due_at(self) -> float:
        """When, by the world's clock, it has something to do although nothing comes in."""
        due = self.loop.next_at()
        assert due is not None
        return due - self.offset

    def end(self) -> None:
        """The process ends without a word."""
        self.alive = False
        self.died_at = self.world.now
        self.channel.close()
        self.world.dma.died(self.transport)
        self.world.network.closed(self)
        if self.world.places.get(self.address) is self:
            del self.world.places[self.address]


def _never(seconds: float) -> None:
    """A simulation never sleeps."""
