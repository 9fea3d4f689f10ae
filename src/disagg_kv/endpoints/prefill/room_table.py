"""The rooms of a prefill endpoint: what its engine hands over, and what the rooms' machines ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from ...core import CastVote, Effect, Granted, Phase, RoomKey, RoomOutcome, Send, SendRoom, Transfer
from ...core.room.flow import room_head
from ...core.room.machine import ours
from ...core.timers import Timers
from ...core.wire.frames import Abort, words
from ...errors import LocalProtocolError
from ...ids import Epoch, LayerId, RoomId, room_name
from ...memory import Event, MemoryPool
from ..arrivals import Arrivals
from ..handle import ENDED, ChangeQueue, HostEvent
from ..loop.event_loop import EventLoop
from ..spans import room_span
from .handle import DeliveryHandle, LayerGroups, SubmittedChunk
from .movers.base import Mover
from .movers.posts import Broken, Unread
from .room import PrefillRoom
from .throughput import PassTimes
from .transfers import TransferQueue


class PrefillRooms:
    """The base of :class:`~.rooms.PrefillSide`, which has the frames and the time; runs on the thread that advances.

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

    def change(self, key: RoomKey, act: Callable[[SendRoom, float], list[Effect]]) -> None:
        """Have a room's machine do something, if the room is still there."""
        room = self.rooms.get(key)
        if room is not None:
            self._apply(room, act(room.machine, self.loop.now))

    def announce(self, submitted: Sequence[SubmittedChunk], at: float, cuts: LayerGroups) -> None:
        """Rows that are computed from now on: their grants are asked for already. ``cuts`` receive groups."""
        self._throughput.begin(submitted, at)
        for one in submitted:
            self._add(one, ready=False)
            room = self.rooms.get(one.key)
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
            self.final_at([submitted], None, ready, self.loop.now)

    def _add(self, one: SubmittedChunk, *, ready: bool) -> None:
        room = self.rooms.get(one.key)
        if room is not None:
            now = self.loop.now
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
            room = self.rooms.get(key)
            if room is not None:
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
        landed = 0
        for flow in machine.flows.values():
            landed += flow.outbound.segments_landed
        report.segments = landed
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
            loop.observer.span(room_span(name, room.opened, loop.now, room.handle.report, machine.error))
