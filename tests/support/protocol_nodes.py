"""The smallest endpoints that drive the protocol machines: who handles a frame, and who answers when no room does.

They are an oracle for the real endpoints. Time, network, memory and engine belong to the world that owns them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs

from disagg_kv.core import (
    AnyFrame,
    Cancel,
    CastVote,
    Decided,
    Effect,
    Elected,
    FlowPlan,
    Free,
    Gone,
    Granted,
    Leased,
    Lost,
    Options,
    Outcome,
    Phase,
    Prepare,
    Quarantine,
    Quiet,
    ReceiveRoom,
    Receiving,
    Reserve,
    RoomFrame,
    RoomKey,
    RoomOutcome,
    Scatter,
    Scattered,
    Send,
    SendRoom,
    Store,
    Tick,
    Tombstones,
    Transfer,
    WriteFailed,
    Wrote,
)
from disagg_kv.core.room.flow import room_head
from disagg_kv.core.room.tables import Sending
from disagg_kv.core.wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Decision,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Expected,
    Head,
    Landed,
    StagingRequest,
    Vote,
)
from disagg_kv.errors import AbortedError, CapacityError, DisaggKVError
from disagg_kv.ids import Epoch, Generation, Rank, RoomId
from disagg_kv.planning import Segment
from disagg_kv.staging import GrantQueue, Lease, RingStagingAllocator


class Node:
    """What both sides share: a life, a vote, tombstones, an outbox."""

    def __init__(self, epoch: Epoch, rank: Rank, world: int, options: Options) -> None:
        self.epoch = epoch
        self.rank = rank
        self.options = options
        self.now = 0.0
        self.dead = False
        self.verdict = Elected(rank, world, epoch, options, "instance")
        self.tombstones = Tombstones()
        self.outbox: list[Send] = []
        self.outcomes: dict[RoomId, list[Phase]] = {}
        self.lost: set[Epoch] = set()
        self._generation = 0

    def next_key(self, room: RoomId) -> RoomKey:
        self._generation += 1
        return RoomKey(room, Generation(self._generation))

    def on_frame(self, frame: AnyFrame) -> None:
        if frame.dst != self.epoch or frame.src in self.lost:
            return
        if isinstance(frame, Vote | Decision):
            self.agree(self.verdict.on_frame(frame, self.now))
        else:
            assert isinstance(frame, RoomFrame)
            self.on_room_frame(frame)

    def joined(self, epoch: Epoch, rank: Rank) -> None:
        self.agree(self.verdict.joined(epoch, rank, self.now))

    def lost_sibling(self, epoch: Epoch) -> None:
        self.agree(self.verdict.lost(epoch, self.now))

    def vote(self, key: RoomKey, ok: bool | None, reason: str) -> None:
        self.agree(self.verdict.vote(key, ok, reason, self.now))

    def agree(self, effects: Sequence[Send | Outcome]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.outbox.append(effect)
            else:
                self.decided(effect.key, effect.decided)

    def on_room_frame(self, frame: RoomFrame) -> None:
        raise NotImplementedError

    def decided(self, key: RoomKey, decided: Decided) -> None:
        raise NotImplementedError


class DecodeNode(Node):
    """A decode rank: live rooms by key, one ring, and answers for rooms that have ended."""

    def __init__(self, epoch: Epoch, rank: Rank, world: int, options: Options, ring_bytes: int) -> None:
        super().__init__(epoch, rank, world, options)
        self.rooms: dict[RoomKey, ReceiveRoom] = {}
        self.ring = RingStagingAllocator(ring_bytes)
        self.queue: GrantQueue[Epoch, tuple[RoomKey, Segment]] = GrantQueue(self.ring)
        self.leases: dict[tuple[RoomKey, Segment], Lease] = {}
        self.scatters: list[tuple[RoomKey, Scatter]] = []
        self.prepared: dict[tuple[RoomKey, Segment], Mapping[Rank, int]] = {}
        self.aux: dict[RoomKey, bytes] = {}
        self._work: deque[tuple[RoomKey, Effect]] = deque()
        self._busy = False

    def open(self, room: RoomId, total_s: float) -> RoomKey:
        key = self.next_key(room)
        own = attrs.evolve(self.options, total_s=total_s)
        self.rooms[key] = ReceiveRoom(room, key.generation, self.epoch, own, self.now)
        self.vote(key, None, "")
        return key

    def handle(self, key: RoomKey, event: object) -> None:
        room = self.rooms.get(key)
        if room is None:
            return
        self._work.extend((key, effect) for effect in room.handle(event, self.now))
        if not self._busy:
            self._busy = True
            while self._work:
                self._act(*self._work.popleft())
            self._busy = False
        if room.state is Receiving.CLOSED and self.rooms.pop(key, None) is not None:
            self.outcomes.setdefault(key.room, []).append(room.phase)
            ended = RoomOutcome.DONE if room.phase is Phase.DONE else RoomOutcome.FAILED
            self.tombstones.remember(self.epoch, key.generation, ended)

    def _act(self, key: RoomKey, effect: Effect) -> None:
        match effect:
            case Send():
                self.outbox.append(effect)
            case Reserve(peer, segment, nbytes, ready):
                try:
                    lease = self.queue.request(peer, (key, segment), nbytes, lookahead=not ready)
                except CapacityError as exc:
                    self.handle(key, Cancel(exc))
                    return
                if lease is not None:
                    self._lease(key, segment, lease)
                self._pump()
            case Free(segment):
                self.queue.cancel((key, segment))
                self.queue.release((key, segment))
                self.leases.pop((key, segment), None)
                self.prepared.pop((key, segment), None)
                self._pump()
            case Quarantine(segment):
                self.queue.quarantine((key, segment))
                self.prepared.pop((key, segment), None)
            case Prepare(segment, parts):
                assert (key, segment) not in self.prepared, "once per lease"
                assert (key, segment) in self.leases
                self.prepared[key, segment] = parts
            case Scatter(segment, parts):
                assert parts.items() <= self.prepared.pop((key, segment), parts).items()
                self.scatters.append((key, effect))
            case Store(data):
                self.aux[key] = data
            case CastVote(ok, reason):
                self.vote(key, ok, reason)
            case Transfer():
                raise AssertionError("decode transfers nothing")

    def _pump(self) -> None:
        for (key, segment), lease in self.queue.grants():
            self._lease(key, segment, lease)

    def _lease(self, key: RoomKey, segment: Segment, lease: Lease) -> None:
        self.leases[(key, segment)] = lease
        self.handle(key, Leased(segment, lease))

    def scattered(self, key: RoomKey, segment: Segment, error: Exception | None) -> None:
        self.handle(key, Scattered(segment, error))

    def decided(self, key: RoomKey, decided: Decided) -> None:
        self.handle(key, decided)

    def on_room_frame(self, frame: RoomFrame) -> None:
        key = RoomKey(RoomId(frame.room), Generation(frame.generation))
        if key in self.rooms:
            self.handle(key, frame)
            return
        head = room_head(self.epoch, Epoch(frame.src), key.room, key.generation)
        done = self.tombstones.outcome(self.epoch, key.generation) is RoomOutcome.DONE
        answer: RoomFrame
        match frame:
            case StagingRequest() | ChunkReady() if done:
                answer = Landed(**head, segments=(frame.segment,))
            case Done() if done:
                answer = Complete(**head)
            case StagingRequest() | ChunkReady() | Done():
                answer = Abort(**head, reason="the room has ended")
            case Abort():
                answer = Abort(**head, reason="the room has ended")
            case Drained():
                answer = DrainedAck(**head)
            case _:
                return
        self.outbox.append(Send(Epoch(frame.src), answer))

    def peer_event(self, event: Lost | Gone) -> None:
        self.lost.add(event.peer)
        for key in list(self.rooms):
            self.handle(key, event)

    def tick(self) -> None:
        self.agree(self.verdict.tick(self.now))
        for key in list(self.rooms):
            self.handle(key, Tick())

    def next_at(self) -> float | None:
        times = [self.verdict.next_at(), *(r.next_at() for r in self.rooms.values())]
        return min((t for t in times if t is not None), default=None)

    def check_integrity(self) -> None:
        self.ring.check_integrity()
        self.queue.check_integrity()
        for room in self.rooms.values():
            room.check_integrity()


class PrefillNode(Node):
    """A prefill rank: rooms by name, what is parked for rooms to come, and answers for flows that have ended."""

    def __init__(
        self, epoch: Epoch, rank: Rank, world: int, options: Options, plan: Callable[[PrefillNode, Expect], FlowPlan]
    ) -> None:
        super().__init__(epoch, rank, world, options)
        self.rooms: dict[RoomId, tuple[RoomKey, SendRoom]] = {}
        self.parked: dict[tuple[RoomId, Epoch], Expect | Abort] = {}
        self.failed: set[RoomId] = set()
        self.transfers: dict[tuple[RoomKey, Epoch, Segment], Transfer] = {}
        self.decode_world = 0
        self._plan = plan

    def open(self, room: RoomId, total_s: float) -> RoomKey:
        key = self.next_key(room)
        own = attrs.evolve(self.options, total_s=total_s)
        machine = SendRoom(room, key.generation, self.epoch, own, self.now)
        self.rooms[room] = key, machine
        self.vote(key, None, "")
        for parked in [k for k in self.parked if k[0] == room]:
            self.on_room_frame(self.parked.pop(parked))
        return key

    def act(self, key: RoomKey, what: Callable[[SendRoom], list[Effect]]) -> None:
        """Do something with a room, if it is still there."""
        known, machine = self.rooms.get(key.room, (None, None))
        if known != key or machine is None:
            return
        for effect in what(machine):
            match effect:
                case Send():
                    self.outbox.append(effect)
                case Transfer(to, segment):
                    self.transfers[(key, to, segment)] = effect
                case Granted(transfer):
                    assert machine.flows[transfer.to].awaits(transfer)
                case CastVote(ok, reason):
                    self.vote(key, ok, reason)
                case _:
                    raise AssertionError(effect)
        if machine.closed and self.rooms.get(key.room, (None, None))[0] == key:
            del self.rooms[key.room]
            self.outcomes.setdefault(key.room, []).append(machine.phase)
            ended = RoomOutcome.DONE if machine.phase is Phase.DONE else RoomOutcome.FAILED
            for peer, flow in machine.flows.items():
                self.tombstones.remember(peer, flow.generation, ended)
            if ended is RoomOutcome.FAILED:
                self.failed.add(key.room)

    def begin(self, key: RoomKey, transfer: Transfer) -> bool:
        """The mover takes a transfer up."""
        del self.transfers[(key, transfer.to, transfer.segment)]
        known, machine = self.rooms.get(key.room, (None, None))
        if known != key or machine is None or not machine.flows[transfer.to].begin(transfer):
            return False
        machine.reads += 1
        return True

    def moved(self, key: RoomKey, peer: Epoch, event: Wrote | WriteFailed | Quiet) -> None:
        known, machine = self.rooms[key.room]
        assert known == key
        if not (isinstance(event, WriteFailed) and not event.quiet):
            machine.reads -= 1
        self.act(key, lambda room: room.handle(peer, event, self.now))

    def cancel(self, key: RoomKey, error: DisaggKVError) -> None:
        self.act(key, lambda room: room.cancel(error, self.now))

    def decided(self, key: RoomKey, decided: Decided) -> None:
        self.act(key, lambda room: room.decided(decided, self.now))

    def on_room_frame(self, frame: RoomFrame) -> None:
        name, peer, generation = RoomId(frame.room), Epoch(frame.src), Generation(frame.generation)
        key, machine = self.rooms.get(name, (None, None))
        flow = None if machine is None else machine.flows.get(peer)
        if key is not None and flow is not None and flow.generation == generation:
            if flow.state is not Sending.CLOSED:
                self.act(key, lambda room: room.handle(peer, frame, self.now))
            else:
                self._answer(frame, RoomOutcome.FAILED)
            return
        ended = self.tombstones.outcome(peer, generation)
        first = isinstance(frame, Expect | Abort)
        if ended is None and first and name in self.failed:
            ended = RoomOutcome.FAILED
            self.tombstones.remember(peer, generation, ended)
        if ended is not None:
            self._answer(frame, ended)
        elif key is not None and flow is None and isinstance(frame, Expect):
            self._reply(frame, Expected(**self._head(frame), parked=False))
            plan = self._plan(self, frame)
            self.act(key, lambda room: room.expect(peer, generation, plan, self.decode_world, self.now))
        elif key is not None and flow is None and isinstance(frame, Abort):
            self.act(key, lambda room: room.decline(peer, generation, frame, self.now))
        elif isinstance(frame, Expect | Abort):
            before = self.parked.get((name, peer))
            rank = (generation, isinstance(frame, Abort))
            if before is None or (before.generation, isinstance(before, Abort)) <= rank:
                self.parked[(name, peer)] = frame
            if isinstance(frame, Expect):
                self._reply(frame, Expected(**self._head(frame), parked=True))
            else:
                self._reply(frame, Drained(**self._head(frame), reason=frame.reason))

    def _answer(self, frame: RoomFrame, ended: RoomOutcome) -> None:
        if isinstance(frame, Abort):
            self._reply(frame, Drained(**self._head(frame), reason="the room has ended"))
        elif isinstance(frame, Expect) and ended is not RoomOutcome.DONE:
            self._reply(frame, Abort(**self._head(frame), reason="the room has ended"))

    def _head(self, frame: RoomFrame) -> Head:
        return room_head(self.epoch, Epoch(frame.src), RoomId(frame.room), Generation(frame.generation))

    def _reply(self, frame: RoomFrame, answer: RoomFrame) -> None:
        self.outbox.append(Send(Epoch(frame.src), answer))

    def peer_event(self, event: Lost | Gone) -> None:
        """What a lost peer had parked would begin a flow that nobody ends."""
        self.lost.add(event.peer)
        self.parked = {k: frame for k, frame in self.parked.items() if k[1] != event.peer}
        for key, machine in list(self.rooms.values()):
            if event.peer in machine.flows:
                self.act(key, lambda room: room.handle(event.peer, event, self.now))

    def tick(self) -> None:
        self.agree(self.verdict.tick(self.now))
        for key, _ in list(self.rooms.values()):
            self.act(key, lambda room: room.tick(self.now))

    def next_at(self) -> float | None:
        times = [self.verdict.next_at(), *(m.next_at() for _, m in self.rooms.values())]
        return min((t for t in times if t is not None), default=None)

    def check_integrity(self) -> None:
        for _, machine in self.rooms.values():
            machine.check_integrity()


def given_up() -> AbortedError:
    """What an engine that changed its mind says."""
    return AbortedError("the engine gave up")
