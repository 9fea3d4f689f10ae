"""Faults of what an endpoint is given: its rendezvous, observer, transport and channel."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from ...endpoints import DecodeEndpoint, PrefillEndpoint
from ...errors import DisaggKVError, EndpointBrokenError, PeerLostError, RemoteProtocolError
from ...ids import Rank, RoomId
from ...protocol import Phase
from ...rendezvous import Source
from .fault import FaultClass

if TYPE_CHECKING:
    from .node import SimNode
    from .world import World

AWAY_S = (0.2, 0.4, 0.6)
"""How long the rendezvous is away. Rooms that wait for it meanwhile must not fail: they may wait for longer."""

BLOCKED_S = (0.0, 0.01, 0.1, 0.2)
"""How long a call on a helper thread takes."""

FEW = 3
"""How often a fault of helper threads, or of what they call, happens in a world."""

POLL_S = (0.05, 2.5)
"""How long a transport's ``poll`` raises."""


class SimBackground:
    """Helper threads of one process; satisfies :class:`~disagg_kv.endpoints.runtime.background.Background`."""

    def __init__(self, world: World, node: SimNode, name: str) -> None:
        self._world = world
        self._node = node
        self._asks = name.endswith("look-ups")

    def start(self, job: Callable[[], None]) -> None:
        """Now, or later where calls may block; as faults, never, or there is no thread for it."""
        world = self._world
        if world.outside.happens(FaultClass.NO_THREAD, 0.2):
            raise RuntimeError("sim: can't start new thread")
        if self._asks and world.outside.happens(FaultClass.NO_ANSWER, 0.4):
            return
        seconds = world.outside.random.choice(BLOCKED_S) if FaultClass.BLOCKED in world.scenario.faults else 0.0
        if not seconds:
            self._run(job)
            return
        world.hit(FaultClass.BLOCKED)
        world.later(seconds, partial(self._run, job))

    def _run(self, job: Callable[[], None]) -> None:
        node = self._node
        if node.alive:
            before, node.helping = node.helping, True
            job()
            node.helping = before

    def close(self, timeout_s: float, then: Callable[[], None]) -> bool:
        """Jobs of a process that ends are never run."""
        then()
        return True


class SimRendezvous:
    """The table of addresses as one process sees it; satisfies :class:`~disagg_kv.rendezvous.Rendezvous`."""

    def __init__(self, world: World, node: SimNode) -> None:
        self._world = world
        self._node = node

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """See :meth:`Rendezvous.publish`."""
        self._world.rendezvous.publish(instance, rank, world, address)

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """See :meth:`Rendezvous.lookup`; it fails in all ways that a store open to others may fail in."""
        self._node.may_block("looks an instance up")
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


class Environment:
    """When these faults happen. Their draws do not shift those of the rest of a seed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.random = world.scenario.outside()
        self.helping = random.Random(f"helping {world.scenario.seed}")
        self._away_until = -1.0
        faults = world.scenario.faults
        if FaultClass.RENDEZVOUS in faults:
            world.later(self.random.choice((0.0, 0.0, 0.3)) * self.random.random(), self._leave)
        if FaultClass.POLL in faults:
            world.later(self.random.random() * 0.3, partial(self._strike, FaultClass.POLL))
        if FaultClass.BROKEN in faults:
            world.later(self.random.random() * 0.3, partial(self._strike, FaultClass.BROKEN))

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

    def _strike(self, fault: FaultClass) -> None:
        """From now on a process's transport raises; with ``BROKEN``, what ends its rooms for that raises, too."""
        nodes = [node for node in self._world.nodes if not node.paused]
        if self._world.healed or not nodes:
            return
        node = self.random.choice(nodes)
        self._world.hit(fault)
        # Not always at the beginning of a turn.
        node.poll_raises, node.polls_left = True, self.random.choice((0, 0, 1, 2, 3))
        node.handling_raises = fault is FaultClass.BROKEN
        node.send_raises = fault is FaultClass.POLL and self.random.random() < 0.5
        self._world.touch(node)
        self._world.later(self.random.choice(POLL_S), partial(self._mend, node))

    def _mend(self, node: SimNode) -> None:
        node.poll_raises = node.send_raises = node.handling_raises = False
        self._world.touch(node)

    def heal(self) -> None:
        """What raises stops doing so; its process goes on."""
        for node in self._world.nodes:
            if node.poll_raises:
                self._mend(node)

    def broke(self, node: SimNode) -> None:
        """I7: an endpoint that cannot go on has failed every room by name, and takes no calls. Its process ends."""
        world = self._world
        world.mark("broken:an endpoint")
        for entry in list(world.entries.values()):
            handle = entry.handle
            if entry.node is not node or handle is None:
                continue
            known = handle.error if handle.phase is Phase.FAILED else None
            if handle.phase is not Phase.DONE and not isinstance(known, DisaggKVError):
                world.violation("I7", f"{entry.room.name(entry)}: {handle.phase.name} in a broken endpoint")
        for name, call in calls(node).items():
            try:
                call()
            except EndpointBrokenError:
                continue
            world.violation("I7", f"{node.address}: a broken endpoint takes {name}")
        world.stop_for_good(node)


def calls(node: SimNode) -> dict[str, Callable[[], object]]:
    """Calls of an engine that a broken endpoint refuses."""
    endpoint, room = node.endpoint, RoomId(b"after the end")
    opens: Callable[[], object]
    if isinstance(endpoint, DecodeEndpoint):
        opens = partial(endpoint.open, room, Source("prefill"))
    else:
        assert isinstance(endpoint, PrefillEndpoint)
        opens = partial(endpoint.open, room)
    return {
        "open": opens,
        "poll": endpoint.poll,
        "confirm_terminated": partial(endpoint.confirm_terminated, node.epoch),
    }
