"""One life of a simulated rank: its memory, its endpoint, and what the world does to it."""

from __future__ import annotations

import random
from collections.abc import Sequence, Sized
from math import inf

from disagg_kv.channels import Arrived, Closed, Opened
from disagg_kv.core import Alone, Elected, Flow, RoomKey
from disagg_kv.core.room.receive_room import ReceiveRoom
from disagg_kv.endpoints import DecodeEndpoint, Environment, Incarnation, PrefillEndpoint
from disagg_kv.endpoints.decode.handle import ReceptionHandle
from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.endpoints.loop.failures import Broken
from disagg_kv.endpoints.loop.timing import IDLE_S
from disagg_kv.endpoints.peers.background import Background
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.endpoints.prefill.rooms import PrefillSide
from disagg_kv.errors import DisaggKVError, PeerLostError, TransportError
from disagg_kv.trace import Observer, Span
from disagg_kv.transports.process import Process

from .dma import Dma, SimTransport
from .environment import SimBackground, SimObserver, SimRendezvous
from .kernels import QueueingKernels, SimKernels
from .kind import Kind
from .network import Network, SimBatchChannel, SimChannel
from .prefixes import Prefixes
from .scenario import Split, shards_of
from .simulation import SimProcess, SimRing, Simulation

DRIVES = (0.0, 0.0, 0.5, 1.0)
"""With which probability a call of an engine advances its endpoint, as where no other thread does at that moment."""

LIFE_NS = 1_000_000_000
"""Between the beginnings of two lives of a rank: far more than the rooms of one."""


class SimWatch:
    """Watches a process; every call of ``ended`` sees its end at once."""

    def __init__(self, node: SimProcess) -> None:
        self._node = node

    def ended(self, *, at_once: bool = False) -> bool:
        """Whether it has ended."""
        return not self._node.alive


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


class SimNode(SimProcess):
    """One process: the world steps it, and it may stand still, jump in time, or end."""

    endpoint: PrefillEndpoint | DecodeEndpoint
    view: PrefillSide | DecodeSide
    _unprepared: Sequence[Sized]
    prefixes: Prefixes | None = None

    def __init__(
        self,
        world: Simulation,
        network: Network,
        dma: Dma,
        index: int,
        side: str,
        instance: str,
        split: Split,
        rank: int,
        life: int,
        elsewhere: bool = False,
        beside: SimProcess | None = None,
    ) -> None:
        super().__init__(world, index, side, instance, split, rank, life, elsewhere, beside)
        self.leased: dict[tuple[RoomKey, int], ReceiveRoom] = {}
        self.channel = (SimBatchChannel if world.scenario.together else SimChannel)(network, self)
        self.transport = SimTransport(dma, self)
        # An endpoint is made on a thread of its engine.
        self.helping = True
        self._build(index)
        self.helping = False

    def _allocate(self, nbytes: int) -> SimRing:
        self.ring = SimRing(nbytes)
        return self.ring

    def _build(self, index: int) -> None:
        world, scenario = self.world, self.world.scenario
        me = Incarnation(self.epoch, self.process, self._watch, born=self.life * LIFE_NS)
        queues = self.side == "decode" or scenario.queues[index]
        self.kernels = (QueueingKernels if queues else SimKernels)(world, self, self.transport)
        verdict = Alone if self.side in scenario.alone else Elected
        environment = Environment(
            clock=self.clock, sleep=_never, thread=False, incarnation=me, background=self._helpers
        )
        if self.side == "decode":
            decode = DecodeEndpoint(
                self.memory.pool, transport=self.transport.several, channel=self.channel,
                rendezvous=SimRendezvous(world, self),
                instance=self.instance, rank=self.rank, shards=shards_of(scenario.model, self.split.tp, self.split.pp),
                strategy=scenario.decode_path, verify=scenario.verify, ring_bytes=scenario.ring_bytes,
                allocator=self._allocate, verdict=verdict, options=scenario.options, kernels=self.kernels,
                observer=SimObserver(world), environment=environment,
            )  # fmt: skip
            self.endpoint, self.view = decode, decode.inspect()
            self._unprepared = (self.view.scatters.prepared.waiting,)
        else:
            prefill = PrefillEndpoint(
                self.memory.pool, transport=self.transport.several, channel=self.channel,
                rendezvous=SimRendezvous(world, self),
                instance=self.instance, rank=self.rank, shards=shards_of(scenario.model, self.split.tp, self.split.pp),
                strategy=scenario.prefill_paths[scenario.source_of(index)],
                schedule=scenario.schedule, verify=scenario.verify, slot_bytes=scenario.slot_bytes,
                slots=scenario.slots, verdict=verdict, options=scenario.options, kernels=self.kernels,
                observer=SimObserver(world), environment=environment,
            )  # fmt: skip
            self.endpoint, self.view = prefill, prefill.inspect()
            transfers = self.view.transfers
            prepared = transfers.staged.prepared
            assert prepared is not None
            lines = transfers.staged.lines.of, transfers.direct.lines.of, transfers.mapped.lines.of
            self._unprepared = (*lines, prepared.gathers.waiting)
        self._draws = random.Random(f"drives {world.scenario.seed} {self.address} {self.life}")
        self._drives = self._draws.choice(DRIVES)
        self._polls = False
        self._drive = self.endpoint.driver.drive
        self.endpoint.driver.drive = self._may_drive  # type: ignore[method-assign]
        self.loop = self.endpoint.driver.loop
        self._end_rooms = self.loop.side.integrity_failure
        self.loop.side.integrity_failure = self._handle_error  # type: ignore[method-assign]
        self.counters = self.loop.observer = Counters(self.loop.observer)
        self.loop.most = scenario.pieces
        self.maps = self.side == "prefill" and any(path.mover == "mapped" for path in self.loop.me.paths)

    def poll(self) -> Sequence[DeliveryHandle | ReceptionHandle]:
        """The engine's poll, right after a step: what it does is checked with that."""
        self._polls = True
        try:
            return self.endpoint.poll()
        finally:
            self._polls = False

    def _may_drive(self, patience_s: float = 0.0) -> None:
        """A call of the engine advances the endpoint, or leaves that to its thread."""
        if not self._polls:
            self.touch()
        if self.alive and not self.paused and self._draws.random() < self._drives:
            self.world.saw(Kind.DRIVEN)
            self._drive(patience_s)

    def _handle_error(self, error: DisaggKVError, *, unmet: bool = False) -> None:
        """What the endpoint does about an error that it did not foresee; it may fail half way."""
        if not self.handling_raises or self.world.outside.random.random() < 0.5:
            self._end_rooms(error, unmet=unmet)
        if self.handling_raises:
            self.must_break = True
            raise RuntimeError("sim: the handling of an error failed")

    def endpoints(self) -> Sequence[SimNode]:
        """All of its process: two, where rooms go both ways."""
        return [self, self.other] if isinstance(self.other, SimNode) else [self]

    @property
    def exposes(self) -> bool:
        """Whether prefill may write straight to its pages."""
        return isinstance(self.view, DecodeSide) and self.view.exposes

    @property
    def broken(self) -> bool:
        """Whether its endpoint takes no calls any more, and its process has not ended yet."""
        return self.alive and self.loop.failures.broken is not None

    @property
    def busy(self) -> bool:
        """Whether another step would do something at once."""
        return self.behind or any(map(len, self._unprepared))

    @property
    def behind(self) -> bool:
        """Whether commands or frames did not fit into its last step."""
        return any(self.backlog)

    @property
    def backlog(self) -> tuple[int, int]:
        """How many commands and frames wait that did not fit into the last step."""
        return len(self.view.loop.commands), len(self.view.loop.received.left)

    def step(self) -> None:
        """One step. However much waits for the process, it gets to its heartbeats and deadlines (I4)."""
        inbox = len(self.channel.inbox)
        before = self.backlog
        self.endpoint.driver.step()
        after = self.backlog
        commands, frames = before[0] - after[0], before[1] + inbox - after[1] - len(self.channel.inbox)
        if max(commands, frames) > 2 * self.loop.most:
            what = f"{commands} commands and {frames} frames in one step"
            self.world.violation("I4", f"{self.address}: {what}, in which a heartbeat may be due")

    def take_in(self, event: Arrived | Closed | Opened) -> None:
        """Take in a frame, and do nothing else: its consequences are left to the next step. No frame ends it (I7)."""
        try:
            self.loop.take_in(event)
        except Broken as exc:
            self.world.violation("I7", f"{self.address}: a frame would have ended the endpoint's thread: {exc!r}")

    def machines(self) -> Sequence[ReceiveRoom | Flow]:
        """What drives its rooms: one machine per room of decode, one per room and decode rank of prefill."""
        view = self.view
        if isinstance(view, DecodeSide):
            return [room.machine for room in view.rooms.values()]
        return [flow for room in view.flows.values() for flow in room.machine.flows.values()]

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
        due = inf if due is None else due
        if isinstance(self.view, PrefillSide) and self.view.transfers.failed:
            # Only the tick of an idle endpoint asks whether a copy that has failed still moves bytes.
            due = min(due, self.loop.now + IDLE_S)
        return due - self.offset


def _never(seconds: float) -> None:
    """A simulation never sleeps."""
