"""The prefill half of a node: frames, early arrivals, peers and time; its rooms are in :mod:`.room_table`."""

from __future__ import annotations

from functools import partial
from math import inf

from ...core import Decided, Gone, Lost, Options, RoomFrame, RoomKey, Send, SendRoom
from ...core.base import tags_differ
from ...core.room.flow import room_head
from ...core.room.machine import ours
from ...core.verdict.elected import USED_TWICE
from ...core.wire.frames import Abort, Expect, Expected
from ...errors import AbortedError, DisaggKVError, PeerLostError, QuarantineFullError, RemoteProtocolError
from ...ids import Epoch, Generation, RoomId, room_name
from ...memory import MemoryPool
from ...strategies import exposes_pages
from ...transports import Settled, WriteEnded
from ..arrivals import Absent
from ..handle import ChangeQueue
from ..loop.event_loop import EventLoop
from ..peers.directory import LookupResult
from ..peers.session import PeerSession
from .handle import DeliveryHandle
from .movers.base import Mover
from .room import PrefillRoom
from .room_table import PrefillRooms
from .routes import Router, taken
from .transfers import TransferQueue


class PrefillSide(PrefillRooms):
    """Everything here runs on the thread that advances."""

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        router: Router,
        transfers: TransferQueue,
        mover: Mover,
        changes: ChangeQueue[DeliveryHandle],
    ) -> None:
        super().__init__(loop, pool, transfers, mover, changes)
        self._router = router
        self.quarantined_slots = 0

    # What the engine says, on this thread.

    def open(self, key: RoomKey, handle: DeliveryHandle, own: Options, tag: bytes) -> None:
        """Begin a room with its own times, and whatever was parked for it."""
        now = self.loop.now
        who = self.loop.sessions.who
        machine = SendRoom(key.room, key.generation, self.loop.me.epoch, own, now, self._tokenless, who)
        room = PrefillRoom(key, machine, handle, now, own.soon_s, tag)
        handle.report.opened = now
        self.rooms[key] = self.newest[key.room] = room
        self._timers.schedule(key, now + room.soon_s)
        self.loop.vote(key, None, "")
        reason = self._arrivals.reason(key.room, tag)
        over = None if reason is None else AbortedError(f"{room_name(key.room)}: {reason}")
        if (error := self.loop.ranks.superseded or over) is not None:
            self._apply(room, machine.cancel(error, now))
        for expect in self._arrivals.parked(key.room):
            # Looked at anew: the room may have ended as it began, where another rank's vote against it was known.
            self._on_expect(expect)

    # Frames.

    def on_frame(self, frame: RoomFrame) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        epoch = Epoch(frame.src)
        room = self.flows.get((RoomId(frame.room), epoch, frame.generation))
        if room is not None:
            try:
                self._apply(room, room.machine.handle(epoch, frame, self.loop.now))
            except RemoteProtocolError as exc:
                registry = self.loop.sessions
                error = exc.about(registry.name(epoch), **registry.who(epoch))
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
        other = taken(tuple(room.routes.values()), remote)
        if other is not None:
            self._arrivals.refuse(frame, other)
            return
        generation = self._join(room, frame)
        head = room_head(loop.me.epoch, epoch, name, generation)
        mapping, carrier = session.mapping, loop.reach(epoch)
        said = None if mapping.pool is None and not mapping.refused else mapping.refused
        loop.send(Send(epoch, Expected(**head, parked=False, transport=carrier.name, unmapped=said)))
        try:
            route, plan = self._router.find(
                name,
                session,
                remote,
                carrier,
                frame,
                tuple(room.routes.values()),
                partial(room.grouped, loop),
            )
            stuck = self.transfers.staged.slots_of(self._failed, epoch)
            if stuck >= self.transfers.staged.slots.quota and not exposes_pages(route.path):
                raise QuarantineFullError(f"{remote.name}: {stuck} staging slots wait for evidence")
        except Exception as exc:
            # A path may be a user's code: its errors fail this room alone.
            where = f"{room_name(name)}: no way to send it to {loop.sessions.name(epoch)}"
            error = ours(exc, where, **loop.sessions.who(epoch))
            self._apply(room, room.machine.refuse(epoch, generation, error, loop.now))
            return
        room.routes[epoch] = route
        report = room.handle.report
        report.path, report.reason = route.path.name, "decode has chosen it"
        report.transport, report.transport_reason = route.carrier.name, route.carrier.reason
        room.handle.hold({g.id: frame.start for g in self._pool.site.token_groups})
        self._apply(room, room.machine.expect(epoch, generation, plan, len(remote.shards), loop.now))
        for cuts in room.passes.values():
            self._cut(room, cuts)

    # Peers.

    def on_up(self, session: PeerSession) -> None:
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

    def forget(self, session: PeerSession) -> None:
        """Nothing is kept of it but the session."""

    def on_gone(self, session: PeerSession) -> None:
        """Nothing moves between us any more."""
        epoch = session.epoch
        try:
            self.transfers.posts.gone(epoch)
        finally:
            self._take_outcomes()
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
        try:
            self.transfers.posts.on_ticket((transport, event.ticket), event)
        finally:
            self._take_outcomes()

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
        self.transfers.check_integrity()
        self._arrivals.check_integrity()
        hopeful = {room for room in self.rooms.values() if room.machine.error is None}
        if self.transfers.staged.prepared is not None:
            self.transfers.staged.prepared.check_integrity(hopeful)
        assert not [room for room in self.flows.values() if self.rooms.get(room.key) is not room]
        assert self._failed == {key for key, room in self.rooms.items() if room.machine.error is not None}
        for room in self.rooms.values():
            room.machine.check_integrity(since)
