"""Prefill's data path: gather into slots, post writes, and know when source memory is quiet again.

Theory of operation
===================

A transfer moves our part of one segment to one decode rank. It is ordered (:meth:`TransferQueue.add`) once its rows are
final, or will be at an event that a GPU waits for, and once it has its place at the destination.

::

    add -> pending -> gather into a slot -> post -> tickets end -> outcome       (staged)
    add -> pending ----------------------> post -> tickets end -> outcome       (straight from page to page)

Calls go one way. The endpoint's side calls ``look`` and ``start`` in each step of its loop, and ``on_ticket`` for each
report of the transport. None of them calls the side. What the side has to know waits until it takes it (``outcome``):
how a transfer went, that no page of a room is read any more, that an event of a room raised. The outcomes survive an
exception, so a room never waits for one that was lost.

``start`` begins at most one gather. So a transport that copies inside ``submit`` has reported the end of the last
write, and has its slot back, before the next gather looks for one.

Two counts keep memory from being reused too early. A page of a room may be read while ``room.machine.reads`` is not
zero: gathers, checksums and direct writes each count from before they begin until they cannot read any more. A slot may
be read while it has a pin, and is written while it is filling: see :mod:`.slots`. A ticket that has *ended* may still
read (a write that timed out). Only a ticket that is *quiet* gives its pin back.

One gather serves all destinations of a segment that have their grants by then, and equal parts are gathered once.
Checksums are taken of the pages, not of the slot: a wrong gather must not vouch for itself.

Where kernels and transport wait for events by themselves, gather and write are queued at once, behind the event after
which the rows are final, and this thread only asks later whether they have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from attrs import define, field, frozen

from ...errors import PeerLostError
from ...ids import Epoch, RegionId, Ticket, peer_name
from ...kernels import Kernels, Move, SupportsStreams
from ...memory import Buffer, Event, MemoryPool
from ...planning import StagedLayout, Writes
from ...protocol import Quiet, RoomKey, Transfer, Verify, WriteFailed, Wrote, verified
from ...protocol.machine import ours
from ...strategies import Tables
from ...trace import Span
from ...transports import Settled, WriteEnded
from ..runtime.budget import Budget
from ..runtime.checksums import PendingChecksums, layer_sums
from ..runtime.event_loop import EventLoop
from ..runtime.peer_registry import HeldMemory
from .prepared import Planned, PreparedGathers, SlotLayout
from .room import PrefillRoom
from .routes import Route, Router
from .slots import Slot, StagingSlots
from .throughput import ThroughputEstimator
from .waiting import PendingTransfers


@frozen
class Moved:
    """How a transfer of a room to one destination went."""

    room: PrefillRoom
    to: Epoch
    event: Wrote | WriteFailed | Quiet


@frozen
class Unread:
    """No page of the room is read any more, for now."""

    room: PrefillRoom


@frozen
class Broken:
    """The event after which rows of the room are final raised: whether they are final is unknown."""

    room: PrefillRoom
    error: Exception


Happened = Moved | Unread | Broken


@frozen
class TransferSpec:
    """A transfer that has begun.

    Args:
        transfer: from which segment, to whom.
        plan: writes into exposed pages (regions named), or what to gather.
        tables: the room's pages.
        after: when they are final; None: now.
        route: how the bytes get there.
        summed: the part whose checksums go with it; None: none do.
    """

    transfer: Transfer
    plan: Writes | StagedLayout
    tables: Tables
    after: Event | None
    route: Route
    summed: StagedLayout | None


@define(eq=False)
class _Post:
    """What was posted for one transfer, as one: it ends when all its tickets have ended.

    Its outcome is known when its checksums are there too (``summing`` False); until then it is ``held``.
    """

    room: PrefillRoom
    transfer: Transfer
    slot: Slot[_Post] | None
    began: float
    posted: bool = False
    crossing: bool = False
    tickets: set[Ticket] = field(factory=set)
    unquiet: set[Ticket] = field(factory=set)
    error: Exception | None = None
    sums: bytes | None = None
    summing: bool = False
    held: bool = False


@define(eq=False)
class _Summing:
    """Checksums under way, and which of them are whose; ``event`` None: they are there."""

    event: Event | None
    room: PrefillRoom
    posts: list[tuple[_Post, int]]
    sums: PendingChecksums[int]


@define(eq=False)
class _Gathering:
    """A gather that may be under way; where its writes wait for it by themselves, they are posted already."""

    event: Event
    room: PrefillRoom
    slot: Slot[_Post]
    posts: list[tuple[_Post, Writes]]
    posted: bool


class TransferQueue:
    """Transfers in, writes out. Runs on the endpoint's thread only.

    Args:
        loop: the endpoint's: its transport, peers, clock and observer.
        pool: the rank's cache.
        kernels: gather and sum.
        staging, region: the buffer that is cut into slots, as it is registered.
        slot_bytes: size of a slot.
        router: plans a transfer.
        throughput: told how fast transfers are.
        verify: how many segments this side wants compared.
    """

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        kernels: Kernels,
        staging: Buffer,
        region: RegionId,
        slot_bytes: int,
        router: Router,
        throughput: ThroughputEstimator,
        verify: Verify,
    ) -> None:
        transport = loop.me.transport
        self._loop = loop
        self._pool = pool
        self._kernels = kernels
        self._streams = kernels if isinstance(kernels, SupportsStreams) else None
        self._transport = transport
        self._max_batch = transport.caps.max_batch
        self._posts_wait = transport.caps.waits_events
        self._staging = staging
        self._region = region
        self._router = router
        self._throughput = throughput
        self._verify: Verify = verify
        self._clock = loop.clock
        self._slots = StagingSlots[_Post](staging.nbytes, slot_bytes)
        self._of_room: dict[PrefillRoom, dict[_Post, None]] = {}
        self._queue = PendingTransfers[PrefillRoom]()
        self._gathering: list[_Gathering] = []
        self._summing: list[_Summing] = []
        self._posts: dict[Ticket, _Post] = {}
        self._looked = loop.clock()
        self._happened: deque[Happened] = deque()
        self._waiting = False
        self.prepared = PreparedGathers(loop, pool, kernels, staging, slot_bytes, router.plan)

    @property
    def quota(self) -> int:
        """Slots that one destination may pin."""
        return self._slots.quota

    @property
    def pinned_slots(self) -> int:
        """Slots that cannot be reused yet."""
        return self._slots.held

    def slots_of(self, rooms: Collection[RoomKey], to: Epoch | None = None) -> int:
        """Slots that writes of these rooms, to one destination or all, may still read; slots are few, writes many."""
        if not rooms:
            return 0
        posts = {
            post.slot: None for post in self._pinning() if post.room.key in rooms and to in (None, post.transfer.to)
        }
        return len(posts)

    def _pinning(self) -> list[_Post]:
        return [post for posts in self._of_room.values() for post in posts if post.slot is not None]

    def owed(self, room: PrefillRoom) -> dict[Epoch, HeldMemory]:
        """What writes of a room may still read, per destination: whole slots, and pages."""
        held: dict[Epoch, HeldMemory] = {}
        for post in self._of_room.get(room, ()):
            so_far = held.get(post.transfer.to, HeldMemory())
            slot, page = (0, post.transfer.nbytes) if post.slot is None else (self._slots.slot_bytes, 0)
            held[post.transfer.to] = HeldMemory(0, so_far.page_bytes + page, so_far.slot_bytes + slot)
        return held

    def crossing(self) -> list[Epoch]:
        """To whom bytes are on the wire, whose came first first."""
        return list(dict.fromkeys(post.transfer.to for post in self._posts.values() if post.crossing and post.tickets))

    def outcome(self) -> Happened | None:
        """The oldest outcome that was not taken yet; None: all were."""
        return self._happened.popleft() if self._happened else None

    @property
    def active(self) -> bool:
        """Whether there is anything to do, to prepare or to take."""
        return bool(self._queue or self._posts or self._gathering or self._summing or self._happened) or bool(
            self.prepared.gathers.waiting
        )

    @property
    def pending(self) -> bool:
        """Whether a transfer has not begun."""
        return bool(self._queue)

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """Order a transfer; one that is pending already is replaced."""
        self._queue.add(room, transfer)

    def forget(self, room: PrefillRoom) -> None:
        """Drop what is pending for a room that has ended."""
        self._queue.forget(room)
        self.prepared.forget(room)

    def look(self) -> None:
        """Go on with gathers and checksums that have ended since the last look."""
        for one in list(self._gathering):
            self._look(one)
        for summing in list(self._summing):
            self._look_at_sums(summing)
        self._looked = self._clock()

    def start(self, budget: Budget) -> bool:
        """Begin what can begin, but one gather at most; True: another gather may be able to begin."""
        self._waiting = self._begin_direct(budget)
        slot = self._slots.reusable() if self._queue else None
        found = None if slot is None else self._queue.first(self._full)
        if slot is None or found is None or not budget.take():
            self._looked = self._clock()
            return False
        self._staged(*found, slot)
        return True

    @property
    def waits(self) -> bool:
        """Whether something is under way, or waits for an event, of which nothing else tells this thread."""
        return bool(self._gathering or self._posts or self._summing) or self._waiting

    def _begin_direct(self, budget: Budget) -> bool:
        """Post what goes straight to pages; True while something waits for an event that nothing else tells of.

        Of a room and a destination only the first is asked for: rows are final in order.
        """
        waiting = False
        for room, to in self._queue.lines():
            for transfer in self._queue.direct(room, to):
                try:
                    after = None if self._posts_wait else room.ready_events.before(transfer.segment)
                    waits = after is not None and not after.query()
                except Exception as exc:
                    self._queue.remove(room, to, transfer.segment)
                    self._happened.append(Broken(room, exc))
                    continue
                waiting |= waits
                if waits or not budget.take():
                    break
                self._queue.remove(room, to, transfer.segment)
                self._direct(room, transfer)
        return waiting

    def orders(self, event: Event) -> bool:
        """Whether gathers put themselves behind an event, so that no thread needs to look at it."""
        try:
            return self._streams is not None and self._streams.orders(event)
        except Exception:
            return False  # it raises when the endpoint asks it, too, and its rooms fail with the reason

    def _begin(self, room: PrefillRoom, transfer: Transfer, planned: Planned | None) -> TransferSpec | None:
        """From now on a transfer reads and writes. None: it has become void, or it cannot be planned."""
        if not room.machine.flows[transfer.to].begin(transfer):
            return None
        after = room.ready_events.before(transfer.segment)
        self._throughput.began((room.key, transfer.to, transfer.segment), queued=after is not None)
        route = room.routes[transfer.to]
        tables = room.machine.rows.chunk(transfer.segment).tables
        assert tables is not None
        if planned is not None and planned.tables is not tables:
            planned = None
        started = self._clock() - (0.0 if planned is None else planned.seconds)
        try:
            plan = self._router.plan(route, transfer, tables) if planned is None else planned.plan
            compared = verified(room.key.room, transfer.segment, self._verify, route.verify)
            summed = route.pair.source_view.layout(transfer.segment) if compared else None
        except Exception as exc:
            error = ours(exc, f"room {room.key.room.hex()} towards {self._loop.peer_registry.name(transfer.to)}")
            self._moved(room, transfer.to, WriteFailed(transfer.segment, error, True))
            return None
        took = self._clock() - started
        room.handle.report.spend("plan", took)
        self._throughput.planned(took)
        return TransferSpec(transfer, plan, tables, after, route, summed)

    def _moved(self, room: PrefillRoom, to: Epoch, event: Wrote | WriteFailed | Quiet) -> None:
        if not isinstance(event, Quiet):
            nbytes = 0
            if isinstance(event, Wrote):
                nbytes = room.routes[to].intake.part_bytes(event.segment, self._loop.me.rank)
            self._throughput.ended((room.key, to, event.segment), nbytes)
        self._happened.append(Moved(room, to, event))

    def _reading(self, room: PrefillRoom, by: int) -> None:
        """Count reads of the room's pages that begin (``by`` is positive) or end."""
        room.machine.reads += by
        if not room.machine.reads:
            self._happened.append(Unread(room))

    # Straight from pages to pages.

    def _direct(self, room: PrefillRoom, transfer: Transfer) -> None:
        spec = self._begin(room, transfer, None)
        if spec is None:
            return
        assert isinstance(spec.plan, Writes)
        self._reading(room, 1)
        after = spec.after if self._posts_wait else None
        post = self._new_post(room, transfer, None)
        try:
            self._sum([(post, spec, 0)])
        except Exception as exc:
            post.error = exc
            self._end(post)
            return
        self._post(post, spec.plan, after)

    # Through a slot.

    def _staged(self, room: PrefillRoom, first: Transfer, slot: Slot[_Post]) -> None:
        """One gather for all destinations of the same segment that are granted by now and fit the slot."""
        # Counted before anything begins: one destination's failure must not release what is gathered for the others.
        self._reading(room, 1)
        begun = False
        try:
            specs = self._specs(room, first)
            begun = bool(specs)
            if begun:
                self._gather(room, slot, specs)
        finally:
            if not begun:
                self._reading(room, -1)
            # What was not launched was prepared for another gather.
            self.prepared.gathers.drop((room, first.segment))

    def _specs(self, room: PrefillRoom, first: Transfer) -> list[tuple[TransferSpec, int]]:
        """Begin what one gather can carry, each with its place in the slot."""
        specs: list[tuple[TransferSpec, int]] = []
        places = SlotLayout()
        for transfer in self.prepared.order(room, self._queue.same(room, first.segment)):
            share = room.routes[transfer.to].pair.source_view
            if self._full(transfer.to) or not places.room_for(share, transfer.nbytes, self._slots.slot_bytes):
                continue
            self._queue.remove(room, transfer.to, transfer.segment)
            planned = self.prepared.take(room, transfer)
            spec = self._begin(room, transfer, planned)
            if planned is not None and (spec is None or spec.tables is not planned.tables):
                # Its pages were taken away meanwhile, or it has become void.
                self.prepared.gathers.drop((room, transfer.segment))
            if spec is not None:
                specs.append((spec, places.add(share, transfer.nbytes)))
        return specs

    def _full(self, to: Epoch) -> bool:
        return self._slots.full(to)

    def _gather(self, room: PrefillRoom, slot: Slot[_Post], specs: list[tuple[TransferSpec, int]]) -> None:
        """Launch the gather that was prepared for exactly these transfers, or gather them without."""
        moves: dict[int, Move] = {}
        posts: list[tuple[_Post, Writes]] = []
        summed: list[tuple[_Post, TransferSpec, int]] = []
        after = specs[0][0].after
        for spec, place in specs:
            transfer = spec.transfer
            assert isinstance(spec.plan, StagedLayout)
            assert transfer.offset is not None
            post = self._new_post(room, transfer, slot)
            where = slot.offset + place
            moves.setdefault(place, Move(spec.plan, spec.tables, where))
            posts.append((post, Writes.one(self._region, where, spec.route.ring, transfer.offset, spec.plan.nbytes)))
            summed.append((post, spec, place))
        try:
            # First: once a gather is under way its slot is not free before it has ended.
            self._sum(summed)
            started = self._clock()
            members = [(spec.transfer, place) for spec, place in specs]
            prepared = self.prepared.gathers.take((room, specs[0][0].transfer.segment), members)
            if prepared is not None:
                event = prepared.launch(slot.offset, after)
            else:
                event = self._kernels.gather(self._pool, list(moves.values()), self._staging, after)
        except Exception as exc:
            self._not_gathered(room, posts, exc)
            return
        room.handle.report.spend("gather", self._clock() - started)
        if event is None:
            self._gathered(room, posts)
            return
        slot.filling = True
        self._gathering.append(_Gathering(event, room, slot, posts, self._posts_wait))
        if self._posts_wait:
            for post, writes in posts:
                self._post(post, writes, event)
        self._throughput.launched(self._clock() - started)

    def _look(self, one: _Gathering) -> None:
        """Go on with a gather that has ended, well or not."""
        error: Exception | None = None
        try:
            if not one.event.query():
                return
        except Exception as exc:
            error = exc
        self._gathering.remove(one)
        one.slot.filling = False
        if one.posted:
            # Writes that waited for an event which failed say so by their tickets.
            self._reading(one.room, -1)
            for post, _ in one.posts:
                self._crosses(post, self._clock())
        elif error is not None:
            self._not_gathered(one.room, one.posts, error)
        else:
            self._gathered(one.room, one.posts)

    def _not_gathered(self, room: PrefillRoom, posts: list[tuple[_Post, Writes]], error: Exception) -> None:
        self._reading(room, -1)
        for post, _ in posts:
            post.error = error
            self._end(post)

    def _gathered(self, room: PrefillRoom, posts: list[tuple[_Post, Writes]]) -> None:
        self._reading(room, -1)
        for post, writes in posts:
            self._post(post, writes, None)

    # Checksums.

    def _sum(self, begun: Sequence[tuple[_Post, TransferSpec, int]]) -> None:
        """Begin to sum the parts that want it, each once however many destinations it has."""
        layouts = {place: spec.summed for _, spec, place in begun if spec.summed is not None}
        if not layouts:
            return
        post, spec, _ = begun[0]
        started = self._clock()
        sums = layer_sums(self._kernels, self._pool, post.transfer.segment, layouts, spec.tables, spec.after)
        post.room.handle.report.spend("checksum", self._clock() - started)
        self._reading(post.room, 1)
        posts = [(post, place) for post, spec, place in begun if spec.summed is not None]
        for post, _ in posts:
            post.summing = True
        self._summing.append(_Summing(sums.event, post.room, posts, sums))
        self._look_at_sums(self._summing[-1])

    def _look_at_sums(self, one: _Summing) -> None:
        """Give the posts their sums, and end those that were held for them."""
        error: Exception | None = None
        try:
            if one.event is not None and not one.event.query():
                return
        except Exception as exc:
            error = exc
        self._summing.remove(one)
        found: Mapping[int, bytes] = {}
        try:
            if error is None:
                found = one.sums.read()
        except Exception as exc:
            error = exc
        for post, place in one.posts:
            post.summing, post.sums, post.error = False, found.get(place), post.error or error
            if post.held:
                self._outcome(post)
        self._reading(one.room, -1)

    # Posting and ending.

    def _new_post(self, room: PrefillRoom, transfer: Transfer, slot: Slot[_Post] | None) -> _Post:
        post = _Post(room, transfer, slot, self._clock())
        self._of_room.setdefault(room, {})[post] = None
        if slot is not None:
            self._slots.pin(slot, post, transfer.to)
        return post

    def _post(self, post: _Post, writes: Writes, after: Event | None) -> None:
        started = self._clock()
        post.posted = True
        if after is None or post.slot is None:
            self._crosses(post, started)
        try:
            for batch in writes.batches(self._max_batch):
                # Asked for each: nothing may begin to read or write once a peer's end was seen.
                ticket = self._transport.submit(self._loop.reach(post.transfer.to), batch, after=after)
                post.tickets.add(ticket)
                self._posts[ticket] = post
        except Exception as exc:
            # A transport may be somebody else's code. It raises before it has a ticket: nothing of this batch moves.
            post.error = exc
        report = post.room.handle.report
        report.descriptors += len(writes)
        report.spend("post", self._clock() - started)
        if not post.tickets:
            self._end(post)

    def _crosses(self, post: _Post, at: float) -> None:
        """The first time: its bytes are on the wire since ``at``, as far as anybody here can see."""
        if post.crossing or not post.posted:
            return
        if post.slot is not None:
            self._span("gather", post, at)
        post.crossing, post.began = True, at
        post.room.handle.report.write_begins(at)
        self._throughput.crossing((post.room.key, post.transfer.to, post.transfer.segment), at)

    def _span(self, name: str, post: _Post, stop: float) -> None:
        """A piece of a transfer's work is over."""
        if self._loop.traced:
            transfer = post.transfer
            labels = {**transfer.segment.labels(), "peer": transfer.to.hex()}
            room = post.room.key.room
            self._loop.observer.span(Span(name, room, post.began, stop, transfer.nbytes, labels=labels))

    def on_ticket(self, event: WriteEnded | Settled) -> None:
        """A write ended, or is quiet at last."""
        post = self._posts.get(event.ticket)
        if post is None:
            return
        if isinstance(event, Settled):
            self._quiet(post, event.ticket)
            return
        post.tickets.discard(event.ticket)
        post.error = post.error or event.error
        if event.quiesced:
            del self._posts[event.ticket]
        else:
            post.unquiet.add(event.ticket)
        if not post.tickets:
            self._end(post)

    def _end(self, post: _Post) -> None:
        """All tickets have ended, well or not, quiet or not."""
        if post.posted:
            # The gather before it ended since the last look, too.
            self._crosses(post, max(post.began, self._looked))
            ended = self._clock()
            post.room.handle.report.write_ends(ended)
            self._span("wire", post, ended)
        if not post.unquiet:
            self._unpin(post)
        if post.summing and post.error is None:
            post.held = True
        else:
            self._outcome(post)

    def _outcome(self, post: _Post) -> None:
        transfer = post.transfer
        if post.error is None:
            post.room.handle.report.nbytes += transfer.nbytes
            self._moved(post.room, transfer.to, Wrote(transfer.segment, post.sums))
        else:
            self._moved(post.room, transfer.to, WriteFailed(transfer.segment, post.error, not post.unquiet))

    def _quiet(self, post: _Post, ticket: Ticket) -> None:
        del self._posts[ticket]
        post.unquiet.discard(ticket)
        if not post.unquiet and not post.tickets:
            self._unpin(post)
            self._moved(post.room, post.transfer.to, Quiet(post.transfer.segment))

    def _unpin(self, post: _Post) -> None:
        posts = self._of_room[post.room]
        del posts[post]
        if not posts:
            del self._of_room[post.room]
        if post.slot is not None:
            self._slots.unpin(post.slot, post)
        else:
            self._reading(post.room, -1)

    def gone(self, epoch: Epoch) -> None:
        """A destination's process has ended and nothing moves between us any more: its tickets are quiet."""
        for ticket, post in [(t, p) for t, p in self._posts.items() if p.transfer.to == epoch]:
            if ticket in post.unquiet:
                self._quiet(post, ticket)
            else:
                self.on_ticket(WriteEnded(ticket, PeerLostError(f"peer {peer_name(epoch)} is gone")))

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        self._slots.check_integrity()
        if not self._of_room and not self._posts and not self._gathering:
            assert not self._slots.held
            return
        pinned = {pin for slot in self._slots for pin in slot.pins}
        assert pinned == set(self._pinning()), pinned
        live = {post for post in self._posts.values() if post.slot is not None}
        live |= {post for one in self._gathering if not one.posted for post, _ in one.posts}
        assert pinned == live, (pinned, live)
        filling = {one.slot for one in self._gathering}
        assert filling == {slot for slot in self._slots if slot.filling}, filling
