"""Frames out of turn: from a peer that is really there, about a room that is really open, at the wrong time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...channels import Arrived
from ...endpoints.decode import DecodeRole
from ...ids import Epoch
from ...protocol import Codec
from ...protocol.frames import (
    Abort,
    AbortAck,
    AuxPart,
    AuxTaken,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Expected,
    Frame,
    Grant,
    Head,
    Landed,
    Queued,
    Return,
    Returned,
    StagingRequest,
)
from ...protocol.receiving import ReceiveRoom
from ...protocol.sending import Flow, room_head
from ...protocol.tables import RECEIVING, SENDING, Receiving, Sending
from .fault import FaultClass

if TYPE_CHECKING:
    from .node import SimNode
    from .world import World

BOX = (0, 1, 0, 1, False)

BRIEF = (Receiving.OPENED, Receiving.LANDED, Sending.COMPLETE)
"""States that rooms are seldom seen in: they are preferred."""

LATE = (Sending.FINISHED, Sending.ABORTING, Sending.DRAINING)
"""States that rooms do not stay in for long: of the others they are preferred."""


def _frames(head: Head) -> Mapping[type, Frame]:
    """One of each kind that says nothing but what kind it is."""
    made: Sequence[Frame] = (
        Expected(**head, parked=False),
        StagingRequest(**head, segment=BOX, ask=0, ready=True),
        ChunkReady(**head, segment=BOX, lease=0),
        Done(**head, stop=1, aux=None, tag=b""),
        AuxPart(**head, offset=0, total=1, data=b"a"),
        AuxTaken(**head, upto=1),
        Return(**head, segment=BOX, ask=0),
        Returned(**head, segment=BOX, ask=0),
        Queued(**head, segment=BOX),
        Grant(**head, segment=BOX, ask=0, lease=0, offset=0, nbytes=1),
        Landed(**head, segment=BOX),
        Complete(**head),
        Abort(**head, reason="out of turn"),
        AbortAck(**head),
        Drained(**head, reason="out of turn"),
        DrainedAck(**head),
    )
    return {type(frame): frame for frame in made}


class Rumours:
    """Sends them, and sees to it that what a table says is ignored changes nothing (I7)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._codec = Codec()

    def tempted(self, node: SimNode) -> bool:
        """Whether a room of a process is in a state that is seldom seen."""
        return any(pair[0].state in (*BRIEF, Sending.FINISHED) for pair in self._pairs(node))

    def spread(self, node: SimNode) -> None:
        """One frame for one room of a process, if it has any."""
        pairs = list(self._pairs(node))
        if not pairs:
            return
        brief = [pair for pair in pairs if pair[0].state in BRIEF]
        late = [pair for pair in pairs if pair[0].state in LATE]
        machine, epoch, head = self._world.random.choice(brief or late or pairs)
        frames = _frames(head)
        table = RECEIVING if isinstance(machine, ReceiveRoom) else SENDING
        harmless = [kind for kind in frames if self._ignored(machine, kind)]
        kinds = [*harmless, Abort]
        if machine.state is Receiving.OPENED:
            # Nothing was asked of the peer yet: that it has nothing to write is true.
            kinds.append(Drained)
        allowed = [k for k in kinds if (machine.state, k) in table]
        if not allowed or node.node.peers.at(node.node.peers.hello(epoch).address) != epoch:
            return
        kind = self._world.random.choice(allowed)
        self._world.hit(FaultClass.OUT_OF_TURN)
        before = (machine.state, machine.ignored)
        node.channel.inbox.append(Arrived(self._codec.encode(frames[kind])))
        node.turn()
        if kind in harmless and (machine.state, machine.ignored) != (
            before[0],
            before[1] + 1,
        ):
            self._world.violation(
                "I7",
                f"{node.address}: {kind.__name__} out of turn in {before}: {machine.state}",
            )
        self._world.touch(node)

    def _ignored(self, machine: ReceiveRoom | Flow, kind: type) -> bool:
        table = RECEIVING if isinstance(machine, ReceiveRoom) else SENDING
        cell = table.get((machine.state, kind))
        return cell is not None and cell.action == "ignore"

    def _pairs(self, node: SimNode) -> Sequence[tuple[ReceiveRoom | Flow, Epoch, Head]]:
        """Machines with a peer that could write to them."""
        role, me = node.role, node.epoch
        known = node.node.remotes
        pairs: list[tuple[ReceiveRoom | Flow, Epoch, Head]] = []
        if isinstance(role, DecodeRole):
            for key, room in role._rooms.items():
                pairs += [
                    (room.machine, w, room_head(w, me, key.room, key.generation))
                    for w in room.machine.writers
                    if w in known
                ]
        else:
            for (name, epoch, _), one in role._flows.items():
                flow = one.machine.flows.get(epoch)
                if flow is not None and epoch in known:
                    pairs.append((flow, epoch, room_head(epoch, me, name, flow.generation)))
        return pairs
