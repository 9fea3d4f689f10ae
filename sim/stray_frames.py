"""Stray frames: from a peer that lives, about a room that is open, at the wrong time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from msgspec import structs

from disagg_kv.channels import Arrived
from disagg_kv.core import Codec
from disagg_kv.core.room.flow import Flow, room_head
from disagg_kv.core.room.receive_room import ReceiveRoom
from disagg_kv.core.room.tables import RECEIVING, SENDING, Receiving, Sending
from disagg_kv.core.wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Expected,
    Frame,
    Grant,
    Head,
    Landed,
    Queued,
    Return,
    Returned,
    RoomFrame,
    StagingRequest,
)
from disagg_kv.endpoints.decode.rooms import DecodeSide
from disagg_kv.endpoints.prefill.rooms import PrefillSide
from disagg_kv.ids import Epoch, RoomId

from .cluster import Cluster
from .fault import FaultClass
from .node import SimNode

BOX = (0, 1, 0, 1, False)

BRIEF = (Receiving.OPENED, Receiving.PLACED, Sending.COMPLETE)
"""States that rooms are seldom seen in: they are preferred."""

SELDOM = (*BRIEF, Sending.FINISHED)
"""States that more stray_frames are spread in than would come by themselves."""

LATE = (Sending.FINISHED, Sending.ABORTING, Sending.DRAINING)
"""States that rooms do not stay in for long: of the others they are preferred."""


ENDS, ENDS_PLACED = 0.05, 0.2
"""Shares of the stray_frames that end a room, and one that has landed; none does once faults have stopped."""

MISDIRECTED = 0.1
"""Share of the stray_frames before which an earlier life of the process is spoken to."""

STEADY = ("expect_again", "answer_abort", "their_late_abort")
"""What is done with a frame that is answered, and changes nothing."""


SAYING: Mapping[type[RoomFrame], Mapping[str, Any]] = {
    Expect: {"start": 0, "stop": None, "path": "slice", "tables": None, "tag": b""},
    Expected: {"parked": False},
    StagingRequest: {"segment": BOX, "ask": 0, "ready": True},
    ChunkReady: {"segment": BOX, "lease": 0},
    Done: {"stop": 1, "segments": 0, "aux": None},
    Return: {"segment": BOX, "ask": 0},
    Returned: {"segment": BOX, "ask": 0},
    Queued: {"segment": BOX},
    Grant: {"segment": BOX, "ask": 0, "lease": 0, "offset": 0, "nbytes": 1},
    Landed: {"segments": (BOX,)},
    Complete: {},
    Abort: {"reason": "out of turn"},
    Drained: {"reason": "out of turn"},
    DrainedAck: {},
}
"""The fields of one frame of each kind, beside its head."""


def _frame(kind: type[RoomFrame], head: Head) -> RoomFrame:
    return kind(**head, **SAYING[kind])


def _action(state: Receiving | Sending, kind: type) -> str:
    """The action of the table for a frame in a state; nothing: the frame cannot come."""
    cell = (RECEIVING if isinstance(state, Receiving) else SENDING).get((state, kind))
    return "" if cell is None else cell.action


@cache
def _acting(state: Receiving | Sending, actions: tuple[str, ...]) -> Sequence[type[RoomFrame]]:
    """The kinds of frames for which a table has one of these actions in a state."""
    return [kind for kind in SAYING if _action(state, kind) in actions]


class StrayFrames:
    """Sends stray frames, and checks that those that a table ignores change nothing (I7)."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._codec = Codec()

    def wanted(self, node: SimNode) -> bool:
        """Whether a room of a process is in a state that is seldom seen."""
        # Seldom is any, and to find out whose peer is there takes longer.
        return any(m.state in SELDOM for m in node.machines()) and any(
            m.state in SELDOM for m, _, _ in self.pairs(node)
        )

    def send(self, node: SimNode) -> None:
        """Frames for one room of a process, if it has any: one that acts, or about half of those that do nothing."""
        pairs = list(self.pairs(node))
        if not pairs:
            return
        brief = [pair for pair in pairs if pair[0].state in BRIEF]
        late = [pair for pair in pairs if pair[0].state in LATE]
        machine, epoch, head = self._world.random.choice(brief or late or pairs)
        harmless = _acting(machine.state, ("ignore",))
        answered = (*STEADY, "answer_placed") if self._has_finished(node, epoch, head) else STEADY
        steady = _acting(machine.state, answered)
        # That a peer has nothing to write is true before it was asked for something.
        ends: list[type[RoomFrame]] = [Abort, Drained] if machine.state is Receiving.OPENED else [Abort]
        ends = [kind for kind in ends if _action(machine.state, kind)]
        rng = self._world.random
        if rng.random() < MISDIRECTED:
            self._misdirect(node, machine, epoch, head)
        if (
            ends
            and not self._world.healed
            and rng.random() < (ENDS_PLACED if machine.state is Receiving.PLACED else ENDS)
        ):
            self._deliver(node, machine, _frame(rng.choice(ends), head), counted=False, steady=False)
        else:
            for kind in [kind for kind in (*harmless, *steady) if rng.random() < 0.6]:
                self._deliver(node, machine, _frame(kind, head), counted=kind in harmless, steady=True)
        node.touch()

    def _deliver(
        self, node: SimNode, machine: ReceiveRoom | Flow, frame: Frame, *, counted: bool, steady: bool
    ) -> None:
        """Outside of a step: in one, a write of the room itself may fail just before the frame is taken in."""
        self._world.hit(FaultClass.OUT_OF_TURN)
        before, after = machine.state, machine.ignored + counted
        node.take_in(Arrived(self._codec.encode(frame)))
        if steady and (machine.state, machine.ignored) != (before, after):
            then = f"{machine.state}, {machine.ignored} ignored instead of {after}"
            self._world.violation("I7", f"{node.address}: {type(frame).__name__} out of turn in {before}: {then}")

    def _misdirect(self, node: SimNode, machine: ReceiveRoom | Flow, epoch: Epoch, head: Head) -> None:
        """A late frame to an earlier life at this address ends nothing, and does not show that frames arrive there."""
        self._world.hit(FaultClass.STALE)
        peer = node.view.loop.peers.known(epoch)
        assert peer is not None
        before = machine.state, machine.ignored, peer.last_frame_at, peer.proved
        earlier = {**head, "dst": b"old" + head["dst"][3:]}
        node.take_in(Arrived(self._codec.encode(_frame(Abort, cast("Head", earlier)))))
        if (machine.state, machine.ignored, peer.last_frame_at, peer.proved) != before:
            self._world.violation("I7", f"{node.address}: takes a frame to an earlier life of it")

    def greet(self, node: SimNode) -> None:
        """A peer was lost that may come back: a late ``Hello`` of an older life at its address arrives."""
        lost = node.counters.of.get("peers.lost", 0)
        if lost == node.losses:
            return
        node.losses = lost
        peers = node.view.loop.peers
        for address, there in list(peers.addresses.items()):
            if not there.lost or there.ended:
                continue
            self._world.hit(FaultClass.STALE)
            self._world.mark("greeting:of an older life")
            older = structs.replace(there.hello, src=b"old" + there.epoch[3:], dst=b"", born=there.hello.born - 1)
            node.take_in(Arrived(self._codec.encode(older)))
            if peers.addresses.get(address) is not there:
                self._world.violation("I7", f"{node.address}: a late greeting gave {address} back to an older life")

    def _has_finished(self, node: SimNode, epoch: Epoch, head: Head) -> bool:
        """Whether a peer's flow has nothing more to move: it then ignores all frames about segments."""
        view = self._world.lives[epoch].view
        key = (RoomId(head["room"]), node.epoch, head["generation"])
        one = view.flows.get(key) if isinstance(view, PrefillSide) else None
        flow = None if one is None else one.machine.flows.get(node.epoch)
        return flow is not None and flow.state is Sending.FINISHED

    def pairs(self, node: SimNode) -> Sequence[tuple[ReceiveRoom | Flow, Epoch, Head]]:
        """Machines with a peer that is there, and could write to them."""
        view, me, peers = node.view, node.epoch, node.view.loop.peers
        if not (view.rooms if isinstance(view, DecodeSide) else view.flows):
            return ()
        alive = {other.epoch for other in self._world.places.values() if not other.paused}
        known = [p.epoch for p in peers.all() if p.remote and p.epoch in alive and peers.at(p.hello.address) == p.epoch]
        pairs: list[tuple[ReceiveRoom | Flow, Epoch, Head]] = []
        if isinstance(view, DecodeSide):
            for key, room in view.rooms.items():
                pairs += [
                    (room.machine, w, room_head(w, me, key.room, key.generation))
                    for w in room.machine.writers
                    if w in known
                ]
        else:
            for (name, epoch, _), one in view.flows.items():
                flow = one.machine.flows.get(epoch)
                if flow is not None and epoch in known:
                    pairs.append((flow, epoch, room_head(epoch, me, name, flow.generation)))
        return pairs
