"""The prefill half of a node: its rooms, and frames, early arrivals, peers and time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from math import inf

from ...core import (
    CastVote,
    Decided,
    Effect,
    Gone,
    Granted,
    Lost,
    Options,
    Phase,
    RoomFrame,
    RoomKey,
    RoomOutcome,
    Send,
    SendRoom,
    Transfer,
)
from ...core.base import tags_differ
from ...core.room.flow import room_head
from ...core.room.machine import ours
from ...core.timers import Timers
from ...core.verdict.elected import USED_TWICE
from ...core.wire.frames import Abort, Expect, Expected, words
from ...errors import (
    AbortedError,
    DisaggKVError,
    LocalProtocolError,
    PeerLostError,
    QuarantineFullError,
    RemoteProtocolError,
)
from ...ids import Epoch, Generation, LayerId, RoomId, room_name
from ...memory import Event, MemoryPool
from ...strategies import exposes_pages
from ...transports import Settled, WriteEnded
from ..arrivals import Absent, Arrivals
from ..handle import ENDED, ChangeQueue, HostEvent
from ..loop.event_loop import EventLoop
from ..loop.side import Side
from ..peers.session import PeerSession
from .handle import DeliveryHandle, LayerGroups, SubmittedChunk
from .movers.base import Mover
from .movers.posts import Broken, Unread
from .room import PrefillRoom
from .routes import Router, taken
from .throughput import PassTimes
from .transfers import TransferQueue


class PrefillSide(Side):
    """Everything here runs on the thread that advances. A sender dials no peer, and asks none for anything.

    Attributes:
        loop: the endpoint's.
        rooms: those that are not forgotten.
        newest: the last one of each id.
        flows: the room of a flow, by its frames.
        transfers: moves bytes.
    """

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        router: Router,
        transfers: TransferQueue,
        mover: Mover,
        changes: ChangeQueue[DeliveryHandle],
    ) -> None:
        self.loop = loop
        self._pool = pool
        self._changes = changes
        self._throughput = transfers.posts.throughput
        self.transfers = transfers
        self._mover = mover
        self._router = router
        self.quarantined_slots = 0
        site = pool.site
        tokens = {p.layer for p in site.planes if p.group not in site.state_groups}
        self._tokenless = frozenset(site.shard.layers()) - tokens
        self.row_layers = frozenset(tokens)
        self.newest: dict[RoomId, PrefillRoom] = {}
        self._arrivals = Arrivals(loop, loop.send, self.newest)
        self.rooms: dict[RoomKey, PrefillRoom] = {}
        self.flows: dict[tuple[RoomId, Epoch, int], PrefillRoom] = {}
        self._failed: set[RoomKey] = set()
        self._passes = PassTimes(loop, self._throughput)
        self._timers: Timers[RoomKey] = Timers()

    @property
    def open_rooms(self) -> int:
        """Rooms that are not forgotten yet."""
        return len(self.rooms)

    # What the engine says, on this thread.

    def open(self, key: RoomKey, handle: DeliveryHandle, own: Options, tag: bytes) -> None:
        """Begin a room with its own times, and whatever was parked for it."""
        loop, now = self.loop, self.loop.now
        machine = SendRoom(key.room, key.generation, loop.me.epoch, own, now, self._tokenless, loop.sessions.who)
        room = PrefillRoom(key, machine, handle, now, own.soon_s, tag)
        handle.report.opened = now
        self.rooms[key] = self.newest[key.room] = room
        self._timers.schedule(key, now + room.soon_s)
        loop.vote(key, None, "")
        reason = self._arrivals.reason(key.room, tag)
        over = None if reason is None else AbortedError(f"{room_name(key.room)}: {reason}")
        if (error := loop.ranks.superseded or over) is not None:
            self._apply(room, machine.cancel(error, now))
        for expect in self._arrivals.parked(key.room):
            # Looked at anew: the room may have ended as it began, where another rank's vote against it was known.
            self._on_expect(expect)

    def change(self, key: RoomKey, act: Callable[[SendRoom, float], list[Effect]]) -> None:
        """Have a room's machine do something, if the room is still there."""
        if (room := self.rooms.get(key)) is not None:
            self._apply(room, act(room.machine, self.loop.now))

    def announce(self, submitted: Sequence[SubmittedChunk], at: float, cuts: LayerGroups) -> None:
        """Rows that are computed from now on: their grants are asked for already. ``cuts`` receive groups."""
        self._throughput.begin(submitted, at)
        for one in submitted:
            self._add(one, ready=False)
            if (room := self.rooms.get(one.key)) is not None and one.batch.layered:
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
            self.final_at([submitted], None, ready, self.loop.now)

    def _add(self, one: SubmittedChunk, *, ready: bool) -> None:
        if (room := self.rooms.get(one.key)) is not None:
            rows, now = (one.call_id, one.start, one.stop, one.tables), self.loop.now
            self._apply(room, room.machine.add(*rows, ready=ready, now=now, batch=one.batch))

    def final_at(
        self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event | None, said: float
    ) -> None:
        """The engine ``said`` when these layers (None: all) of what was handed over are final: at ``ready``, or now."""
        gated = ready is not None and self._gated(submitted, layers, ready)
        broken = partial(self.broken, [one.key for one in submitted])
        if gated:
            self._final(submitted, layers)
        else:
            self.loop.when(ready, partial(self._final, submitted, layers), broken)
        if layers is not None:
            self._passes.computed(submitted, layers, ready, said, broken)

    def closed_at(self, submitted: Sequence[SubmittedChunk], ready: Event | None, said: float) -> None:
        """The engine ``said`` that a forward pass has ended: at ``ready``, or now."""
        for one, room in self._open(submitted):
            room.passes.pop(one.call_id, None)
        self._passes.closed(submitted, ready, said, partial(self.broken, [one.key for one in submitted]))

    def _gated(self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event) -> bool:
        """Whether the event is left to the GPU that copies; its rows then count as final at once."""
        if not self.transfers.orders(ready):
            return False
        for one, room in self._open(submitted):
            try:
                room.ready_events.add(one.start, one.stop, layers, ready)
            except Exception as exc:
                self.broken([one.key], exc)
        return True

    def _final(self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None) -> None:
        for one, room in self._open(submitted):
            self._apply(room, room.machine.ready(one.call_id, layers, self.loop.now))

    def _open(self, submitted: Sequence[SubmittedChunk]) -> Iterator[tuple[SubmittedChunk, PrefillRoom]]:
        """The chunks whose rooms are still there."""
        for one in submitted:
            if (room := self.rooms.get(one.key)) is not None:
                yield one, room

    def broken(self, keys: Sequence[RoomKey], exc: Exception) -> None:
        """The engine's event raised: it is unknown whether the bytes are final."""
        for key in keys:
            if (room := self.rooms.get(key)) is not None:
                error = ours(exc, f"{room_name(key.room)}: the engine's event raised")
                self._apply(room, room.machine.cancel(error, self.loop.now))

    def withdraw(self, key: RoomKey, fired: HostEvent) -> None:
        """Take the pages of a room away; fires when they are not read any more."""
        room = self.rooms.get(key)
        if room is None:
            fired.set()
            return
        room.withdrawn.append(fired)
        self.transfers.forget_prepared(room)
        self._apply(room, room.machine.withdraw(self.loop.now))

    # Frames.

    def on_frame(self, frame: RoomFrame) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        epoch = Epoch(frame.src)
        room = self.flows.get((RoomId(frame.room), epoch, frame.generation))
        if room is not None:
            try:
                self._apply(room, room.machine.handle(epoch, frame, self.loop.now))
            except RemoteProtocolError as exc:
                error = exc.about(self.loop.sessions.name(epoch), **self.loop.sessions.who(epoch))
                self._apply(room, room.machine.cancel(error, self.loop.now))
        elif isinstance(frame, Expect):
            self._on_expect(frame)
        elif isinstance(frame, Abort):
            self._on_abort(frame)
        else:
            self._arrivals.answer(frame)

    def _on_expect(self, frame: Expect) -> None:
        room, joins = self.newest.get(RoomId(frame.room)), self._arrivals.state(frame) is Absent.OPEN
        if room is not None and tags_differ(frame.tag, room.tag):
            # Another instance means another request: it ends there alone.
            self.loop.observer.count("frames.other_tag")
            self._arrivals.refuse(frame, "another tag", room.tag)
        elif room is not None and joins and frame.src in room.machine.flows:
            self._arrivals.refuse(frame, USED_TWICE)
        elif room is not None and joins and not room.machine.released:
            self._begin(room, frame)
        else:
            self._arrivals.answer(frame)

    def _join(self, room: PrefillRoom, frame: Expect | Abort) -> Generation:
        """From now on a decode rank's frames about a room are the room's."""
        epoch = Epoch(frame.src)
        self._arrivals.forget(room.key.room, epoch)
        self.flows[room.key.room, epoch, frame.generation] = room
        self.loop.use(epoch, room.used)
        return Generation(frame.generation)

    def _on_abort(self, frame: Abort) -> None:
        loop, epoch, room = self.loop, Epoch(frame.src), self.newest.get(RoomId(frame.room))
        if (
            room is None
            or room.machine.released
            or epoch in room.machine.flows
            or tags_differ(frame.tag, room.tag)
            # Who cannot work with us has nothing to say about a room that another instance has.
            or (room.machine.flows and loop.peers.refused(epoch) is not None)
            or self._arrivals.state(frame) is not Absent.OPEN
        ):
            self._arrivals.answer(frame)
            return
        self._apply(room, room.machine.decline(epoch, self._join(room, frame), frame, loop.now))
        if loop.there(epoch) is None:
            # Lost already, or it could not be connected: it acknowledges nothing.
            lost = PeerLostError(f"{loop.sessions.name(epoch)} is lost", epoch=epoch)
            self._apply(room, room.machine.handle(epoch, Lost(epoch, lost), loop.now))

    def _begin(self, room: PrefillRoom, frame: Expect) -> None:
        """A decode rank awaits an open room: decide how its bytes cross."""
        loop, epoch, name = self.loop, Epoch(frame.src), room.key.room
        session = loop.there(epoch)
        if session is None or (remote := session.remote) is None:
            loop.observer.count("frames.unknown_peer")
            return
        routes = tuple(room.routes.values())
        if (other := taken(routes, remote)) is not None:
            self._arrivals.refuse(frame, other)
            return
        generation = self._join(room, frame)
        head = room_head(loop.me.epoch, epoch, name, generation)
        mapping, carrier = session.mapping, loop.reach(epoch)
        said = None if mapping.pool is None and not mapping.refused else mapping.refused
        loop.send(Send(epoch, Expected(**head, parked=False, transport=carrier.name, unmapped=said)))
        try:
            route, plan = self._router.find(name, session, remote, carrier, frame, routes, partial(room.grouped, loop))
            stuck = self.transfers.staged.slots_of(self._failed, epoch)
            if stuck >= self.transfers.staged.slots.quota and not exposes_pages(route.path):
                raise QuarantineFullError(f"{remote.name}: {stuck} staging slots wait for evidence")
        except Exception as exc:
            # A path may be a user's code: its errors fail this room alone.
            where = f"{room_name(name)}: no way to send it to {loop.sessions.name(epoch)}"
            error = ours(exc, where, **loop.sessions.who(epoch))
            self._apply(room, room.machine.refuse(epoch, generation, error, loop.now))
            return
        room.routed(epoch, route)
        room.handle.hold({g.id: frame.start for g in self._pool.site.token_groups})
        self._apply(room, room.machine.expect(epoch, generation, plan, len(remote.shards), loop.now))
        for cuts in room.passes.values():
            self._cut(room, cuts)

    # Peers.

    def on_lost(self, lost: Lost) -> None:
        """Its flows end."""
        self._to_flows(lost.peer, lost)

    def on_gone(self, session: PeerSession) -> None:
        """Nothing moves between us any more."""
        epoch = session.epoch
        self._advance(partial(self.transfers.posts.gone, epoch))
        self._to_flows(epoch, Gone(epoch))

    def _to_flows(self, epoch: Epoch, event: Lost | Gone) -> None:
        for room in [r for (_, e, _), r in self.flows.items() if e == epoch]:
            if epoch in room.machine.flows:
                self._apply(room, room.machine.handle(epoch, event, self.loop.now))

    def on_decided(self, key: RoomKey, decided: Decided) -> None:
        """The ranks of our instance agree."""
        self.change(key, lambda machine, now: machine.decided(decided, now))

    # Moving.

    def work(self) -> bool:
        """Gather and post; True while something is in flight or left for the next step."""
        passes = self._passes.events
        waiting = bool(passes.lines) and passes.look()
        self.quarantined_slots = self.transfers.staged.slots_of(self._failed) if self._failed else 0
        transfers, prepared = self.transfers, self.transfers.staged.prepared
        waits = transfers.waits
        preparing = prepared is not None and bool(prepared.gathers.waiting)
        if not (waits or preparing or transfers.pending):
            return waiting
        if not self.loop.may_copy(transfers.queues):
            return True
        budget = self.loop.budget()
        if waits:
            self._advance(self._mover.look)
            self._take_ends()
        while transfers.pending:
            # What others wait for leaves before this thread plans and launches.
            self.loop.flush()
            begun = self._advance(partial(self._mover.start, budget))
            self._take_ends()
            if not begun:
                break
        moving = transfers.waits or budget.spent
        if prepared is not None and prepared.gathers.waiting:
            self.loop.flush()
            moving |= prepared.work()
        return moving or waiting

    def _take_ends(self) -> None:
        """Poll the transport: where it copies while it posts, its writes have ended before the next gather."""
        try:
            self.loop.poll_transport()
        except Exception as exc:
            self.loop.failures.defer(exc)

    @property
    def patience_s(self) -> float:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        return self._throughput.patience_s

    def on_ticket(self, transport: str, event: WriteEnded | Settled) -> None:
        """A write ended."""
        self._advance(partial(self.transfers.posts.on_ticket, (transport, event.ticket), event))

    # Time.

    def tick(self) -> None:
        """Deadlines, repeats, and what was parked for too long: of rooms for which something is due."""
        now = self.loop.now
        if self.transfers.failed:
            self._advance(self.transfers.look_at_failed)
        for key in self._timers.due(now):
            self.change(key, SendRoom.tick)
            if (room := self.rooms.get(key)) is not None:
                self._timers.schedule(key, room.machine.next_at())
        self._arrivals.tick()

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        times = self._timers.next_at(), self._arrivals.next_at()
        return min((t for t in times if t is not None), default=None)

    def integrity_failure(self, error: DisaggKVError, *, unmet: bool = False) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        for room in list(self.rooms.values()):
            if not (unmet and room.machine.flows):
                self._apply(room, room.machine.cancel(error, self.loop.now))

    def check_integrity(self, since: float = -inf) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        self._arrivals.check_integrity()
        assert not [room for room in self.flows.values() if self.rooms.get(room.key) is not room]
        assert self._failed == {key for key, room in self.rooms.items() if room.machine.error is not None}
        for room in self.rooms.values():
            room.machine.check_integrity(since)

    # What the machines ask for, and what came of it.

    def _advance(self, act: Callable[[], object]) -> bool:
        """Have the transfers do something, then act on what came of it, also where it raised."""
        try:
            return bool(act())
        finally:
            self._take_outcomes()

    def _take_outcomes(self) -> None:
        while (happened := self._mover.outcome()) is not None:
            room = happened.room
            if isinstance(happened, Broken):
                self.broken([room.key], happened.error)
            elif isinstance(happened, Unread):
                self._publish(room)
            elif self.rooms.get(room.key) is room:
                self._apply(room, room.machine.handle(happened.to, happened.event, self.loop.now))

    def _apply(self, room: PrefillRoom, effects: Sequence[Effect]) -> None:
        votes: list[CastVote] = []
        for effect in effects:
            match effect:
                case Send():
                    self.loop.send(effect)
                case CastVote():
                    votes.append(effect)
                case Transfer():
                    self._mover.add(room, effect)
                case Granted(transfer):
                    if (prepared := self.transfers.staged.prepared) is not None:
                        prepared.add(room, transfer)
                case _:
                    raise LocalProtocolError(f"a sending room asked for {effect}")
        self._publish(room)
        # May be decided, and reported to the engine, at once: not before everything else has been done.
        for vote in votes:
            self.loop.vote(room.key, vote.ok, vote.reason)

    def _publish(self, room: PrefillRoom) -> None:
        machine = room.machine
        if machine.error is not None and room.key in self.rooms:
            self._failed.add(room.key)
            self.transfers.forget_prepared(room)
            self.loop.sessions.hold(room.key, self.transfers.posts.owed(room), room.routes)
        now, handle, report = self.loop.now, room.handle, room.handle.report
        phase = machine.phase
        released = phase in ENDED and machine.released
        report.segments = sum(flow.outbound.segments_landed for flow in machine.flows.values())
        if room.withdrawn and machine.reads == 0:
            for fired in room.withdrawn:
                fired.set()
            room.withdrawn.clear()
        if released and "total" not in report.seconds:
            report.spend("total", now - room.opened)
        if (state := (phase, released)) != handle.state:
            error = machine.error and self.loop.pauses.explain(machine.error, room.opened, now)
            handle.publish(state, error, self.loop.clock())
            self._changes.add(handle)
        if self.rooms.get(room.key) is not room:
            return
        if released and machine.closed:
            self._close(room)
        else:
            self._timers.by(room.key, now + room.soon_s)

    def _close(self, room: PrefillRoom) -> None:
        loop, name, machine = self.loop, room.key.room, room.machine
        self._mover.withdraw(room)
        self._throughput.room_ended(room.key)
        del self.rooms[room.key]
        self._timers.schedule(room.key, None)
        loop.release(room.used)
        self._failed.discard(room.key)
        if self.newest.get(name) is room:
            del self.newest[name]
        ended = RoomOutcome.DONE if machine.done else RoomOutcome.FAILED
        for epoch, flow in machine.flows.items():
            self.flows.pop((name, epoch, flow.generation), None)
            loop.remember([epoch], RoomKey(name, flow.generation), ended)
        incomplete = machine.world is None or len(machine.flows) < machine.world
        if machine.error is not None and incomplete:
            own = room_head(loop.me.epoch, loop.me.epoch, name, room.key.generation)
            self._arrivals.over(Abort(**own, reason=words(machine.error)))
        if loop.observed:
            loop.observer.span(room.handle.report.span(name, room.opened, loop.now, machine.error))
