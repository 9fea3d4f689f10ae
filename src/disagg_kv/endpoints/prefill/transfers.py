"""Prefill's data path: gather into slots, post writes, and know when source memory is quiet again.

Theory of operation
===================

A transfer moves our part of one segment to one decode rank. It is ordered (:meth:`TransferQueue.add`) once its rows are
final, or will be at an event that a GPU waits for, and once it has its place at the destination.

::

    add -> pending -> gather into a slot -> post -> tickets end -> outcome       (staged)
    add -> pending ----------------------> post -> tickets end -> outcome       (straight from page to page)
    add -> pending -> copy into the peer's mapped pages --------> outcome       (mapped)

Calls go one way. The endpoint's side calls ``look`` and ``start`` in each step of its loop, and ``writes.on_ticket``
for each report of the transport. None of them calls the side. What the side has to know waits until it takes it
(``writes.outcome``): how a transfer went, that no page of a room is read any more, that an event of a room raised.

``start`` begins at most one gather. So a transport that copies inside ``submit`` has reported the end of the last
write, and has its slot back, before the next gather looks for one.

``room.machine.reads`` protects pages of a room: gathers, checksums, copies and direct writes each count from before
they begin until they cannot read any more. Pins and ``filling`` protect a slot, see :mod:`.slots`: a write that may
read it holds a pin, and the gather that writes it sets ``filling``. :mod:`.writes` has the tickets, and says when a
write reads no more.

One gather serves all destinations of a segment that have their grants, and equal parts are gathered once. One copy
into mapped pages serves all destinations of a segment; on a GPU, all segments of a room that are ready.
Checksums cover the pages, not the slot, so they detect a wrong gather.

Where kernels and transport wait for events by themselves, gather and write are queued at once, behind the event after
which the rows are final, and this thread only asks later whether they have ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from attrs import define, frozen

from ...core import Transfer, Verify, WriteFailed, verified
from ...core.room.machine import ours
from ...ids import Epoch, RegionId, room_name
from ...kernels import Kernels, Move, PageMove, Pages, SupportsStreams
from ...memory import Buffer, Event, parts
from ...planning import PageCopy, StagedLayout, Writes
from ...strategies import Tables
from ..checksums import PendingChecksums, layer_sums
from ..loop.budget import Budget
from ..loop.event_loop import EventLoop
from .copies import PageCopies
from .inspection import TransferInspection
from .prepared import Planned, PreparedGathers, SlotLayout
from .room import PrefillRoom
from .routes import Plan, Route, Router
from .slots import Slot, StagingSlots
from .throughput import ThroughputEstimator
from .waiting import PendingTransfers
from .writes import Post, PostedWrites


@frozen
class TransferSpec:
    """A transfer that has begun.

    Args:
        transfer: from which segment, to whom.
        plan: writes into exposed pages (regions named), what to gather, or what to copy.
        tables: the room's pages.
        after: when they are final; None: now.
        route: how the bytes get there.
        summed: the part whose checksums go with it; None: none do.
    """

    transfer: Transfer
    plan: Plan
    tables: Tables
    after: Event | None
    route: Route
    summed: StagedLayout | None


@define(eq=False)
class _Summing:
    """Checksums that are being computed, and the posts that they belong to; ``event`` None: they are there."""

    event: Event | None
    room: PrefillRoom
    posts: list[tuple[Post, int]]
    sums: PendingChecksums[int]


@define(eq=False)
class _Gathering:
    """A gather that may still run.

    Args:
        posted: of the destinations whose writes wait for the gather by themselves.
        waiting: of the others, which are posted once it has ended.
    """

    event: Event
    room: PrefillRoom
    slot: Slot[Post]
    posted: list[Post]
    waiting: list[tuple[Post, Writes]]


class TransferQueue:
    """Transfers in, writes out. Runs on the thread that advances.

    Args:
        loop: the endpoint's: its transport, peers, clock and observer.
        kernels: gather and sum.
        staging, region: the buffer that is cut into slots, as it is registered.
        slot_bytes: size of a slot.
        router: plans a transfer.
        throughput: measures how fast transfers are.
        verify: how many segments this side wants compared.
    """

    def __init__(
        self,
        loop: EventLoop,
        kernels: Kernels,
        staging: Buffer,
        region: RegionId,
        slot_bytes: int,
        router: Router,
        throughput: ThroughputEstimator,
        verify: Verify,
    ) -> None:
        self._loop = loop
        self._kernels = kernels
        self._streams = kernels if isinstance(kernels, SupportsStreams) else None
        self.queues = self._streams is not None
        self._staging = staging
        self._region = region
        self._router = router
        self._throughput = throughput
        self._verify: Verify = verify
        self._clock = loop.clock
        self._slots = StagingSlots[Post](staging.nbytes, slot_bytes)
        self.writes = PostedWrites(loop, self._slots, throughput)
        self._copies = PageCopies(kernels, self.writes, loop.clock)
        self._queue = PendingTransfers[PrefillRoom]()
        self._gathering: list[_Gathering] = []
        self._summing: list[_Summing] = []
        self._waiting = False
        self.prepared = PreparedGathers(loop, kernels, staging, slot_bytes, router.plan)

    @property
    def quota(self) -> int:
        """Slots that one destination may pin."""
        return self._slots.quota

    @property
    def pinned_slots(self) -> int:
        """Slots that cannot be reused yet."""
        return self._slots.held

    @property
    def active(self) -> bool:
        """Whether there is anything to do, to prepare or to take."""
        writes, prepared, moving = self.writes, self.prepared.gathers, self._gathering or self._copies.running
        return bool(self._queue or writes.posts or moving or self._summing or writes.outcomes or prepared.waiting)

    @property
    def pending(self) -> bool:
        """Whether a transfer has not begun."""
        return bool(self._queue)

    def inspect(self) -> TransferInspection:
        """See :mod:`~disagg_kv.endpoints.loop.inspection`."""
        writes, copies = self.writes.posts, self._copies
        return TransferInspection(self._queue, self._gathering, copies, writes, self._slots, self.prepared)

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """Order a transfer; one that is pending already is replaced."""
        self._queue.add(room, transfer)

    def granted(self, room: PrefillRoom, transfer: Transfer) -> None:
        """A transfer has its place, and not its rows: prepare it; one that is prepared already is replaced."""
        self.prepared.add(room, transfer)

    def unprepare(self, room: PrefillRoom) -> None:
        """Drop what is prepared for pages that are taken away, or for a room that has failed or ended."""
        self.prepared.forget(room)

    def forget(self, room: PrefillRoom) -> None:
        """Drop what is pending for a room that has ended."""
        self._queue.forget(room)
        self.unprepare(room)

    def look(self) -> None:
        """Go on with gathers, copies and checksums that have ended since the last look."""
        for one in list(self._gathering):
            self._look(one)
        self._copies.look()
        for summing in list(self._summing):
            self._look_at_sums(summing)
        self.writes.looked = self._clock()

    def look_at_failed(self) -> None:
        """Take in copies that failed, and are proved to have ended."""
        if self._copies.failed:
            self._copies.look_at_failed()

    def start(self, budget: Budget) -> bool:
        """Begin what can begin, but one gather at most; True: another gather may be able to begin."""
        self._begin_copies(budget)
        self._waiting = self._begin_direct(budget)
        slot = self._slots.reusable() if self._queue else None
        found = None if slot is None else self._queue.first(self._full)
        if slot is None or found is None or not budget.take():
            self.writes.looked = self._clock()
            return False
        self._staged(*found, slot)
        return True

    @property
    def waits(self) -> bool:
        """Whether something is in flight, or waits for an event, that only polling finds."""
        moving = self._gathering or self._copies.running or self.writes.posts or self._summing
        return bool(moving) or self._waiting

    def _begin_direct(self, budget: Budget) -> bool:
        """Post what goes straight to pages; True while something waits for an event that only polling finds.

        Of a room and a destination only the first transfer is considered: rows become final in order.
        """
        waiting = False
        for room, to in self._queue.lines():
            if room.routes[to].mapped is not None:
                continue
            for transfer in self._queue.direct(room, to):
                try:
                    posts_wait = room.routes[to].lane.caps.waits_events
                    after = None if posts_wait else room.ready_events.before(transfer.segment)
                    waits = after is not None and not after.query()
                except Exception as exc:
                    self._queue.remove(room, to, transfer.segment)
                    self.writes.broken(room, exc)
                    continue
                waiting |= waits
                if waits or not budget.take():
                    break
                self._queue.remove(room, to, transfer.segment)
                self._direct(room, transfer)
        return waiting

    def orders(self, event: Event) -> bool:
        """Whether gathers wait for an event by themselves, so that no thread polls it."""
        try:
            return self._streams is not None and self._streams.orders(event)
        except Exception:
            return False  # it raises again when the endpoint asks it: then its rooms fail with the reason

    def _begin(self, room: PrefillRoom, transfer: Transfer, planned: Planned | None) -> TransferSpec | None:
        """Begin a transfer: it reads and writes from now on. None: it is void, or it cannot be planned."""
        if not room.machine.flows[transfer.to].begin(transfer):
            return None
        after = room.ready_events.before(transfer.segment)
        route = room.routes[transfer.to]
        name = room.key, transfer.to, transfer.segment
        self._throughput.began(name, route.lane.name, queued=after is not None)
        tables = room.machine.rows.chunk(transfer.segment).tables
        assert tables is not None
        if planned is not None and planned.tables is not tables:
            planned = None
        started = self._clock() - (0.0 if planned is None else planned.seconds)
        try:
            plan = self._router.plan(route, transfer, tables) if planned is None else planned.plan
            compared = verified(room.key.room, transfer.segment, self._verify, route.verify)
            summed = route.view.layout(transfer.segment) if compared else None
        except Exception as exc:
            error = ours(exc, f"{room_name(room.key.room)} towards {self._loop.peer_registry.name(transfer.to)}")
            self.writes.moved(room, transfer.to, WriteFailed(transfer.segment, error, True))
            return None
        took = self._clock() - started
        room.handle.report.spend("plan", took)
        self._throughput.planned(took)
        return TransferSpec(transfer, plan, tables, after, route, summed)

    # Straight from pages to pages.

    def _direct(self, room: PrefillRoom, transfer: Transfer) -> None:
        spec = self._begin(room, transfer, None)
        if spec is None:
            return
        assert isinstance(spec.plan, Writes)
        self.writes.reading(room, 1)
        after = spec.after if spec.route.lane.caps.waits_events else None
        post = self.writes.begin(room, transfer, None)
        try:
            self._sum([(post, spec, 0)])
        except Exception as exc:
            post.error = exc
            self.writes.end(post)
            return
        self.writes.post(post, spec.plan, after)

    # From pages into mapped pages.

    def _begin_copies(self, budget: Budget) -> None:
        """Copy what is pending for mapped pages.

        Copies wait for events by themselves: rows whose event does not wait on a device are not final before it. On a
        device, transfers of a room that wait for the same events share a launch. On a CPU a launch blocks, so that it
        has one segment for all its destinations.
        """
        together: dict[tuple[PrefillRoom, Hashable], list[Transfer]] = {}
        for room, to in self._queue.lines():
            if room.routes[to].mapped is None:
                continue
            for transfer in self._queue.line(room, to):
                what: Hashable = transfer.segment
                if self._streams is not None:
                    what = frozenset(map(id, parts(room.ready_events.before(transfer.segment))))
                together.setdefault((room, what), []).append(transfer)
        for (room, _), transfers in together.items():
            if not budget.take():
                return
            self._copy(room, transfers)

    def _copy(self, room: PrefillRoom, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._queue.remove(room, transfer.to, transfer.segment)
        begun = self._begin_moves(room, transfers)
        if begun:
            self._copies.launch([one for one, _ in begun], begun[-1][1])

    def _begin_moves(
        self, room: PrefillRoom, transfers: Sequence[Transfer]
    ) -> list[tuple[tuple[Post, PageMove], Event | None]]:
        """Begin transfers that one launch carries; each with what it comes after."""
        begun: list[tuple[tuple[Post, PageMove], Event | None]] = []
        for transfer in transfers:
            spec = self._begin(room, transfer, None)
            if spec is None:
                continue
            assert isinstance(spec.plan, PageCopy)
            assert spec.route.mapped is not None
            self.writes.reading(room, 1)
            post = self.writes.begin(room, transfer, None)
            try:
                # Nothing may begin to write once a peer's end was seen.
                self._loop.reach(transfer.to)
                self._sum([(post, spec, 0)])
            except Exception as exc:
                post.error = exc
                self.writes.end(post)
                continue
            if spec.summed is None:
                device = spec.route.mapped.buffers[0].device
                post.flag = room.arm_flag(transfer, device, self._loop.observer)
            target = Pages(spec.route.mapped, spec.route.tables)
            begun.append(((post, PageMove(spec.plan, Pages(spec.route.pool, spec.tables), target)), spec.after))
        return begun

    # Through a slot.

    def _staged(self, room: PrefillRoom, first: Transfer, slot: Slot[Post]) -> None:
        """Gather once for all destinations of a segment that have their grants and fit the slot."""
        # Counted before anything begins: one destination's failure must not release what is gathered for the others.
        self.writes.reading(room, 1)
        begun = False
        try:
            specs = self._specs(room, first)
            begun = bool(specs)
            if begun:
                self._gather(room, slot, specs)
        finally:
            if not begun:
                self.writes.reading(room, -1)
            # What was not launched was prepared for another gather.
            self.prepared.gathers.drop((room, first.segment))

    def _specs(self, room: PrefillRoom, first: Transfer) -> list[tuple[TransferSpec, int]]:
        """Begin what one gather can carry, each with its place in the slot."""
        specs: list[tuple[TransferSpec, int]] = []
        places, pool = SlotLayout(), room.routes[first.to].pool
        for transfer in self.prepared.order(room, self._queue.same(room, first.segment)):
            share = room.routes[transfer.to].view
            if room.routes[transfer.to].pool is not pool:
                continue
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

    def _gather(self, room: PrefillRoom, slot: Slot[Post], specs: list[tuple[TransferSpec, int]]) -> None:
        """Launch the gather that was prepared for exactly these transfers, or gather them without."""
        moves: dict[int, Move] = {}
        posts: list[tuple[Post, Writes]] = []
        summed: list[tuple[Post, TransferSpec, int]] = []
        after = specs[0][0].after
        for spec, place in specs:
            transfer = spec.transfer
            assert isinstance(spec.plan, StagedLayout)
            assert transfer.offset is not None
            post = self.writes.begin(room, transfer, slot)
            where = slot.offset + place
            moves.setdefault(place, Move(spec.plan, spec.tables, where))
            posts.append((post, Writes.one(self._region, where, spec.route.ring, transfer.offset, spec.plan.nbytes)))
            summed.append((post, spec, place))
        try:
            # First: once a gather is launched its slot is not free before it has ended.
            self._sum(summed)
            started = self._clock()
            members = [(spec.transfer, place) for spec, place in specs]
            prepared = self.prepared.gathers.take((room, specs[0][0].transfer.segment), members)
            if prepared is not None:
                event = prepared.launch(slot.offset, after)
            else:
                event = self._kernels.gather(specs[0][0].route.pool, list(moves.values()), self._staging, after)
        except Exception as exc:
            self._not_gathered(room, posts, exc)
            return
        room.handle.report.spend("gather", self._clock() - started)
        if event is None:
            self._gathered(room, posts)
            return
        slot.filling = True
        queued: list[tuple[Post, Writes]] = []
        waiting: list[tuple[Post, Writes]] = []
        for one, (spec, _) in zip(posts, specs, strict=True):
            (queued if spec.route.lane.caps.waits_events else waiting).append(one)
        self._gathering.append(_Gathering(event, room, slot, [post for post, _ in queued], waiting))
        for post, writes in queued:
            self.writes.post(post, writes, event)
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
        for post in one.posted:
            # Writes that waited for an event which failed say so by their tickets.
            self.writes.crosses(post, self._clock())
        if error is not None:
            self._not_gathered(one.room, one.waiting, error)
        else:
            self._gathered(one.room, one.waiting)

    def _not_gathered(self, room: PrefillRoom, posts: list[tuple[Post, Writes]], error: Exception) -> None:
        self.writes.reading(room, -1)
        for post, _ in posts:
            post.error = error
            self.writes.end(post)

    def _gathered(self, room: PrefillRoom, posts: list[tuple[Post, Writes]]) -> None:
        self.writes.reading(room, -1)
        for post, writes in posts:
            self.writes.post(post, writes, None)

    # Checksums.

    def _sum(self, begun: Sequence[tuple[Post, TransferSpec, int]]) -> None:
        """Begin to sum the parts that want it, each once however many destinations it has."""
        layouts = {place: spec.summed for _, spec, place in begun if spec.summed is not None}
        if not layouts:
            return
        post, spec, _ = begun[0]
        started = self._clock()
        sums = layer_sums(self._kernels, spec.route.pool, post.transfer.segment, layouts, spec.tables, spec.after)
        post.room.handle.report.spend("checksum", self._clock() - started)
        self.writes.reading(post.room, 1)
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
                self.writes.close(post)
        self.writes.reading(one.room, -1)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        self._slots.check_integrity()
        if not self.writes.of_room and not self.writes.posts and not self._gathering:
            assert not self._slots.held
            return
        pinned = {pin for slot in self._slots for pin in slot.pins}
        assert pinned == set(self.writes.pinning()), pinned
        live = {post for post in self.writes.posts.values() if post.slot is not None}
        live |= {post for one in self._gathering for post, _ in one.waiting}
        self._copies.check_integrity()
        assert pinned == live, (pinned, live)
        filling = {one.slot for one in self._gathering}
        assert filling == {slot for slot in self._slots if slot.filling}, filling
