"""The decode side of an endpoint: rooms, the ring, and scatters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from ...core import (
    Cancel,
    CastVote,
    Decided,
    Effect,
    Free,
    Gone,
    Introduced,
    Leased,
    Lost,
    Met,
    Options,
    Prepare,
    Quarantine,
    ReceiveRoom,
    Receiving,
    Reserve,
    RoomFrame,
    RoomKey,
    RoomOutcome,
    Scatter,
    Send,
    Store,
    Tick,
    Verify,
)
from ...core.room.machine import ours
from ...core.timers import Timers
from ...core.wire.frames import Done, Expected
from ...errors import DisaggKVError, LocalProtocolError, OversizeError, RemoteProtocolError
from ...ids import Epoch, Generation, RoomId
from ...kernels import Kernels
from ...memory import Buffer, MemoryPool
from ...planning import InstancePlans, Segment
from ...rendezvous import Source
from ...staging import GrantQueue, Lease
from ...trace import Span
from ..arrivals import Arrivals
from ..handle import ENDED, ChangeQueue
from ..loop.buffers import Receipts
from ..loop.event_loop import EventLoop
from ..loop.side import Side
from ..loop.timing import TICK_S, Budget
from ..peers.directory import LookupResult
from ..peers.handshake import RemoteEndpoint
from ..peers.session import PeerSession
from .discovery import Discovery, Found, Unreachable
from .flags import RoomFlags
from .handle import CheckedExpectation, ReceptionHandle
from .path_choice import PathChooser, PendingExpectations, quarantine_full
from .room import DecodeRoom
from .scatter import RateLimiter, ScatterQueue


class DecodeSide(Side):
    """Everything here runs on the thread that advances. ``exposes``: prefill may write straight to pages.

    ``rooms`` are not forgotten; ``queue`` has their leases, and who waits for one; ``scatters`` go from ring to pages.
    """

    patience_s = 0.0  # decode's forward passes are not announced

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        ring: Buffer,
        queue: GrantQueue[Epoch, tuple[RoomKey, Segment]],
        kernels: Kernels,
        exposed: bool,
        changes: ChangeQueue[ReceptionHandle],
        verify: Verify,
        pace: RateLimiter | None,
        flags: Buffer | None,
    ) -> None:
        self.loop = loop
        self._pool = pool
        self._ring = ring
        self.queue = queue
        self.exposes = exposed
        self._changes = changes
        self._expectations = PendingExpectations(loop, pool, PathChooser(loop.me), verify)
        self.rooms: dict[RoomKey, DecodeRoom] = {}
        self._discovery = Discovery(loop)
        self.scatters = ScatterQueue(loop, pool, ring, kernels, pace)
        self._receipts = Receipts(loop.send)
        self._events: deque[tuple[DecodeRoom, object]] = deque()
        self._votes: deque[tuple[DecodeRoom, CastVote]] = deque()
        self._touched: dict[DecodeRoom, None] = {}
        self._handling = False
        self._arrivals = Arrivals(loop, self._receipts.send)
        self._timers: Timers[RoomKey] = Timers()
        self.flags = None if flags is None else RoomFlags(flags, loop.me.epoch, loop.me.incarnation.process.host)
        self._lively_at = 0.0
        self.quarantined = 0

    @property
    def open_rooms(self) -> int:
        """Rooms not forgotten; those that failed before prefill was found count while a rank has to learn that."""
        return len(self.rooms) - sum(map(len, self._discovery.unmet.values())) + len(self._discovery.untold)

    # Commands of the engine, on this thread.

    def open(self, key: RoomKey, handle: ReceptionHandle, source: Source, own: Options, tag: bytes) -> None:
        """Begin a room with its own times: find its prefill ranks."""
        now = self.loop.now
        machine = ReceiveRoom(key.room, key.generation, self.loop.me.epoch, own, now, tag, source.instance)
        room = DecodeRoom(key, machine, handle, source, now, own.soon_s)
        handle.report.opened = now
        self.rooms[key] = room
        self.loop.vote(key, None, "")
        self._discovery.add(room)
        self._meet()
        if (error := self.loop.ranks.superseded) is not None:
            self._handle(room, Cancel(error))
        self._publish(room)

    def expect(self, key: RoomKey, wanted: CheckedExpectation) -> None:
        """Rows are awaited. They are asked for once the room's prefill ranks are known."""
        room = self.rooms.get(key)
        if room is not None:
            room.wanted, room.ready = wanted, wanted.ready
            self._await(room)

    def _await(self, room: DecodeRoom) -> None:
        if room.wanted is not None and room.plans is not None:
            self._expectations.add(room)
            self._ask()

    def _ask(self) -> None:
        """Ask prefill for rows once a room's pages may be written."""
        for room, event in self._expectations.ended():
            self._handle(room, event)

    def abort(self, key: RoomKey, error: DisaggKVError) -> None:
        """The engine gives the room up."""
        room = self.rooms.get(key)
        if room is not None:
            room.given_up = room.machine.error is None
            self._handle(room, Cancel(error))

    # Finding prefill.

    def _meet(self) -> bool:
        """Ranks learn of rooms that failed before they were known; then rooms begin, or fail, by what was found.

        As many as a step allows; True: more are left.
        """
        budget, outcomes = self.loop.budget(), self._discovery.outcomes
        self._tell(budget)
        while outcomes and budget.take():
            with self._alone(outcomes[0].room):
                self._end_search(outcomes.popleft())
        return bool(outcomes or self._discovery.untold)

    def _tell(self, budget: Budget) -> None:
        while self._discovery.untold and budget.take():
            room, epoch = self._discovery.next_untold()
            with self._alone(room):
                self._inform(room, epoch)

    @contextmanager
    def _alone(self, room: DecodeRoom) -> Iterator[None]:
        """What raises ends this room: the step may be that of another peer, or of none."""
        try:
            yield
        except Exception as exc:
            self._handle(room, Cancel(ours(exc, f"{room.name}: it cannot begin")))

    def _inform(self, room: DecodeRoom, epoch: Epoch) -> None:
        """A prefill rank that is there, or cannot work with us, learns of a room that failed before it was known."""
        if epoch not in room.machine.writers:
            self._handle(room, Met(epoch))

    def _end_search(self, outcome: Found | Unreachable) -> None:
        room = outcome.room
        if self.rooms.get(room.key) is not room:
            return
        if isinstance(outcome, Unreachable):
            # If it has failed already, the ranks that come all the same learn that.
            if room.machine.error is None:
                self._handle(room, Lost(Epoch(b""), outcome.error))
        elif (error := room.machine.error) is not None:
            for remote in outcome.remotes:
                self._inform(room, remote.epoch)
            self._handle(room, Lost(Epoch(b""), error))  # no other rank will come
        elif any(self.loop.there(remote.epoch) is None for remote in outcome.remotes):
            self._discovery.again(room)
        elif (full := quarantine_full(self.queue, self._ring.nbytes, outcome.remotes)) is not None:
            self._handle(room, Cancel(full))
        else:
            self._introduce(room, outcome.remotes)

    def _introduce(self, room: DecodeRoom, remotes: tuple[RemoteEndpoint, ...]) -> None:
        """Begin a room with its prefill ranks."""
        room.remotes, site = remotes, self._pool.site
        writers = tuple(r.epoch for r in remotes)
        for epoch in writers:
            self.loop.use(epoch, room.used)
        first = room.used[0]
        if first.plans is None:
            first.plans = InstancePlans.of(remotes[0].shards_as(site.spec), site)
        room.plans = first.plans
        pace = next((one.pace for one in room.used if one.pace is not None), None)
        rank_plan = room.plans.rank_plan(room.plans.rotation(room.key.room))
        flags = () if self.flags is None else self.flags.issue(room)
        self._handle(room, Introduced(writers, rank_plan, pace, flags))
        self._await(room)

    def on_answer(self, answer: LookupResult) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        self._discovery.on_answer(answer)
        self._meet()

    def on_up(self, session: PeerSession) -> None:
        """A prefill rank is connected."""
        session.gone = False
        self.queue.connect(session.epoch)
        self.queue.resume(session.epoch)
        self._discovery.inform(*self._discovery.unmet)
        self._discovery.on_up(session.hello.address)
        self._meet()

    def on_greeted(self, epoch: Epoch) -> None:
        """A peer greets again: it may have lost this endpoint, and have failed rooms that wait here."""
        for room in self._with(epoch):
            self._handle(room, Met(epoch))

    def on_unreachable(self, address: str, error: DisaggKVError) -> None:
        """A prefill rank cannot be connected: rooms that wait for it fail, and it learns that."""
        self._discovery.inform(*self._discovery.unmet)
        self._discovery.on_unreachable(address, error)
        self._meet()

    def on_lost(self, lost: Lost) -> None:
        """Fail the rooms that need this rank; memory that it may still write to stays in quarantine."""
        if self.flags is not None:
            self._take_flags(self.flags)
        for room in self._with(lost.peer):
            self._handle(room, lost)
        self.queue.forget(lost.peer)

    def forget(self, session: PeerSession) -> None:
        """Nothing is kept of a rank that is not there."""
        self.queue.forget(session.epoch)
        if self.flags is not None:
            self.flags.page.forget(session)

    def on_gone(self, session: PeerSession) -> None:
        """Evidence: it writes nothing more."""
        for room in self._with(session.epoch):
            self._handle(room, Gone(session.epoch))
        if self.flags is not None:
            self.flags.page.gone(session)

    def _with(self, epoch: Epoch) -> list[DecodeRoom]:
        return [r for r in self.rooms.values() if epoch in r.machine.writers]

    # Frames.

    def on_frame(self, frame: RoomFrame) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        epoch = Epoch(frame.src)
        room = self.rooms.get(RoomKey(RoomId(frame.room), Generation(frame.generation)))
        if isinstance(frame, Done | Expected) and (session := self.loop.there(epoch)) is not None:
            session.learn(frame)
        if room is not None and epoch in room.machine.writers:
            try:
                self._handle(room, frame)
            except RemoteProtocolError as exc:
                registry = self.loop.sessions
                self._handle(room, Cancel(exc.about(registry.name(epoch), **registry.who(epoch))))
        elif room is None or room.machine.error is not None:
            self._arrivals.answer(frame)
        else:
            self.loop.observer.count("frames.not_a_writer")

    def on_decided(self, key: RoomKey, decided: Decided) -> None:
        """The ranks of our instance agree."""
        room = self.rooms.get(key)
        if room is not None:
            self._handle(room, decided)

    # Effects.

    def _handle(self, room: DecodeRoom, event: object) -> None:
        """Pass an event to a room, then the events that follow from its effects, in order; votes come last.

        The engine sees what came of all of them.
        """
        self._events.append((room, event))
        if self._handling:
            return
        self._handling = True
        try:
            while self._events or self._votes:
                if not self._events:
                    self._cast(*self._votes.popleft())
                    continue
                room, event = self._events.popleft()
                if room.machine.state is not Receiving.CLOSED:
                    self._touched[room] = None
                    effects = room.machine.handle(event, self.loop.now)
                    if self.flags is not None:
                        self.flags.follow(room)
                    self._apply(room, effects)
        finally:
            self._handling = False
            touched, self._touched = self._touched, {}
            for one in touched:
                self._publish(one)

    def _apply(self, room: DecodeRoom, effects: Sequence[Effect]) -> None:
        moved = freed = False
        for effect in effects:
            match effect:
                case Send():
                    self._receipts.send(effect)
                case CastVote():
                    self._votes.append((room, effect))
                case Reserve():
                    self._reserve(room, effect)
                case Free(segment):
                    self.scatters.drop(room.key, segment)
                    self.queue.cancel((room.key, segment))
                    self.queue.release((room.key, segment))
                    freed = True
                case Quarantine(segment):
                    self.scatters.drop(room.key, segment)
                    self.queue.quarantine((room.key, segment))
                    moved = True
                case Prepare():
                    self.scatters.prepare(room, effect)
                case Scatter():
                    self.scatters.add(room, effect)
                case Store(data):
                    if (error := room.store(self._pool, data)) is not None:
                        self._handle(room, Cancel(error))
                case _:
                    raise LocalProtocolError(f"a receiving room asked for {effect}")
        if moved or freed:
            self.quarantined = self.queue.quarantined_bytes()
        if freed:
            self._grant()

    def _cast(self, room: DecodeRoom, vote: CastVote) -> None:
        """Cast a vote. It may decide the room at once, so it comes after all other effects."""
        if vote.ok and any(other is room and not later.ok for other, later in self._votes):
            return  # what had to be done before has failed, and this rank votes against itself
        if not vote.ok and not room.machine.writers:
            self._discovery.unmet.setdefault(room.source, {})[room.key] = room
            self._discovery.inform(room.source)
            self._tell(self.loop.budget())
        if vote.ok and room.handle.report.placed is None:
            room.handle.report.placed = self.loop.clock()
        self.loop.vote(room.key, vote.ok, vote.reason)

    def _reserve(self, room: DecodeRoom, effect: Reserve) -> None:
        key = (room.key, effect.segment)
        try:
            lease = self.queue.request(effect.peer, key, effect.nbytes, lookahead=not effect.ready)
        except OversizeError as exc:
            name, sizes = self.loop.sessions.name(effect.peer), f"{exc.asked} bytes, at most {exc.capacity}"
            large = f"{room.name}: {name} asks for too large a lease: {sizes}"
            self._handle(room, Cancel(RemoteProtocolError(large, **self.loop.sessions.who(effect.peer))))
            return
        if self.loop.observed:
            room.queued.setdefault(effect.segment, self.loop.now)
        if lease is not None:
            self._leased(room, effect.segment, lease)
        else:
            self._grant()

    def _grant(self) -> None:
        for (key, segment), lease in self.queue.grants():
            self._leased(self.rooms[key], segment, lease)  # a room that closes has cancelled its requests

    def _leased(self, room: DecodeRoom, segment: Segment, lease: Lease) -> None:
        since = room.queued.pop(segment, None)
        if since is not None:
            self.loop.observer.span(Span("queue", room.key.room, since, self.loop.now, labels=segment.labels()))
        self._handle(room, Leased(segment, lease))

    def work(self) -> bool:
        """Take in flags, finish scatters, start those that are due, and prepare one that follows."""
        more = self.flags is not None and self._take_flags(self.flags)
        expecting = self._expectations.waiting
        if self._discovery.outcomes or self._discovery.untold:
            more |= self._meet()
        if self._receipts.waiting:
            self._receipts.flush()
        if expecting:
            self._ask()
        scatters = self.scatters
        if not scatters.active:
            return more or bool(expecting)
        if not self.loop.may_copy(scatters.queues):
            return True
        budget = self.loop.budget()
        scatters.look()
        # First, so that a GPU has something to do while this thread acts on those that have ended.
        while budget.take() and scatters.start():
            self._take_scattered()
        self._take_scattered()
        if self._receipts.waiting:
            self._receipts.flush()
        if scatters.prepared.waiting:
            scatters.prepare_one()
        return more or scatters.waits or budget.spent or bool(expecting)

    def _take_flags(self, flags: RoomFlags) -> bool:
        raised = flags.look()
        for landed in raised:
            self.loop.of_peer(Epoch(landed.src), self.on_frame, landed)
        return bool(raised)

    def _take_scattered(self) -> None:
        while (ended := self.scatters.outcome()) is not None:
            self._handle(*ended)

    def _publish(self, room: DecodeRoom) -> None:
        machine, handle = room.machine, room.handle
        if machine.error is not None:
            # Before the engine learns that it failed.
            unsettled, peers = room.unsettled(self._pool.site.page_bytes), [remote.epoch for remote in room.remotes]
            self.loop.sessions.hold(room.key, unsettled, peers)
        now, phase = self.loop.now, machine.phase
        released = phase in ENDED and machine.released
        room.account(now, released=released)
        if (state := (phase, released)) != handle.state:
            error = machine.error and self.loop.pauses.explain(machine.error, room.opened, now)
            handle.publish(state, error, self.loop.clock())
            self._changes.add(handle)
        if self.rooms.get(room.key) is not room:
            return
        if machine.state is not Receiving.CLOSED:
            self._timers.by(room.key, now + room.soon_s)
        else:
            del self.rooms[room.key]
            self._timers.schedule(room.key, None)
            self.loop.release(room.used)
            if self.flags is not None:
                self.flags.ended(room)
            self._discovery.forget(room)
            ended = RoomOutcome.DONE if machine.error is None else RoomOutcome.FAILED
            self.loop.remember(machine.writers, room.key, ended)
            if self.loop.observed:
                self.loop.observer.span(handle.report.span(room.key.room, room.opened, now, machine.error))

    # Time.

    def tick(self) -> None:
        """Deadlines, repeats, and look-ups of prefill instances."""
        now, peers = self.loop.now, self.loop.peers
        self._discovery.tick()
        for key in self._timers.due(now):
            self._handle(self.rooms[key], Tick())
            if (room := self.rooms.get(key)) is not None:
                self._timers.schedule(key, room.machine.next_at())
        if now >= self._lively_at:
            self._lively_at = now + TICK_S
            for epoch in tuple(self.queue.active):
                if self.loop.there(epoch) is None or peers.lively(epoch, now):
                    self.queue.resume(epoch)
                else:
                    self.queue.suspend(epoch)
            self._grant()

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        times = [self._timers.next_at(), self.scatters.ready_at, self._discovery.next_at()]
        if self.queue.waiting:
            times.append(self._lively_at)
        return min((t for t in times if t is not None), default=None)

    def integrity_failure(self, error: DisaggKVError, *, unmet: bool = False) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        for room in list(self.rooms.values()):
            if not (unmet and room.machine.writers):
                self._handle(room, Cancel(error))

    def check_integrity(self, since: float = -inf) -> None:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`."""
        self.queue.check_integrity()
        if self.flags is not None:
            self.flags.check_integrity(self.rooms.values(), self.loop.peers.all())
        assert {key for rooms in self._discovery.unmet.values() for key in rooms} <= self.rooms.keys()
        for room in self.rooms.values():
            if room.machine.now >= since:
                room.machine.check_integrity()
