"""One rank of a simulated fleet: a real endpoint, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from disagg_kv.core import Options
from disagg_kv.endpoints import DecodeEndpoint, Delivery, Environment, Incarnation, PrefillEndpoint, Reception
from disagg_kv.endpoints.peers.background import Background
from disagg_kv.endpoints.peers.link_budget import link_cost
from disagg_kv.errors import TransportError
from disagg_kv.ids import Epoch, Peer
from disagg_kv.trace import Observer
from disagg_kv.transports.process import Ending, Process

from .parts import FleetBackground, FleetChannel, FleetTransport, Host, NullKernels, NullPool, Wires, World
from .store import FleetRendezvous, FleetStore

SLOT_BYTES, SLOTS, RING_BYTES = 64 << 20, 4, 1 << 30
"""None of these bytes exists."""

STEPS = 1000
"""More than any moment needs."""


MEASURED = 17
"""One of this many pieces of work is measured, and counts as often: to ask for the time takes long on some hosts."""


class Meter:
    """Processor time of all ranks, the calls of their engines included."""

    def __init__(self) -> None:
        self.cpu_ns = 0
        self._pieces = 0

    @contextmanager
    def spending(self, each: int = MEASURED) -> Iterator[None]:
        """What is done in the block is a rank's work. One block of ``each`` is measured."""
        self._pieces += 1
        if self._pieces % each:
            yield
            return
        began = time.thread_time_ns()
        yield
        self.cpu_ns += each * (time.thread_time_ns() - began)


class FleetRank:
    """A process with one endpoint, which may end and start anew under its address.

    Args:
        world: the fleet.
        wires: its network.
        store: its rendezvous.
        hosts: the transports of the fleet.
        role: which side.
        number: its number on that side.
        life: 1 for its first process.
        meter: what its processor time is added to.
        on_change: given each handle that ``poll`` returns.
        observer: what its endpoint gives spans and counts to.
        links: budget of links; 0: the endpoint's own.
    """

    endpoint: PrefillEndpoint | DecodeEndpoint

    def __init__(
        self,
        world: World,
        wires: Wires,
        store: FleetStore,
        hosts: dict[Peer, Host],
        role: str,
        number: int,
        life: int,
        meter: Meter,
        on_change: Callable[[Delivery | Reception], None],
        observer: Observer,
        links: int = 0,
    ) -> None:
        self.world = world
        self.on_change = on_change
        self.role = role
        self.number = number
        self.instance = f"{role}-{number}"
        self.address = f"fleet://{self.instance}"
        self.alive = True
        self.meter = meter
        self.steps = 0
        self.due_at = inf
        self._touched = False
        self.channel = FleetChannel(wires, self)
        name = f"{role[:2]}{number:06d}.{life:05d}".encode().ljust(16, b"\0")
        self.transport = FleetTransport(self, Peer(name), hosts)
        self.epoch = Epoch(name)
        each = link_cost(self.channel, self.transport.caps.link).nbytes
        self._options = Options(link_bytes=links * each) if links else Options()
        process = Process(number + 1, life, f"host of {self.instance}")
        with self.meter.spending(each=1):
            self._build(FleetRendezvous(store, self), Incarnation(self.epoch, process, _unseen, born=life), observer)

    def _build(self, store: FleetRendezvous, me: Incarnation, observer: Observer) -> None:
        environment = Environment(
            clock=lambda: self.world.now,
            sleep=_never,
            thread=False,
            engine=False,
            incarnation=me,
            background=self._helpers,
        )
        pool = NullPool()
        if self.role == "decode":
            self.endpoint = DecodeEndpoint(
                pool, transport=self.transport, channel=self.channel, rendezvous=store, instance=self.instance,
                strategy="staged", ring_bytes=RING_BYTES, kernels=NullKernels(), environment=environment,
                observer=observer, options=self._options,
            )  # fmt: skip
        else:
            self.endpoint = PrefillEndpoint(
                pool, transport=self.transport, channel=self.channel, rendezvous=store, instance=self.instance,
                strategy="staged", slot_bytes=SLOT_BYTES, slots=SLOTS, kernels=NullKernels(), environment=environment,
                observer=observer, options=self._options,
            )  # fmt: skip
        self._view = self.endpoint.inspect()

    def _helpers(self, name: str, most: int) -> Background:
        return FleetBackground(self, name)

    def touch(self) -> None:
        """Step it at this moment, once."""
        if self.alive and not self._touched:
            self._touched = True
            self.world.later(0.0, self._turn)

    def wake_at(self, when: float) -> None:
        """Step it at a time."""

        def look() -> None:
            if self.due_at == when:
                self.due_at = inf
                self.touch()

        if when < self.due_at:
            self.due_at = when
            self.world.later(max(0.0, when - self.world.now), look)

    def _turn(self) -> None:
        self._touched = False
        if not self.alive:
            return
        with self.meter.spending():
            for _ in range(STEPS):
                self.endpoint.driver.step()
                self.steps += 1
                loop = self._view.loop
                if not (self.channel.inbox or self.transport.busy or len(loop.commands) or len(loop.received.left)):
                    break
            else:
                raise AssertionError(f"{self.instance}: {STEPS} steps, in which no time passes")
            changed = self.endpoint.poll()
            due = self.endpoint.driver.loop.next_at()
        for handle in changed:
            self.on_change(handle)
        if due is not None:
            self.wake_at(max(due, self.world.now + 0.001))

    @property
    def links(self) -> int:
        """How many it has."""
        return len(self._view.loop.peers)

    @property
    def links_dropped(self) -> int:
        """How many it has dropped, as no room used them."""
        return self._view.loop.peers.displaced

    @property
    def peers(self) -> int:
        """How many peers it knows."""
        return len(self._view.loop.peers.addresses)


def _unseen(process: Process) -> Ending:
    raise TransportError("fleet: a process of another host")


def _never(seconds: float) -> None:
    """A simulation never sleeps."""
