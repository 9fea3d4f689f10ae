"""The prefill half of a node: rooms, early arrivals, and the transfers that serve them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf

from ...errors import AbortedError, DisaggKVError, LocalProtocolError, PeerLostError, RemoteProtocolError
from ...ids import Epoch, Generation, LayerId, RoomId, room_name
from ...memory import Event, MemoryPool
from ...protocol import (
    Cancel,
    CastVote,
    Decided,
    Effect,
    Gone,
    Granted,
    Lost,
    Options,
    Phase,
    Ring,
    RoomFrame,
    RoomKey,
    RoomOutcome,
    Send,
    SendRoom,
    Transfer,
)
from ...protocol.agreement import USED_TWICE
from ...protocol.base import tags_differ
from ...protocol.flow import room_head
from ...protocol.frames import Abort, Drained, Expect, Expected, TablePart, words
from ...protocol.machine import ours
from ...protocol.page_runs import check_tables, whole
from ...protocol.tables import Sending
from ...protocol.timers import Timers
from ...transports import Settled, WriteEnded
from ..runtime.budget import Budget
from ..runtime.directory import LookupResult
from ..runtime.event_loop import EventLoop
from ..runtime.handle import ChangeQueue, HostEvent
from ..runtime.handshake import RemoteEndpoint
from ..runtime.silence import Silences
from ..runtime.spans import room_span
from .answers import EarlyAnswers
from .early import EarlyArrivals
from .ended_early import EndedEarly
from .handle import DeliveryHandle, LayerGroups, SubmittedChunk
from .inspection import PrefillInspection
from .passes import PassTimes
from .room import PrefillRoom
from .routes import Router, taken
from .throughput import ThroughputEstimator
from .transfers import TransferQueue
from .writes import Broken, Unread


class PrefillSide:
    """Everything here runs on the endpoint's thread."""

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        router: Router,
        throughput: ThroughputEstimator,
        transfers: TransferQueue,
        changes: ChangeQueue[DeliveryHandle],
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._changes = changes
        self._router = router
        self._throughput = throughput
        self.transfers = transfers
        self._early = EarlyArrivals(loop.options)
        self._answers = EarlyAnswers(loop, self._early)
        self._ended_early = EndedEarly(loop.options)
        site = pool.site
        tokens = {p.layer for p in site.planes if p.group not in site.state_groups}
        self._tokenless = frozenset(site.shard.layers()) - tokens
        self.row_layers = frozenset(tokens)
        self._newest: dict[RoomId, PrefillRoom] = {}
        self._rooms: dict[RoomKey, PrefillRoom] = {}
        self._flows: dict[tuple[RoomId, Epoch, int], PrefillRoom] = {}
        self._failed: set[RoomKey] = set()
        self._passes = PassTimes(loop, throughput)
        self._timers: Timers[RoomKey] = Timers()
        self._silences = Silences(loop.peers, loop.options.silence_s)
        self.quarantined_slots = 0

    @property
    def open_rooms(self) -> int:
        """Rooms that are not forgotten yet."""
        return len(self._rooms)

    def inspect(self) -> PrefillInspection:
        """See :mod:`~disagg_kv.endpoints.runtime.inspection`."""
        return PrefillInspection(self._loop.inspect(), self._rooms, self._newest, self._flows, self.transfers.inspect())

    # What the engine says, on this thread.

    def open(self, key: RoomKey, handle: DeliveryHandle, own: Options, tag: bytes) -> None:
        """Begin a room with its own times, and whatever was parked for it."""
        now = self._loop.now
        who = self._loop.peer_registry.who
        machine = SendRoom(key.room, key.generation, self._loop.me.epoch, own, now, self._tokenless, who)
        room = PrefillRoom(key, machine, handle, own.silence_s, now, tag)
        handle.report.opened = now
        self._rooms[key] = self._newest[key.room] = room
        self._timers.schedule(key, machine.next_at())
        self._loop.vote(key, None, "")
        reason = self._ended_early.reason(key.room, tag)
        over = None if reason is None else AbortedError(f"{room_name(key.room)}: {reason}")
        if (error := self._loop.succession.error() or over) is not None:
            self._apply(room, machine.cancel(error, now))
        for expect in self._early.take(key.room):
            # Looked at anew: the room may have ended as it began, where another rank's vote against it was known.
            if not self._loop.link_again(expect, partial(self._on_expect, parked=True)):
                self._on_expect(expect, parked=True)

    def change(self, key: RoomKey, act: Callable[[SendRoom, float], list[Effect]]) -> None:
        """Have a room's machine do something, if the room is still there."""
        room = self._rooms.get(key)
        if room is not None:
            self._apply(room, act(room.machine, self._loop.now))

    def announce(self, submitted: Sequence[SubmittedChunk], at: float, cuts: LayerGroups) -> None:
        """Rows that are computed from now on: their grants are asked for already. ``cuts`` receive groups."""
        self._throughput.begin(submitted, at)
        for one in submitted:
            self._add(one, ready=False)
            room = self._rooms.get(one.key)
            if room is not None:
                room.armed[one.call_id] = one.armed
            if room is not None and one.batch.layered:
                room.passes[one.call_id] = cuts
                self._cut(room, cuts)

    def _cut(self, room: PrefillRoom, cuts: LayerGroups) -> None:
        cuts.add(room.key, room.machine.groups(), decided=room.machine.phase is not Phase.CONNECTING)

    def begun(self, submitted: Sequence[SubmittedChunk], at: float) -> None:
        """The engine has its first layer behind it."""
        self._throughput.first(submitted, at)

    def send(self, submitted: SubmittedChunk, ready: Event | None) -> None:
        """Rows that are final once ``ready`` has happened; until then they are looked ahead to."""
        if ready is not None and self._gated([submitted], None, ready):
            self._add(submitted, ready=True)
            return
        try:
            final = ready is None or bool(ready.query())
        except Exception as exc:
            self.broken([submitted.key], exc)
            return
        self._add(submitted, ready=final)
        if not final:
            self.final_at([submitted], None, ready, self._loop.now)

    def _add(self, one: SubmittedChunk, *, ready: bool) -> None:
        room = self._rooms.get(one.key)
        if room is not None:
            now = self._loop.now
            self._apply(
                room,
                room.machine.add(one.call_id, one.start, one.stop, one.tables, ready=ready, now=now, batch=one.batch),
            )

    def final_at(
        self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event | None, said: float
    ) -> None:
        """The engine ``said`` when these layers (None: all) of what was handed over are final: at ``ready``, or now."""
        gated = ready is not None and self._gated(submitted, layers, ready)
        broken = partial(self.broken, [one.key for one in submitted])
        if gated:
            self._final(submitted, layers)
        else:
            self._loop.when(ready, partial(self._final, submitted, layers), broken)
        if layers is not None:
            self._passes.computed(submitted, layers, ready, said, broken)

    def closed_at(self, submitted: Sequence[SubmittedChunk], ready: Event | None, said: float) -> None:
        """The engine ``said`` that a forward pass has ended: at ``ready``, or now."""
        for one in submitted:
            room = self._rooms.get(one.key)
            if room is not None:
                room.passes.pop(one.call_id, None)
                room.armed.pop(one.call_id, None)
        self._passes.closed(submitted, ready, said, partial(self.broken, [one.key for one in submitted]))

    def _gated(self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event) -> bool:
        """Whether the event is left to the GPU that copies; its rows then count as final at once."""
        if not self.transfers.orders(ready):
            return False
        for one in submitted:
            room = self._rooms.get(one.key)
            if room is not None:
                try:
                    room.ready_events.add(one.start, one.stop, layers, ready)
                except Exception as exc:
                    self.broken([one.key], exc)
        return True

    def _final(self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None) -> None:
        for one in submitted:
            room = self._rooms.get(one.key)
            if room is not None:
                self._apply(room, room.machine.ready(one.call_id, layers, self._loop.now))

    def broken(self, keys: Sequence[RoomKey], exc: Exception) -> None:
        """The engine's event raised: it is unknown whether the bytes are final."""
        for key in keys:
            room = self._rooms.get(key)
            if room is not None:
                error = ours(exc, f"{room_name(key.room)}: the engine's event raised")
                self._apply(room, room.machine.cancel(error, self._loop.now))

    def withdraw(self, key: RoomKey, fired: HostEvent) -> None:
        """Take the pages of a room away; fires when they are not read any more."""
        room = self._rooms.get(key)
        if room is None:
            fired.set()
            return
        room.withdrawn.append(fired)
        room.armed.clear()
        self.transfers.unprepare(room)
        self._apply(room, room.machine.withdraw(self._loop.now))
        # At once: the rows may be given again by the next command.
        self._advance(self.transfers.review)

    # Frames.

    def on_frame(self, frame: RoomFrame) -> None:
        """See :class:`~disagg_kv.endpoints.runtime.side.Side`."""
        epoch = Epoch(frame.src)
        room = self._flows.get((RoomId(frame.room), epoch, frame.generation))
        if isinstance(frame, TablePart):
            self._on_table_part(frame)
        elif room is not None:
            try:
                self._apply(room, room.machine.handle(epoch, frame, self._loop.now))
            except RemoteProtocolError as exc:
                registry = self._loop.peer_registry
                error = exc.about(registry.name(epoch), **registry.who(epoch))
                self._apply(room, room.machine.cancel(error, self._loop.now))
        elif isinstance(frame, Expect):
            self._on_expect(frame)
        elif isinstance(frame, Abort):
            self._on_abort(frame)
        else:
            self._loop.observer.count("frames.unknown_room")

    def _on_expect(self, frame: Expect, *, parked: bool = False) -> None:
        loop, name, epoch = self._loop, RoomId(frame.room), Epoch(frame.src)
        ended = loop.tombstones.outcome(epoch, Generation(frame.generation))
        if ended is RoomOutcome.EVICTED:
            # It may be old or only slow. What is parked has not ended; of others it is not known: they must not begin.
            loop.observer.count("frames.evicted_room")
            ended = None if parked or (name, epoch) in self._early else ended
        room, reason = self._newest.get(name), self._ended_early.reason(name, frame.tag)
        if room is not None and tags_differ(frame.tag, room.tag):
            # Another instance means another request: it ends there alone.
            loop.observer.count("frames.other_tag")
            self._answers.refuse(frame, "another tag", room.tag)
            return
        if ended is not None:
            reason = reason or "the room has ended"
        elif room is not None:
            reason = USED_TWICE if epoch in room.machine.flows else None
        if reason is not None:
            self._early.pop(name, epoch)
            self._answers.refuse(frame, reason)
            return
        try:
            check_tables(frame.tables or (), loop.options.request_pages)
        except RemoteProtocolError as exc:
            self._refuse(frame, exc)
            return
        opened = room is not None and not room.machine.released
        if room is not None and opened and whole(frame.tables or ()):
            self._begin(room, frame)
        else:
            self._answers.park(frame, opened=opened)

    def _on_table_part(self, frame: TablePart) -> None:
        """A part of page tables: with the last one a decode rank's expectation is whole."""
        name, epoch = RoomId(frame.room), Epoch(frame.src)
        try:
            if not self._answers.take_part(frame):
                return
        except RemoteProtocolError as exc:
            expect = self._early.pop(name, epoch)
            assert expect is not None
            self._refuse(expect, exc)
            return
        room = self._newest.get(name)
        if room is None or room.machine.released:
            self._answers.waits(frame)
            return
        for expect in self._early.take(name):
            self._on_expect(expect, parked=True)

    def _refuse(self, frame: Expect, error: RemoteProtocolError) -> None:
        """A decode rank awaits what cannot be: its room ends, and ours, if it may have that."""
        loop, name, epoch = self._loop, RoomId(frame.room), Epoch(frame.src)
        error, room, remote = self._answers.blame(frame, error), self._newest.get(name), loop.remotes.get(epoch)
        self._early.pop(name, epoch)
        if room is None or room.machine.released or remote is None or tags_differ(frame.tag, room.tag):
            self._answers.refuse(frame, error)
        elif (other := taken(tuple(room.routes.values()), remote)) is not None:
            self._answers.refuse(frame, other)
        else:
            generation = self._join(room, frame)
            self._apply(room, room.machine.refuse(epoch, generation, error, loop.now))

    def _join(self, room: PrefillRoom, frame: Expect) -> Generation:
        """From now on a decode rank's frames about a room are the room's."""
        epoch = Epoch(frame.src)
        self._flows[room.key.room, epoch, frame.generation] = room
        self._silences.watch(epoch, room.key, room.silence_s, self._loop.now)
        return Generation(frame.generation)

    def _on_abort(self, frame: Abort) -> None:
        loop, name, epoch = self._loop, RoomId(frame.room), Epoch(frame.src)
        generation = Generation(frame.generation)
        self._early.pop(name, epoch)
        room = self._newest.get(name)
        if loop.tombstones.outcome(epoch, generation) is None:
            other = room is not None and tags_differ(frame.tag, room.tag)
            # Who cannot work with us has nothing to say about a room that another instance has.
            other |= room is not None and bool(room.machine.flows) and loop.peers.refused(epoch) is not None
            if room is not None and not other and not room.machine.released and epoch not in room.machine.flows:
                self._flows[(name, epoch, generation)] = room
                self._silences.watch(epoch, room.key, room.silence_s, loop.now)
                self._apply(room, room.machine.decline(epoch, generation, frame, loop.now))
                if epoch not in loop.remotes:
                    # Lost already, or it could not be connected: it acknowledges nothing.
                    lost = PeerLostError(f"{loop.peer_registry.name(epoch)} is lost", epoch=epoch)
                    self._apply(room, room.machine.handle(epoch, Lost(epoch, lost), loop.now))
                return
            loop.remember([epoch], RoomKey(name, generation), RoomOutcome.FAILED)
            if room is None:
                self._ended_early.add(name, f"decode gave up: {frame.reason}", loop.now, frame.tag)
        head = room_head(loop.me.epoch, epoch, name, generation)
        loop.send(Send(epoch, Drained(**head, reason=frame.reason)))

    def _begin(self, room: PrefillRoom, frame: Expect) -> None:
        """A decode rank awaits an open room: decide how its bytes cross."""
        loop, epoch, name = self._loop, Epoch(frame.src), room.key.room
        remote = loop.remotes.get(epoch)
        if remote is None:
            loop.observer.count("frames.unknown_peer")
            return
        other = taken(tuple(room.routes.values()), remote)
        if other is not None:
            self._answers.refuse(frame, other)
            return
        generation = self._join(room, frame)
        head = room_head(loop.me.epoch, epoch, name, generation)
        loop.send(Send(epoch, Expected(**head, parked=False, lane=loop.lane(epoch).name)))
        try:
            route, plan = self._router.find(
                name,
                remote,
                frame,
                tuple(room.routes.values()),
                self.transfers.writes.slots_of(self._failed, epoch),
                self.transfers.quota,
                partial(room.grouped, loop),
            )
        except Exception as exc:
            # A path may be a user's code: its errors fail this room alone.
            where = f"{room_name(name)}: no way to send it to {loop.peer_registry.name(epoch)}"
            error = ours(exc, where, **loop.peer_registry.who(epoch))
            self._apply(room, room.machine.refuse(epoch, generation, error, loop.now))
            return
        room.routes[epoch] = route
        report = room.handle.report
        report.path, report.reason = route.path.name, route.reason
        report.lane, report.lane_reason = route.lane.name, route.lane.reason
        room.handle.hold({g.id: frame.start for g in self._pool.site.token_groups})
        self._apply(room, room.machine.expect(epoch, generation, plan, len(remote.shards), loop.now))
        for cuts in room.passes.values():
            self._cut(room, cuts)

    # Peers.

    def on_up(self, remote: RemoteEndpoint) -> None:
        """Nothing to do before the peer asks."""

    def on_greeted(self, epoch: Epoch) -> None:
        """Nothing to do: the peer asks again for what it still waits for."""

    def on_unreachable(self, address: str, error: DisaggKVError) -> None:
        """A sender dials no address of the other side."""

    def on_answer(self, answer: LookupResult) -> None:
        """A sender looks up no instance but its own."""

    def on_lost(self, lost: Lost) -> None:
        """Its flows end."""
        self._to_flows(lost.peer, lost)
        self._router.forget(lost.peer)

    def on_parted(self, epoch: Epoch) -> None:
        """Nothing is kept of a rank that is not there."""
        self._router.forget(epoch)

    def on_gone(self, epoch: Epoch) -> None:
        """Nothing moves between us any more."""
        try:
            self.transfers.writes.gone(epoch)
        finally:
            self._take_outcomes()
        self._to_flows(epoch, Gone(epoch))

    def _to_flows(self, epoch: Epoch, event: Lost | Gone) -> None:
        for room in [r for (_, e, _), r in self._flows.items() if e == epoch]:
            if epoch in room.machine.flows:
                self._apply(room, room.machine.handle(epoch, event, self._loop.now))

    def on_decided(self, key: RoomKey, decided: Decided) -> None:
        """The ranks of our instance agree."""
        self.change(key, lambda machine, now: machine.decided(decided, now))

    # Moving.

    def work(self) -> bool:
        """Gather and post; True while something is in flight or left for the next step."""
        waiting = self._passes.look()
        if not self.transfers.active:
            return waiting
        budget = Budget(self._loop.clock)
        if self.transfers.armed:
            self._advance(self.transfers.review)
        if self.transfers.waits:
            self._advance(self.transfers.look)
            self._take_ends()
        while self.transfers.pending:
            # What others wait for leaves before this thread plans and launches.
            self._loop.flush()
            more = self._advance(partial(self.transfers.start, budget))
            self._take_ends()
            if not more:
                break
        moving = self.transfers.waits or budget.spent
        if self.transfers.prepared.gathers.waiting:
            self._loop.flush()
            moving |= self.transfers.prepared.work()
        if self.transfers.to_arm:
            self._loop.flush()
            moving |= self._advance(self.transfers.arm)
        return moving or waiting

    def _advance(self, act: Callable[[], bool | None]) -> bool:
        """Have the transfers do something, then act on what came of it, also where it raised."""
        try:
            return bool(act())
        finally:
            self._take_outcomes()

    def _take_outcomes(self) -> None:
        outcomes = self.transfers.writes.outcomes
        while outcomes:
            happened = outcomes.popleft()
            room = happened.room
            if isinstance(happened, Broken):
                self.broken([room.key], happened.error)
            elif isinstance(happened, Unread):
                self._publish(room)
            elif self._rooms.get(room.key) is room:
                self._apply(room, room.machine.handle(happened.to, happened.event, self._loop.now))

    def _take_ends(self) -> None:
        """Poll the transport: where it copies while it posts, its writes have ended before the next gather."""
        try:
            self._loop.poll_transport()
        except Exception as exc:
            self._loop.failures.defer(exc)

    @property
    def patience_s(self) -> float:
        """See :class:`~disagg_kv.endpoints.runtime.side.Side`."""
        return self._throughput.patience_s

    def on_ticket(self, event: WriteEnded | Settled) -> None:
        """A write ended."""
        try:
            self.transfers.writes.on_ticket(event)
        finally:
            self._take_outcomes()

    # Effects and time.

    def _apply(self, room: PrefillRoom, effects: Sequence[Effect]) -> None:
        votes: list[CastVote] = []
        for effect in effects:
            match effect:
                case Send():
                    self._loop.send(effect)
                case Ring():
                    if not room.ring(effect):
                        self._loop.observer.count("bells.refused")
                case CastVote():
                    votes.append(effect)
                case Transfer():
                    self.transfers.add(room, effect)
                case Granted(transfer):
                    self.transfers.granted(room, transfer)
                case _:
                    raise LocalProtocolError(f"a sending room asked for {effect}")
        self.transfers.changed(room)
        self._publish(room)
        # May be decided, and reported to the engine, at once: not before everything else has been done.
        for vote in votes:
            self._loop.vote(room.key, vote.ok, vote.reason)

    def _publish(self, room: PrefillRoom) -> None:
        machine = room.machine
        if machine.error is not None and room.key in self._rooms:
            self._failed.add(room.key)
            self.transfers.unprepare(room)
            hellos = [route.remote.hello for route in room.routes.values()]
            self._loop.peer_registry.hold(room.key, self.transfers.writes.owed(room), hellos)
        room.account(self._loop.now)
        phase, handle, released = machine.phase, room.handle, machine.released
        if not handle.shows(phase, released):
            error = self._loop.pauses.explain(machine.error, room.opened, self._loop.now)
            handle.publish(phase, released, error, self._loop.clock())
            self._changes.add(handle)
        if self._rooms.get(room.key) is not room:
            return
        if released and machine.closed:
            self._close(room)
        else:
            self._timers.by(room.key, machine.next_at())

    def _close(self, room: PrefillRoom) -> None:
        loop, name, machine = self._loop, room.key.room, room.machine
        self.transfers.forget(room)
        self._throughput.room_ended(room.key)
        del self._rooms[room.key]
        self._timers.schedule(room.key, None)
        self._silences.forget(room.key)
        self._failed.discard(room.key)
        if self._newest.get(name) is room:
            del self._newest[name]
        ended = RoomOutcome.DONE if machine.done else RoomOutcome.FAILED
        for epoch, flow in machine.flows.items():
            self._flows.pop((name, epoch, flow.generation), None)
            loop.remember([epoch], RoomKey(name, flow.generation), ended)
        incomplete = machine.world is None or len(machine.flows) < machine.world
        if machine.error is not None and incomplete:
            self._ended_early.add(name, words(machine.error), loop.now)
            for expect in self._early.take(name):
                # It came when the room had failed, and was not yet forgotten: it is answered now.
                self._on_expect(expect, parked=True)
        if loop.observed:
            loop.observer.span(room_span(name, room.opened, loop.now, room.handle.report, machine.error))

    def tick(self) -> None:
        """Deadlines, repeats, silence, and what was parked for too long: of rooms for which something is due."""
        now = self._loop.now
        self._advance(self.transfers.look_at_failed)
        for key in self._timers.due(now):
            self.change(key, SendRoom.tick)
        for key, lost in self._silences.due(now):
            room = self._rooms.get(key)
            flow = None if room is None else room.machine.flows.get(lost.peer)
            if room is not None and flow is not None and flow.state is not Sending.COMPLETE:
                # Other rooms may go on with this peer: it receives a frame, unlike one that is lost.
                self._apply(room, room.machine.handle(lost.peer, Cancel(lost.error), now))
        self._early.expire(now)
        self._ended_early.expire(now)
        self.quarantined_slots = self.transfers.writes.slots_of(self._failed) if self._failed else 0

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        times = (self._timers.next_at(), self._silences.next_at(), self._early.next_at(), self._ended_early.next_at())
        return min((t for t in times if t is not None), default=None)

    def integrity_failure(self, error: DisaggKVError, *, unmet: bool = False) -> None:
        """See :class:`~disagg_kv.endpoints.runtime.side.Side`."""
        for room in list(self._rooms.values()):
            if not (unmet and room.machine.flows):
                self._apply(room, room.machine.cancel(error, self._loop.now))

    def check_integrity(self, since: float = -inf) -> None:
        """See :class:`~disagg_kv.endpoints.runtime.side.Side`."""
        self.transfers.check_integrity()
        self._early.check_integrity()
        hopeful = {room for room in self._rooms.values() if room.machine.error is None}
        self.transfers.prepared.check_integrity(hopeful)
        assert not [room for room in self._flows.values() if self._rooms.get(room.key) is not room]
        assert self._failed == {key for key, room in self._rooms.items() if room.machine.error is not None}
        for room in self._rooms.values():
            room.machine.check_integrity(since)
