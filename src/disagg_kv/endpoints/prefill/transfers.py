"""Prefill's data path: gather into slots, post, and know when source memory is quiet again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol

from attrs import define, field, frozen

from ...errors import PeerLostError
from ...geometry import PageTable
from ...ids import Epoch, GroupId, RegionId, Ticket, peer_name
from ...kernels import Kernels, Move, SupportsStreams
from ...memory import Buffer, Event, MemoryPool
from ...planning import StagedLayout, Writes
from ...protocol import Quiet, RoomKey, Transfer, WriteFailed, Wrote
from ...transports import Settled, Transport, WriteEnded
from ..api import Report
from ..runtime.budget import Budget
from ..runtime.checksums import PendingChecksums, layer_sums
from ..runtime.peer_registry import HeldMemory
from .prepared import Planned, PlannedGather, PreparedGathers, SlotLayout
from .waiting import PendingTransfers


@frozen
class TransferSpec:
    """What the mover has to know of a transfer that it begins now.

    Args:
        plan: writes into exposed pages (regions named), or what to gather.
        tables: the room's pages.
        after: when they are final.
        ring: the destination's ring.
        report: where to book the cost.
        summed: the part whose checksums go with it; None: none do.
    """

    plan: Writes | StagedLayout
    tables: Mapping[GroupId, PageTable]
    after: Event | None
    ring: RegionId
    report: Report
    summed: StagedLayout | None = None


class TransferOwner(Protocol):
    """What the mover asks of the endpoint."""

    def after(self, room: RoomKey, transfer: Transfer) -> Event | None:
        """When the transfer's rows are final, where that is left to whoever copies them; None: now."""
        ...

    def sharing(self, room: RoomKey, transfer: Transfer) -> Hashable:
        """Transfers of one segment for which this is equal carry the same bytes."""
        ...

    def plan(self, room: RoomKey, transfer: Transfer) -> Planned | None:
        """What a transfer will gather whose rows are still to come; None: that cannot be said, or it is void."""
        ...

    def begin(self, room: RoomKey, transfer: Transfer, planned: Planned | None) -> TransferSpec | None:
        """Begin a transfer: from now on it reads and writes. None: it has become void."""
        ...

    def count(self, name: str) -> None:
        """Something went wrong that fails no room."""
        ...

    def broken(self, rooms: Sequence[RoomKey], exc: Exception) -> None:
        """An event of theirs raised: the rooms fail."""
        ...

    def reading(self, room: RoomKey, by: int) -> None:
        """So many more (or fewer) reads of the room's pages are under way."""
        ...

    def moved(self, room: RoomKey, to: Epoch, event: Wrote | WriteFailed | Quiet) -> None:
        """How a transfer went."""
        ...

    def submit(self, to: Epoch, writes: Writes, after: Event | None) -> Ticket:
        """Post to a destination, behind an event only where its transport waits for events."""
        ...

    def launched(self, seconds: float) -> None:
        """It took so long to queue a gather, and writes behind it, on a GPU."""
        ...

    def crossing(self, room: RoomKey, transfer: Transfer, at: float) -> None:
        """The bytes of a transfer are on the wire since ``at``, as far as anybody here can see."""
        ...

    def span(self, name: str, room: RoomKey, transfer: Transfer, start: float, stop: float) -> None:
        """A piece of a transfer's work is over."""
        ...

    def submitted(self) -> None:
        """Take in the ends of writes: a transport that copies while it is told to has ended before the next gather."""
        ...


@define
class _Slot:
    """A staging buffer's part: free when nobody gathers into it and all its posts are quiet."""

    offset: int
    pins: dict[int, _Post] = field(factory=dict)
    filling: bool = False

    @property
    def free(self) -> bool:
        return not self.pins and not self.filling


@define(eq=False)
class _Post:
    """What was posted for one transfer, as one: it ends when all its tickets have ended.

    It is told of when its checksums are there too (``summing`` False); until then it is ``held``.
    """

    number: int
    room: RoomKey
    transfer: Transfer
    slot: _Slot | None
    report: Report
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
    room: RoomKey
    posts: list[tuple[_Post, int]]
    sums: PendingChecksums[int]


@define(eq=False)
class _Gathering:
    """A gather that may be under way; where its writes wait for it by themselves, they are posted already."""

    event: Event
    room: RoomKey
    slot: _Slot
    posts: list[tuple[_Post, Writes]]
    posted: bool


class TransferQueue:
    """Transfers in, writes out. Runs on the endpoint's thread only.

    A slot is reusable when all its posts are quiet; one destination pins at most a quarter of the slots, so a slow one
    never delays the others. Destinations granted by then are served by one gather. Events of a GPU are left
    to its streams where kernels or transport wait for them; this thread only asks whether others have happened.
    """

    def __init__(
        self,
        pool: MemoryPool,
        kernels: Kernels,
        transport: Transport,
        staging: Buffer,
        region: RegionId,
        slot_bytes: int,
        rooms: TransferOwner,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._kernels = kernels
        self._streams = kernels if isinstance(kernels, SupportsStreams) else None
        self._max_batch = transport.caps.max_batch
        self._posts_wait = transport.caps.waits_events
        self._staging = staging
        self._region = region
        self._slot_bytes = slot_bytes
        self._slots = [_Slot(at) for at in range(0, staging.nbytes - slot_bytes + 1, slot_bytes)]
        self._rooms = rooms
        self._clock = clock
        self._quota = max(1, len(self._slots) // 4)
        self._pins: Counter[Epoch] = Counter()
        self._of_room: dict[RoomKey, dict[int, _Post]] = {}
        self._queue = PendingTransfers()
        self._gathering: list[_Gathering] = []
        self._summing: list[_Summing] = []
        self._posts: dict[Ticket, _Post] = {}
        self._number = 0
        self._looked = clock()
        self.prepared = PreparedGathers(pool, kernels, staging, slot_bytes, rooms.plan, rooms.count)

    @property
    def quota(self) -> int:
        """Slots that one destination may pin."""
        return self._quota

    @property
    def pinned_slots(self) -> int:
        """Slots that cannot be reused yet."""
        return sum(not s.free for s in self._slots)

    def slots_of(self, rooms: Collection[RoomKey], to: Epoch | None = None) -> int:
        """Slots that writes of these rooms, to one destination or all, may still read; slots are few, writes many."""
        if not rooms:
            return 0
        return sum(
            any(post.room in rooms and to in (None, post.transfer.to) for post in slot.pins.values())
            for slot in self._slots
        )

    def owed(self, room: RoomKey) -> dict[Epoch, HeldMemory]:
        """What writes of a room may still read, per destination: whole slots, and pages."""
        held: dict[Epoch, HeldMemory] = {}
        for post in self._of_room.get(room, {}).values():
            so_far = held.get(post.transfer.to, HeldMemory())
            slot, page = (0, post.transfer.nbytes) if post.slot is None else (self._slot_bytes, 0)
            held[post.transfer.to] = HeldMemory(0, so_far.page_bytes + page, so_far.slot_bytes + slot)
        return held

    def crossing(self) -> list[Epoch]:
        """To whom bytes are on the wire, whose came first first."""
        return list(dict.fromkeys(post.transfer.to for post in self._posts.values() if post.crossing and post.tickets))

    def add(self, room: RoomKey, transfer: Transfer) -> None:
        """Queue a transfer; one that is queued already is replaced."""
        self._queue.add(room, transfer)

    def forget(self, room: RoomKey) -> None:
        """Drop what is queued for a room that has ended."""
        self._queue.forget(room)
        self.prepared.forget(room)

    def work(self) -> bool:
        """Start what can start, finish gathers; True while something is in flight."""
        if not (self._queue or self._gathering or self._summing):
            self._looked = self._clock()
            return bool(self._posts)
        for one in list(self._gathering):
            self._look(one)
        for summing in list(self._summing):
            self._look_at_sums(summing)
        budget = Budget(self._clock)
        waiting = self._begin_direct(budget)
        while self._queue and (slot := self._free_slot()) is not None:
            found = self._queue.first(self._full)
            if found is None or not budget.take():
                break
            self._staged(*found, slot)
        self._looked = self._clock()
        return waiting or budget.spent or bool(self._gathering or self._posts or self._summing)

    def _begin_direct(self, budget: Budget) -> bool:
        """Post what goes straight to pages; True while something waits for an event that nothing else tells of.

        Of a room and a destination only the first is asked for: rows are final in order.
        """
        waiting = False
        for room, to in self._queue.lines():
            for transfer in self._queue.direct(room, to):
                try:
                    waits = self._waits(room, transfer)
                except Exception as exc:
                    self._queue.remove(room, to, transfer.segment)
                    self._rooms.broken([room], exc)
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

    def _waits(self, room: RoomKey, transfer: Transfer) -> bool:
        """Whether one that is not gathered has to wait here for an event: its transport waits for none."""
        if self._posts_wait:
            return False
        event = self._rooms.after(room, transfer)
        return event is not None and not event.query()

    # Straight from pages to pages.

    def _direct(self, room: RoomKey, transfer: Transfer) -> None:
        load = self._rooms.begin(room, transfer, None)
        if load is None:
            return
        assert isinstance(load.plan, Writes)
        self._rooms.reading(room, 1)
        after = load.after if self._posts_wait else None
        post = self._new_post(room, transfer, None, load.report)
        try:
            self._sum([(post, load, 0)])
        except Exception as exc:
            post.error = exc
            self._end(post)
            return
        self._post(post, load.plan, after)

    # Through a slot.

    def _free_slot(self) -> _Slot | None:
        for slot in self._slots:
            if slot.free:
                return slot
        return None

    def _staged(self, room: RoomKey, first: Transfer, slot: _Slot) -> None:
        """One gather for all destinations of the same segment that are granted by now and fit the slot."""
        # Counted before anything begins: one destination's failure must not release what is gathered for the others.
        self._rooms.reading(room, 1)
        foreseen, begun = self.prepared.gather(room, first.segment), False
        try:
            loads = self._loads(room, first, foreseen)
            begun = bool(loads)
            if begun:
                self._gather(room, slot, loads, foreseen)
        finally:
            if not begun:
                self._rooms.reading(room, -1)
            # Unless it is launched by now, it was prepared for a gather that is another one now.
            self.prepared.drop(foreseen)

    def _loads(
        self, room: RoomKey, first: Transfer, foreseen: PlannedGather | None
    ) -> list[tuple[Transfer, TransferSpec, int]]:
        """Begin what one gather can carry, each with its place in the slot."""
        loads: list[tuple[Transfer, TransferSpec, int]] = []
        places = SlotLayout()
        for transfer in self._same(room, first, foreseen):
            share = self._rooms.sharing(room, transfer)
            if self._full(transfer.to) or not places.room_for(share, transfer.nbytes, self._slot_bytes):
                continue
            self._queue.remove(room, transfer.to, transfer.segment)
            planned = self.prepared.take(room, transfer)
            load = self._rooms.begin(room, transfer, planned)
            if planned is not None and (load is None or load.tables is not planned.tables):
                # Its pages were taken away meanwhile, or it has become void.
                self.prepared.drop(foreseen)
            if load is not None:
                loads.append((transfer, load, places.add(share, transfer.nbytes)))
        return loads

    def _same(self, room: RoomKey, first: Transfer, foreseen: PlannedGather | None) -> list[Transfer]:
        """Queued transfers of one segment, in the order that is prepared."""
        same = self._queue.same(room, first.segment)
        return same if foreseen is None or len(same) == 1 else sorted(same, key=foreseen.order)

    def _full(self, to: Epoch) -> bool:
        """One destination pins at most a quarter of the slots; of one gather it gets one post at most."""
        return self._pins[to] >= self._quota

    def _gather(
        self,
        room: RoomKey,
        slot: _Slot,
        loads: list[tuple[Transfer, TransferSpec, int]],
        foreseen: PlannedGather | None,
    ) -> None:
        """``foreseen`` is launched if it is a gather of exactly these, and good still."""
        moves: dict[int, Move] = {}
        posts: list[tuple[_Post, Writes]] = []
        summed: list[tuple[_Post, TransferSpec, int]] = []
        after = loads[0][1].after
        for transfer, load, place in loads:
            assert isinstance(load.plan, StagedLayout)
            assert transfer.offset is not None
            post = self._new_post(room, transfer, slot, load.report)
            where = slot.offset + place
            moves.setdefault(place, Move(load.plan, load.tables, where))
            posts.append((post, Writes.one(self._region, where, load.ring, transfer.offset, load.plan.nbytes)))
            summed.append((post, load, place))
        try:
            # First: once a gather is under way its slot is not free before it has ended.
            self._sum(summed)
            started = self._clock()
            exact = foreseen is not None and foreseen.members == [(transfer, place) for transfer, _, place in loads]
            if foreseen is not None and exact and not foreseen.over:
                event = foreseen.launch(slot.offset, after)
            else:
                event = self._kernels.gather(self._pool, list(moves.values()), self._staging, after)
        except Exception as exc:
            self._not_gathered(posts, exc)
            return
        loads[0][1].report.spend("gather", self._clock() - started)
        if event is None:
            self._gathered(room, posts)
            return
        slot.filling = True
        self._gathering.append(_Gathering(event, room, slot, posts, self._posts_wait))
        if self._posts_wait:
            for post, writes in posts:
                self._post(post, writes, event)
        self._rooms.launched(self._clock() - started)

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
            self._rooms.reading(one.room, -1)
            for post, _ in one.posts:
                self._crosses(post, self._clock())
        elif error is not None:
            self._not_gathered(one.posts, error)
        else:
            self._gathered(one.room, one.posts)

    def _not_gathered(self, posts: list[tuple[_Post, Writes]], error: Exception) -> None:
        self._rooms.reading(posts[0][0].room, -1)
        for post, _ in posts:
            post.error = error
            self._end(post)

    def _gathered(self, room: RoomKey, posts: list[tuple[_Post, Writes]]) -> None:
        self._rooms.reading(room, -1)
        for post, writes in posts:
            self._post(post, writes, None)

    # Checksums, of pages: a wrong gather must not vouch for itself.

    def _sum(self, loads: Sequence[tuple[_Post, TransferSpec, int]]) -> None:
        """Begin to sum the parts that want it, each once however many destinations it has."""
        layouts = {place: load.summed for _, load, place in loads if load.summed is not None}
        if not layouts:
            return
        post, load, _ = loads[0]
        started = self._clock()
        sums = layer_sums(self._kernels, self._pool, post.transfer.segment, layouts, load.tables, load.after)
        load.report.spend("checksum", self._clock() - started)
        self._rooms.reading(post.room, 1)
        posts = [(post, place) for post, load, place in loads if load.summed is not None]
        for post, _ in posts:
            post.summing = True
        self._summing.append(_Summing(sums.event, post.room, posts, sums))
        self._look_at_sums(self._summing[-1])

    def _look_at_sums(self, one: _Summing) -> None:
        """Give the posts their sums, and tell of those that were held for them."""
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
                self._tell(post)
        self._rooms.reading(one.room, -1)

    # Posting and ending.

    def _new_post(self, room: RoomKey, transfer: Transfer, slot: _Slot | None, report: Report) -> _Post:
        self._number += 1
        post = _Post(self._number, room, transfer, slot, report, self._clock())
        self._of_room.setdefault(room, {})[post.number] = post
        if slot is not None:
            slot.pins[self._number] = post
            self._pins[transfer.to] += 1
        return post

    def _post(self, post: _Post, writes: Writes, after: Event | None) -> None:
        started = self._clock()
        post.posted = True
        if after is None or post.slot is None:
            self._crosses(post, started)
        try:
            for batch in writes.batches(self._max_batch):
                ticket = self._rooms.submit(post.transfer.to, batch, after)
                post.tickets.add(ticket)
                self._posts[ticket] = post
        except Exception as exc:
            # A transport may be somebody else's code. It raises before it has a ticket: nothing of this batch moves.
            post.error = exc
        post.report.descriptors += len(writes)
        post.report.spend("post", self._clock() - started)
        if not post.tickets:
            self._end(post)
        else:
            self._rooms.submitted()

    def _crosses(self, post: _Post, at: float) -> None:
        """The first time: its bytes are on the wire since ``at``."""
        if post.crossing or not post.posted:
            return
        if post.slot is not None:
            self._rooms.span("gather", post.room, post.transfer, post.began, at)
        post.crossing, post.began = True, at
        post.report.write_begins(at)
        self._rooms.crossing(post.room, post.transfer, at)

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
            post.report.write_ends(ended)
            self._rooms.span("wire", post.room, post.transfer, post.began, ended)
        if not post.unquiet:
            self._unpin(post)
        if post.summing and post.error is None:
            post.held = True
        else:
            self._tell(post)

    def _tell(self, post: _Post) -> None:
        transfer = post.transfer
        if post.error is None:
            post.report.nbytes += transfer.nbytes
            self._rooms.moved(post.room, transfer.to, Wrote(transfer.segment, post.sums))
        else:
            failed = WriteFailed(transfer.segment, post.error, not post.unquiet)
            self._rooms.moved(post.room, transfer.to, failed)

    def _quiet(self, post: _Post, ticket: Ticket) -> None:
        del self._posts[ticket]
        post.unquiet.discard(ticket)
        if not post.unquiet and not post.tickets:
            self._unpin(post)
            self._rooms.moved(post.room, post.transfer.to, Quiet(post.transfer.segment))

    def _unpin(self, post: _Post) -> None:
        del self._of_room[post.room][post.number]
        if not self._of_room[post.room]:
            del self._of_room[post.room]
        if post.slot is not None:
            del post.slot.pins[post.number]
            self._pins[post.transfer.to] -= 1
            if not self._pins[post.transfer.to]:
                del self._pins[post.transfer.to]
        else:
            self._rooms.reading(post.room, -1)

    def gone(self, epoch: Epoch) -> None:
        """A destination's process has ended and nothing moves between us any more: its tickets are quiet."""
        for ticket, post in [(t, p) for t, p in self._posts.items() if p.transfer.to == epoch]:
            if ticket in post.unquiet:
                self._quiet(post, ticket)
            else:
                self.on_ticket(WriteEnded(ticket, PeerLostError(f"peer {peer_name(epoch)} is gone")))

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        held = [slot for slot in self._slots if slot.pins or slot.filling]
        if not held and not self._posts and not self._gathering:
            assert not self._pins, self._pins
            assert not self._of_room or self._summing, self._of_room
            return
        pinned = {n for slot in held for n in slot.pins}
        live = {p.number for p in self._posts.values() if p.slot is not None}
        live |= {post.number for g in self._gathering if not g.posted for post, _ in g.posts}
        assert pinned == live, (pinned, live)
        towards = Counter(to for slot in held for to in {post.transfer.to for post in slot.pins.values()})
        assert towards == self._pins, (towards, self._pins)
        filling = {g.slot.offset for g in self._gathering}
        assert filling == {s.offset for s in self._slots if s.filling}, filling
