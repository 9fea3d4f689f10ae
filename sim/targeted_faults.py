"""Faults for a room in a state that no room stays in for long: its engine gives it up, or a peer is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from disagg_kv.core.room.flow import Flow
from disagg_kv.core.room.receive_room import ReceiveRoom
from disagg_kv.core.room.tables import Receiving, Sending
from disagg_kv.ids import Epoch, RoomId

from .cluster import Cluster
from .fault import FaultClass
from .node import SimNode
from .stray_frames import StrayFrames

CRASHES = {"prefill": FaultClass.PREFILL_CRASH, "decode": FaultClass.DECODE_CRASH}

BRIEF = (Receiving.PLACED, Sending.COMPLETE)

STRUCK, LOST = 0.2, 0.7
"""Share of the steps after which an engine acts on such a room; and after which its peer is lost."""

MUTED, MUTED_S = 0.3, 0.1
"""Share of the steps before the end of a room after which a rank's notices are lost; and for how long."""

MOST = 3
"""At most this many rooms of a world are given up or preempted."""


class TargetedFaults:
    """Waits for such rooms, and uses the faults that a scenario has."""

    def __init__(self, world: Cluster, stray: StrayFrames, lose: Callable[[FaultClass, SimNode], None]) -> None:
        faults = world.scenario.faults
        self._world = world
        self._stray = stray
        self._lose = lose
        self._gives_up = FaultClass.ABORT in faults
        self._preempts = FaultClass.WITHDRAW in faults
        self._loses = {side: crash for side, crash in CRASHES.items() if crash in faults}
        self._left = MOST if self._gives_up or self._preempts else 0

    def strike(self, node: SimNode) -> None:
        """A process has made a step: a fault may happen now."""
        world = self._world
        drawn = world.random.random() if self._left or self._loses else 1.0
        if drawn >= LOST or world.calm:
            return
        if not self._may_matter(node):
            return
        machines = self._stray.pairs(node)
        if self._may_lose("prefill") and drawn < MUTED and any(_about_to_finish(m) for m, _, _ in machines):
            world.network.mute(node.channel, MUTED_S)
        pairs = [(m, epoch, RoomId(h["room"])) for m, epoch, h in machines if _brief(m, epoch)]
        if not pairs:
            return
        machine, epoch, name = world.random.choice([pair for pair in pairs if _notices_missing(*pair[:2])] or pairs)
        acts = self._losses(epoch)
        if drawn < STRUCK and machine.state in BRIEF:
            acts += self._engine_acts(node, name)
        if acts:
            world.random.choice(acts)()

    def _may_matter(self, node: SimNode) -> bool:
        """Whether a room of a process is in such a state, whichever its peers are; to find those takes longer."""
        return any(
            any(_brief(m, peer) for peer in m.writers)
            if isinstance(m, ReceiveRoom)
            else m.state in BRIEF or _about_to_finish(m)
            for m in node.machines()
        )

    def _losses(self, epoch: Epoch) -> list[Callable[[], object]]:
        """The peer's process ends, if none of its side has."""
        world = self._world
        peer = next((other for other in world.nodes if other.epoch == epoch and not other.followed), None)
        if peer is None or not self._may_lose(peer.side):
            return []
        return [partial(self._lose, self._loses[peer.side], peer)]

    def _may_lose(self, side: str) -> bool:
        crash = self._loses.get(side)
        return crash is not None and crash not in self._world.hits and not self._world.healed

    def _engine_acts(self, node: SimNode, name: RoomId) -> list[Callable[[], object]]:
        """The engine gives the room up, or takes its pages away."""
        entry = next((e for e in self._world.entries.values() if e.node is node and e.room.plan.room == name), None)
        if entry is None or not self._left:
            return []
        acts: list[Callable[[], object]] = [partial(entry.room.abort, entry)] if self._gives_up else []
        acts += [partial(entry.room.withdraw, entry)] if self._preempts and node.side == "prefill" else []
        self._left -= bool(acts)
        return acts


def _brief(machine: ReceiveRoom | Flow, peer: Epoch) -> bool:
    """Also: one of several writers has nothing more to do, and may end without harm if its notices have come."""
    if machine.state is Receiving.MOVING and isinstance(machine, ReceiveRoom):
        return machine.writers[peer].done is not None
    return machine.state in BRIEF


def _about_to_finish(machine: ReceiveRoom | Flow) -> bool:
    """Its engine has finished, and the last writes are in flight: ``Done`` follows with the last notice."""
    return isinstance(machine, Flow) and machine.state is Sending.MOVING and machine.finished


def _notices_missing(machine: ReceiveRoom | Flow, peer: Epoch) -> bool:
    """A writer is done, but notices of it are lost or late: the room still needs it. Such are preferred."""
    if machine.state is not Receiving.MOVING or not isinstance(machine, ReceiveRoom):
        return False
    writer = machine.writers[peer]
    return writer.done is not None and not writer.complete
