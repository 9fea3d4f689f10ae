"""Transfers that have begun, until nothing of them reads or writes, and what the side has to know of them.

A ticket that has *ended* may still read the source (a write that timed out). Only what is *quiet* gives back what it
reads: a pin of a slot, or a read of a room's pages. :class:`Posts` releases both. Outcomes wait there until the side
takes them; they survive an exception.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from attrs import define, field, frozen

from ....core import Quiet, Transfer, WriteFailed, Wrote
from ....core.room.machine import ours
from ....errors import PeerLostError
from ....ids import Epoch, Ticket, peer_name, room_name
from ....memory import Event
from ....planning import Writes
from ....staging import ALIGNMENT
from ....strategies import Tables
from ....trace import Span
from ....transports import Settled, WriteEnded
from ...loop.event_loop import EventLoop
from ...peers.session import HeldMemory
from ..room import PrefillRoom
from ..routes import Route
from ..throughput import ThroughputEstimator

P = TypeVar("P")
"""A plan."""

K = TypeVar("K", bound=Hashable)
N = TypeVar("N", bound=Hashable)
V = TypeVar("V")

Posted = tuple[str, Ticket]
"""A ticket, and the name of its transport."""


def take_out(table: dict[K, dict[N, V]], key: K, name: N) -> V | None:
    """Take one out of an entry of a table, and the entry with the last of them; None: it is not there."""
    found = table[key].pop(name, None)
    if not table[key]:
        del table[key]
    return found


@define(eq=False)
class Slot:
    """A part of the staging buffer. A pin is a write that may still read it; the gather that fills it holds it, too."""

    offset: int
    pins: dict[Post, Epoch] = field(factory=dict)
    filling: bool = False

    @property
    def reusable(self) -> bool:
        """No gather writes to it, and no posted write may still read it."""
        return not self.pins and not self.filling


@define
class SlotLayout:
    """Where in a slot each transfer of one gather goes; those that carry the same bytes go to the same place."""

    of: dict[Hashable, int] = field(factory=dict)
    used: int = 0

    def room_for(self, share: Hashable, nbytes: int, slot_bytes: int) -> bool:
        """Whether a part fits a slot of ``slot_bytes``; the first always does."""
        return share in self.of or not self.of or self.used + nbytes <= slot_bytes

    def add(self, share: Hashable, nbytes: int) -> int:
        """The byte of the slot at which it begins."""
        if share not in self.of:
            self.of[share] = self.used
            self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self.of[share]


class StagingSlots:
    """All slots of one endpoint.

    One destination pins at most a quarter of them, so a slow one never delays the others.

    Args:
        nbytes: size of the staging buffer.
        slot_bytes: size of one slot.
    """

    def __init__(self, nbytes: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots = [Slot(at) for at in range(0, nbytes - slot_bytes + 1, slot_bytes)]
        self.quota = max(1, len(self._slots) // 4)
        self._pins: Counter[Epoch] = Counter()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def in_use(self) -> int:
        """Slots that may not be reused yet."""
        return sum(not slot.reusable for slot in self._slots)

    def reusable(self) -> Slot | None:
        """A slot that may be reused; None: there is none."""
        for slot in self._slots:
            if slot.reusable:
                return slot
        return None

    def full(self, to: Epoch) -> bool:
        """Whether a destination pins as many slots as it may."""
        return self._pins[to] >= self.quota

    def pin(self, slot: Slot, write: Post, to: Epoch) -> None:
        """A write to a destination will read this slot."""
        slot.pins[write] = to
        self._pins[to] += 1

    def unpin(self, slot: Slot, write: Post) -> None:
        """The write does not read the slot any more, whatever became of it."""
        to = slot.pins.pop(write)
        self._pins[to] -= 1
        if not self._pins[to]:
            del self._pins[to]

    def check_integrity(self) -> None:
        """Raise AssertionError if the number of pins contradicts the slots."""
        towards = Counter(to for slot in self._slots for to in set(slot.pins.values()))
        assert towards == self._pins, (towards, self._pins)


@define(eq=False)
class Post:
    """A transfer that has begun, as one: it ends when all that moves its bytes has ended.

    Args:
        room, transfer: from which segment, to whom.
        route: how the bytes get there.
        tables: the room's pages.
        after: when they are final; None: now.
        slot: what it reads; None: pages of the room.
        began: when it began, or was last seen to wait for something.
        posted: it was handed to the transport, or launched.
        crossing: its bytes are on the wire.
        moving: tickets, or the launch of a copy, that have not ended.
        unquiet: those that have ended and may still read or write.
        error: why it failed.
    """

    room: PrefillRoom
    transfer: Transfer
    route: Route
    tables: Tables
    after: Event | None
    slot: Slot | None
    began: float
    posted: bool = False
    crossing: bool = False
    moving: set[Hashable] = field(factory=set)
    unquiet: set[Hashable] = field(factory=set)
    error: Exception | None = None

    @property
    def quiet(self) -> bool:
        """Nothing of it reads or writes any more."""
        return not (self.moving or self.unquiet)


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


Outcome = Moved | Unread | Broken


class Posts:
    """Runs on the thread that advances.

    ``of_room`` has the posts of a room that may still read, ``tickets`` the post of each ticket that is not quiet,
    ``outcomes`` what the side has not taken yet, the oldest first. ``summing`` is the number of
    segments whose pages are being summed.

    Args:
        loop: the endpoint's: its transport, peers, clock and observer.
        slots: what staged writes read.
        throughput: measures how fast transfers are.
    """

    def __init__(self, loop: EventLoop, slots: StagingSlots, throughput: ThroughputEstimator) -> None:
        self._loop = loop
        self._clock = loop.clock
        self.slots = slots
        self.throughput = throughput
        self.of_room: dict[PrefillRoom, dict[Post, None]] = {}
        self.tickets: dict[Posted, Post] = {}
        self.outcomes: deque[Outcome] = deque()
        self.summing = 0
        self.looked = loop.clock()
        """When the ends of gathers were last looked for."""

    def owed(self, room: PrefillRoom) -> dict[Epoch, HeldMemory]:
        """What posts of a room may still read, per destination: whole slots, and pages."""
        held: dict[Epoch, HeldMemory] = {}
        for post in self.of_room.get(room, ()):
            so_far = held.get(post.transfer.to, HeldMemory())
            slot, page = (0, post.transfer.nbytes) if post.slot is None else (self.slots.slot_bytes, 0)
            held[post.transfer.to] = HeldMemory(0, so_far.page_bytes + page, so_far.slot_bytes + slot)
        return held

    def outcome(self) -> Outcome | None:
        """See :class:`~.base.Mover`."""
        return self.outcomes.popleft() if self.outcomes else None

    def broken(self, room: PrefillRoom, error: Exception) -> None:
        """Keep an outcome: an event of a room raised."""
        self.outcomes.append(Broken(room, error))

    def _moved(self, room: PrefillRoom, to: Epoch, event: Wrote | WriteFailed | Quiet) -> None:
        """Keep an outcome: how a transfer went."""
        if not isinstance(event, Quiet):
            nbytes = 0
            if isinstance(event, Wrote):
                nbytes = room.routes[to].rank_plan.part_bytes(event.segment, self._loop.me.rank)
            self.throughput.ended((room.key, to, event.segment), nbytes)
        self.outcomes.append(Moved(room, to, event))

    def reading(self, room: PrefillRoom, by: int) -> None:
        """Count reads of the room's pages that begin (``by`` is positive) or end."""
        room.machine.reads += by
        if not room.machine.reads:
            self.outcomes.append(Unread(room))

    def begin(
        self,
        room: PrefillRoom,
        transfer: Transfer,
        plan: Callable[[Route, Transfer, Tables], P],
        slot: Slot | None = None,
        spent: float = 0.0,
    ) -> tuple[Post, P] | None:
        """Begin a transfer: it reads a slot, or with None the room's pages, from now until it is quiet.

        ``spent``: seconds that planning has taken before. None: it is void, or it cannot be planned.
        """
        to, segment = transfer.to, transfer.segment
        if not room.machine.flows[to].begin(transfer):
            return None
        after, route = room.ready_events.before(segment), room.routes[to]
        self.throughput.began((room.key, to, segment), route.carrier.name, queued=after is not None)
        tables = room.machine.rows.chunk(segment).tables
        assert tables is not None
        started = self._clock() - spent
        try:
            planned = plan(route, transfer, tables)
        except Exception as exc:
            error = ours(exc, f"{room_name(room.key.room)} towards {self._loop.sessions.name(to)}")
            self._moved(room, to, WriteFailed(segment, error, True))
            return None
        now = self._clock()
        room.handle.report.spend("plan", now - started)
        self.throughput.planned(now - started)
        post = Post(room, transfer, route, tables, after, slot, now)
        self.of_room.setdefault(room, {})[post] = None
        if slot is not None:
            self.slots.pin(slot, post, to)
        else:
            self.reading(room, 1)
        return post, planned

    def post(self, post: Post, writes: Writes, after: Event | None) -> None:
        """Submit the writes of a transfer, behind ``after``; an error of the transport becomes the transfer's."""
        started = self._clock()
        post.posted = True
        if after is None or post.slot is None:
            self.crosses(post, started)
        try:
            for batch in writes.batches(post.route.carrier.caps.max_batch):
                # Asked for each: nothing may begin to read or write once a peer's end was seen.
                carrier = self._loop.reach(post.transfer.to)
                posted = (carrier.name, carrier.transport.submit(carrier.peer, batch, after=after))
                post.moving.add(posted)
                self.tickets[posted] = post
        except Exception as exc:
            # A transport raises before it has a ticket: nothing of this batch moves.
            post.error = exc
        report = post.room.handle.report
        report.descriptors += len(writes)
        report.spend("post", self._clock() - started)
        if not post.moving:
            self.end(post)

    def crosses(self, post: Post, at: float) -> None:
        """The first time: its bytes are on the wire since ``at``, as far as this side can see."""
        if post.crossing or not post.posted:
            return
        if post.slot is not None and self._loop.observed:
            self._span("gather", post, at)
        post.crossing, post.began = True, at
        post.room.handle.report.write_begins(at)
        self.throughput.crossing((post.room.key, post.transfer.to, post.transfer.segment), at)

    def _span(self, name: str, post: Post, stop: float) -> None:
        """A piece of a transfer's work is over."""
        transfer = post.transfer
        labels = {**transfer.segment.labels(), "peer": transfer.to.hex()}
        room = post.room.key.room
        self._loop.observer.span(Span(name, room, post.began, stop, transfer.nbytes, labels=labels))

    def ended(self, post: Post, one: Hashable, error: Exception | None, *, quiet: bool) -> None:
        """A ticket, or the launch of a copy, has ended, well or not, quiet or not."""
        post.moving.discard(one)
        post.error = post.error or error
        if not quiet:
            post.unquiet.add(one)
        if not post.moving:
            self.end(post)

    def end(self, post: Post) -> None:
        """All that moved the bytes has ended, or nothing of it has begun."""
        if post.posted:
            # The gather before it ended since the last look, too.
            self.crosses(post, max(post.began, self.looked))
            now = self._clock()
            post.room.handle.report.write_ends(now)
            if self._loop.observed:
                self._span("wire", post, now)
        if post.quiet:
            self._unpin(post)
        transfer = post.transfer
        if post.error is None:
            post.room.handle.report.nbytes += transfer.nbytes
            self._moved(post.room, transfer.to, Wrote(transfer.segment, None))
        else:
            self._moved(post.room, transfer.to, WriteFailed(transfer.segment, post.error, post.quiet))

    def settled(self, post: Post, one: Hashable) -> None:
        """What ended before it was quiet is quiet at last."""
        post.unquiet.discard(one)
        if post.quiet:
            self._unpin(post)
            self._moved(post.room, post.transfer.to, Quiet(post.transfer.segment))

    def _unpin(self, post: Post) -> None:
        take_out(self.of_room, post.room, post)
        if post.slot is not None:
            self.slots.unpin(post.slot, post)
        else:
            self.reading(post.room, -1)

    def on_ticket(self, posted: Posted, event: WriteEnded | Settled) -> None:
        """A write ended, or is quiet at last."""
        post = self.tickets.get(posted)
        if post is None:
            return
        if isinstance(event, Settled):
            del self.tickets[posted]
            self.settled(post, posted)
            return
        if event.quiesced:
            del self.tickets[posted]
        self.ended(post, posted, event.error, quiet=event.quiesced)

    def gone(self, epoch: Epoch) -> None:
        """A destination's process has ended and nothing moves between us any more: its tickets are quiet."""
        for posted, post in [(t, p) for t, p in self.tickets.items() if p.transfer.to == epoch]:
            lost, (_, ticket) = PeerLostError(f"peer {peer_name(epoch)} is gone"), posted
            self.on_ticket(posted, Settled(ticket) if posted in post.unquiet else WriteEnded(ticket, lost))
