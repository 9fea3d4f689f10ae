"""Writes from their first post to their last quiet ticket, and what the side has to know of them.

A ticket that has *ended* may still read the source (a write that timed out). Only a ticket that is *quiet* gives back
what it reads: a pin of a slot, or a read of a room's pages. This file releases both when a write's tickets are
quiet. Outcomes wait here until the side takes them; they survive an exception.

A copy into mapped pages (:mod:`.copies`) is a post without tickets. It is quiet once its event has happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from attrs import define, field, frozen

from ...core import Quiet, RoomKey, Transfer, WriteFailed, Wrote
from ...errors import PeerLostError
from ...ids import Epoch, Ticket, peer_name
from ...memory import Event, Flag
from ...planning import Writes
from ...trace import Span
from ...transports import Settled, WriteEnded
from ..loop.event_loop import EventLoop
from ..peers.peer_registry import HeldMemory
from .room import PrefillRoom
from .slots import Slot, StagingSlots
from .throughput import ThroughputEstimator


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


@define(eq=False)
class Post:
    """What was posted for one transfer, as one: it ends when all its tickets have ended, or when it was copied.

    Its outcome is known when its checksums are there too (``summing`` False); until then it is ``held``. ``copying``: a
    kernel may still read and write. ``flag``: what the kernel's device raises behind it.
    """

    room: PrefillRoom
    transfer: Transfer
    slot: Slot[Post] | None
    began: float
    posted: bool = False
    crossing: bool = False
    tickets: set[Ticket] = field(factory=set)
    unquiet: set[Ticket] = field(factory=set)
    copying: bool = False
    flag: Flag | None = None
    error: Exception | None = None
    sums: bytes | None = None
    summing: bool = False
    held: bool = False

    @property
    def quiet(self) -> bool:
        """Nothing of it reads or writes any more."""
        return not (self.tickets or self.unquiet or self.copying)


class PostedWrites:
    """Runs on the thread that advances.

    ``posts`` has the post of each ticket that is not quiet, ``of_room`` the posts of a room that may still read,
    ``outcomes`` what the side has not taken yet, the oldest first.

    Args:
        loop: the endpoint's: its transport, peers, clock and observer.
        slots: what staged writes read.
        throughput: measures how fast transfers are.
    """

    def __init__(self, loop: EventLoop, slots: StagingSlots[Post], throughput: ThroughputEstimator) -> None:
        self._loop = loop
        self._clock = loop.clock
        self._transport = loop.me.transport
        self._max_batch = loop.me.transport.caps.max_batch
        self._slots = slots
        self._throughput = throughput
        self.of_room: dict[PrefillRoom, dict[Post, None]] = {}
        self.posts: dict[Ticket, Post] = {}
        self.outcomes: deque[Outcome] = deque()
        self.looked = loop.clock()
        """When the ends of gathers were last looked for."""

    def slots_of(self, rooms: Collection[RoomKey], to: Epoch | None = None) -> int:
        """Slots that writes of these rooms, to one destination or all, may still read; slots are few, writes many."""
        if not rooms:
            return 0
        posts = {
            post.slot: None for post in self.pinning() if post.room.key in rooms and to in (None, post.transfer.to)
        }
        return len(posts)

    def pinning(self) -> list[Post]:
        """Posts that may still read a slot."""
        return [post for posts in self.of_room.values() for post in posts if post.slot is not None]

    def owed(self, room: PrefillRoom) -> dict[Epoch, HeldMemory]:
        """What writes of a room may still read, per destination: whole slots, and pages."""
        held: dict[Epoch, HeldMemory] = {}
        for post in self.of_room.get(room, ()):
            so_far = held.get(post.transfer.to, HeldMemory())
            slot, page = (0, post.transfer.nbytes) if post.slot is None else (self._slots.slot_bytes, 0)
            held[post.transfer.to] = HeldMemory(0, so_far.page_bytes + page, so_far.slot_bytes + slot)
        return held

    def broken(self, room: PrefillRoom, error: Exception) -> None:
        """Keep an outcome: an event of a room raised."""
        self.outcomes.append(Broken(room, error))

    def moved(self, room: PrefillRoom, to: Epoch, event: Wrote | WriteFailed | Quiet) -> None:
        """Keep an outcome: how a transfer went."""
        if not isinstance(event, Quiet):
            nbytes = 0
            if isinstance(event, Wrote):
                nbytes = room.routes[to].intake.part_bytes(event.segment, self._loop.me.rank)
            self._throughput.ended((room.key, to, event.segment), nbytes)
        self.outcomes.append(Moved(room, to, event))

    def reading(self, room: PrefillRoom, by: int) -> None:
        """Count reads of the room's pages that begin (``by`` is positive) or end."""
        room.machine.reads += by
        if not room.machine.reads:
            self.outcomes.append(Unread(room))

    def begin(self, room: PrefillRoom, transfer: Transfer, slot: Slot[Post] | None) -> Post:
        """Account for a write that will read a slot, or with None a room's pages, until it is quiet."""
        post = Post(room, transfer, slot, self._clock())
        self.of_room.setdefault(room, {})[post] = None
        if slot is not None:
            self._slots.pin(slot, post, transfer.to)
        return post

    def post(self, post: Post, writes: Writes, after: Event | None) -> None:
        """Submit the writes of a transfer, behind ``after``; an error of the transport becomes the transfer's."""
        started = self._clock()
        post.posted = True
        if after is None or post.slot is None:
            self.crosses(post, started)
        try:
            for batch in writes.batches(self._max_batch):
                # Asked for each: nothing may begin to read or write once a peer's end was seen.
                ticket = self._transport.submit(self._loop.reach(post.transfer.to), batch, after=after)
                post.tickets.add(ticket)
                self.posts[ticket] = post
        except Exception as exc:
            # A transport raises before it has a ticket: nothing of this batch moves.
            post.error = exc
        report = post.room.handle.report
        report.descriptors += len(writes)
        report.spend("post", self._clock() - started)
        if not post.tickets:
            self.end(post)

    def crosses(self, post: Post, at: float) -> None:
        """The first time: its bytes are on the wire since ``at``, as far as this side can see."""
        if post.crossing or not post.posted:
            return
        if post.slot is not None:
            self._span("gather", post, at)
        post.crossing, post.began = True, at
        post.room.handle.report.write_begins(at)
        self._throughput.crossing((post.room.key, post.transfer.to, post.transfer.segment), at)

    def _span(self, name: str, post: Post, stop: float) -> None:
        """A piece of a transfer's work is over."""
        if self._loop.observed:
            transfer = post.transfer
            labels = {**transfer.segment.labels(), "peer": transfer.to.hex()}
            room = post.room.key.room
            self._loop.observer.span(Span(name, room, post.began, stop, transfer.nbytes, labels=labels))

    def on_ticket(self, event: WriteEnded | Settled) -> None:
        """A write ended, or is quiet at last."""
        post = self.posts.get(event.ticket)
        if post is None:
            return
        if isinstance(event, Settled):
            self._quiet(post, event.ticket)
            return
        post.tickets.discard(event.ticket)
        post.error = post.error or event.error
        if event.quiesced:
            del self.posts[event.ticket]
        else:
            post.unquiet.add(event.ticket)
        if not post.tickets:
            self.end(post)

    def end(self, post: Post) -> None:
        """All tickets, or the copy, have ended, well or not, quiet or not."""
        if post.posted:
            # The gather before it ended since the last look, too.
            self.crosses(post, max(post.began, self.looked))
            ended = self._clock()
            post.room.handle.report.write_ends(ended)
            self._span("wire", post, ended)
        if post.quiet:
            self._unpin(post)
        if post.summing and post.error is None:
            post.held = True
        else:
            self.close(post)

    def close(self, post: Post) -> None:
        """Keep the outcome of a post whose tickets have ended, and whose checksums are there."""
        transfer = post.transfer
        if post.error is None:
            post.room.handle.report.nbytes += transfer.nbytes
            self.moved(post.room, transfer.to, Wrote(transfer.segment, post.sums))
        else:
            self.moved(post.room, transfer.to, WriteFailed(transfer.segment, post.error, post.quiet))

    def _quiet(self, post: Post, ticket: Ticket) -> None:
        del self.posts[ticket]
        post.unquiet.discard(ticket)
        if post.quiet:
            self.quiet(post)

    def quiet(self, post: Post) -> None:
        """What failed before it was quiet is quiet at last."""
        self._unpin(post)
        self.moved(post.room, post.transfer.to, Quiet(post.transfer.segment))

    def _unpin(self, post: Post) -> None:
        posts = self.of_room[post.room]
        del posts[post]
        if not posts:
            del self.of_room[post.room]
        if post.slot is not None:
            self._slots.unpin(post.slot, post)
        else:
            self.reading(post.room, -1)

    def gone(self, epoch: Epoch) -> None:
        """A destination's process has ended and nothing moves between us any more: its tickets are quiet."""
        for ticket, post in [(t, p) for t, p in self.posts.items() if p.transfer.to == epoch]:
            if ticket in post.unquiet:
                self._quiet(post, ticket)
            else:
                self.on_ticket(WriteEnded(ticket, PeerLostError(f"peer {peer_name(epoch)} is gone")))
