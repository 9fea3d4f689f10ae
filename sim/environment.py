"""Faults of what an endpoint is given: its rendezvous, observer, transport and channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from disagg_kv.errors import PeerLostError, RemoteProtocolError
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import Source
from disagg_kv.trace import Span

from .fault import FaultClass
from .simulation import SimProcess, Simulation

BLOCKED_S = (0.0, 0.01, 0.1, 0.2)
"""How long a call on a helper thread takes."""

MAPPING_S = (0.3, 0.7, 1.2, 2.4, 6.0)
"""How long one takes that maps a pool: less than half the silence of an endpoint, up to longer than most rooms live."""


class SimBackground:
    """Helper threads of one process; satisfies :class:`~disagg_kv.endpoints.peers.background.Background`."""

    def __init__(self, world: Simulation, process: SimProcess, name: str) -> None:
        self._world = world
        self._process = process
        self._asks = name.endswith("look-ups")

    def start(self, job: Callable[[], None]) -> None:
        """Now, or later where calls may block; as faults, never, or there is no thread for it."""
        world = self._world
        if world.outside.happens(FaultClass.NO_THREAD, 0.2):
            raise RuntimeError("sim: can't start new thread")
        if self._asks and world.outside.happens(FaultClass.NO_ANSWER, 0.4):
            return
        seconds = self._seconds()
        if not seconds:
            self._run(job)
            return
        world.known_at = max(world.known_at, world.now + seconds + 0.01)
        world.later(seconds, partial(self._run, job))

    def _seconds(self) -> float:
        """How long it is until a job has returned."""
        world, process = self._world, self._process
        if process.maps and not self._asks and world.outside.happens(FaultClass.MAPPING, 0.7):
            world.mark("mapping:prefill waits")
            seconds = world.outside.helping.choice(MAPPING_S)
            process.mapped_at = max(process.mapped_at, world.now + seconds)
            return seconds
        if FaultClass.BLOCKED not in world.scenario.faults:
            return 0.0
        seconds = world.outside.random.choice(BLOCKED_S)
        if seconds:
            world.hit(FaultClass.BLOCKED)
        return seconds

    def _run(self, job: Callable[[], None]) -> None:
        process = self._process
        if process.alive:
            before, process.helping = process.helping, True
            job()
            process.helping = before

    def close(self, timeout_s: float, then: Callable[[], None]) -> bool:
        """Jobs of a process that ends are never run."""
        then()
        return True


class SimRendezvous:
    """The table of addresses as one process sees it; satisfies :class:`~disagg_kv.rendezvous.Rendezvous`."""

    def __init__(self, world: Simulation, process: SimProcess) -> None:
        self._world = world
        self._process = process

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """See :meth:`Rendezvous.publish`."""
        self._world.rendezvous.publish(instance, rank, world, address)

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """See :meth:`Rendezvous.lookup`; it fails in all ways that a store open to others may fail in."""
        self._process.may_block("looks an instance up")
        outside = self._world.outside
        if not outside.away:
            return self._world.rendezvous.lookup(source)
        self._world.hit(FaultClass.RENDEZVOUS)
        kind = outside.random.randrange(5)
        if kind == 0:
            raise PeerLostError("sim: the rendezvous is away")
        if kind == 1:
            raise RemoteProtocolError("sim: the rendezvous holds what is no number of ranks")
        if kind == 2:
            raise RuntimeError("sim: an error of a store's client")
        return None if kind == 3 else cast("tuple[str, ...]", "sim://not a list")


class SimObserver:
    """An engine's observer, which may raise."""

    def __init__(self, world: Simulation) -> None:
        self._world = world

    def span(self, span: Span) -> None:
        """Spans are ignored."""
        if self._world.outside.observer_raises():
            raise RuntimeError("sim: the observer failed")

    def count(self, name: str, amount: int = 1) -> None:
        """:class:`Counters` keeps them."""
        if self._world.outside.observer_raises():
            raise RuntimeError("sim: the observer failed")
