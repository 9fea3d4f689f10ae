"""Gathers of a room's pages into slots, and one bulk write per destination from there.

Pins and ``filling`` protect a slot, see :class:`.posts.Slot`: a write that may read it holds a pin, and the gather that
writes it sets ``filling``.

One gather serves all destinations of a segment that have their grants, and equal parts are gathered once. Where kernels
and transport wait for events by themselves, gather and write are queued at once, behind the event after which the rows
are final, and this thread only asks later whether they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import count

from attrs import define

from ....core import RoomKey, Transfer
from ....errors import RemoteProtocolError
from ....ids import Epoch, RegionId
from ....kernels import Kernels, Move, SupportsPreparing
from ....memory import Buffer, Event
from ....planning import Segment, StagedLayout, Writes
from ....strategies import Tables
from ...loop.event_loop import EventLoop
from ...loop.timing import Budget
from ..room import PrefillRoom
from ..routes import Route
from .posts import Post, Posts, Slot, SlotLayout, take_out
from .prepared import Planned, PreparedGathers


@define(eq=False)
class _Gathering:
    """A gather that may still run.

    Args:
        posted: of the destinations whose writes wait for the gather by themselves.
        waiting: of the others, which are posted once it has ended.
    """

    event: Event
    room: PrefillRoom
    slot: Slot
    posted: list[Post]
    waiting: list[tuple[Post, Writes]]


_Begun = tuple[Post, StagedLayout, int]
"""A transfer that has begun, and where in the slot its bytes go."""


class SlotLines:
    """Transfers that have not begun: a line per destination; of their heads the one that came first is first.

    A transfer that comes again takes the place of the earlier one.

    ``of`` has the places of a room's transfers.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._lines: dict[Epoch, dict[tuple[PrefillRoom, Segment], int]] = {}
        self._together: dict[tuple[PrefillRoom, Segment], dict[Epoch, Transfer]] = {}
        self.of: dict[PrefillRoom, dict[tuple[Epoch, Segment], None]] = {}

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """It waits from now on."""
        to, segment = transfer.to, transfer.segment
        self.of.setdefault(room, {})[to, segment] = None
        self._lines.setdefault(to, {}).setdefault((room, segment), next(self._numbers))
        self._together.setdefault((room, segment), {})[to] = transfer

    def remove(self, room: PrefillRoom, to: Epoch, segment: Segment) -> None:
        """It begins, or is not wanted any more."""
        take_out(self.of, room, (to, segment))
        take_out(self._lines, to, (room, segment))
        take_out(self._together, (room, segment), to)

    def forget(self, room: PrefillRoom) -> None:
        """Nothing of a room is wanted any more."""
        for to, segment in list(self.of.get(room, ())):
            self.remove(room, to, segment)

    def first(self, full: Callable[[Epoch], bool]) -> tuple[PrefillRoom, Transfer] | None:
        """The one that came first to a destination that is not full."""
        heads = [(next(iter(line.items())), to) for to, line in self._lines.items() if not full(to)]
        if not heads:
            return None
        (key, _), to = min(heads, key=lambda head: head[0][1])
        return key[0], self._together[key][to]

    def same(self, room: PrefillRoom, segment: Segment) -> list[Transfer]:
        """Those of one segment, in the order in which they came."""
        return list(self._together.get((room, segment), {}).values())


class StagedMover:
    """A :class:`~.base.Mover`.

    It begins at most one gather at a time: a transport that copies inside ``submit`` has then reported the end of the
    last write, and has its slot back, before the next gather looks for one.

    Args:
        loop: the endpoint's: its clock.
        kernels: gather.
        staging, region: the buffer that is cut into slots, as it is registered.
        posts: the account of what has begun.
    """

    def __init__(self, loop: EventLoop, kernels: Kernels, staging: Buffer, region: RegionId, posts: Posts) -> None:
        self._kernels = kernels
        self._staging = staging
        self._region = region
        self._posts = posts
        self._clock = loop.clock
        self.slots = posts.slots
        self.lines = SlotLines()
        self.add, self.withdraw, self.outcome = self.lines.add, self.lines.forget, posts.outcome
        self.gathering: list[_Gathering] = []
        self.prepared: PreparedGathers | None = None
        if isinstance(kernels, SupportsPreparing):
            slot_bytes = posts.slots.slot_bytes
            self.prepared = PreparedGathers(loop, kernels, staging, slot_bytes, partial(self._plan, None))

    def slots_of(self, rooms: Collection[RoomKey], to: Epoch | None = None) -> int:
        """Slots that writes of these rooms, to one destination or all, may still read."""
        if not rooms:
            return 0
        pins = (slot.pins for slot in self.slots)
        return sum(any(p.room.key in rooms and to in (None, p.transfer.to) for p in of_slot) for of_slot in pins)

    def start(self, budget: Budget) -> list[Post]:
        """See :class:`~.base.Mover`."""
        while (slot := self.slots.reusable() if self.lines.of else None) is not None:
            found = self.lines.first(self.slots.full)
            if found is None or not budget.take():
                break
            if begun := self._stage(*found, slot):
                return begun
        self._posts.looked = self._clock()
        return []

    def _stage(self, room: PrefillRoom, first: Transfer, slot: Slot) -> list[Post]:
        """Gather once for all destinations of a segment that have their grants and fit the slot."""
        # Counted before anything begins: one destination's failure must not release what is gathered for the others.
        self._posts.reading(room, 1)
        begun: list[_Begun] = []
        try:
            begun = self._begin(room, first, slot)
            return self._gather(room, slot, begun) if begun else []
        finally:
            if not begun:
                self._posts.reading(room, -1)
            if self.prepared is not None:
                # What was not launched was prepared for another gather.
                self.prepared.gathers.drop((room, first.segment))

    def _begin(self, room: PrefillRoom, first: Transfer, slot: Slot) -> list[_Begun]:
        """Begin what one gather can carry."""
        begun: list[_Begun] = []
        places, pool, prepared = SlotLayout(), room.routes[first.to].pool, self.prepared
        transfers = self.lines.same(room, first.segment)
        for transfer in transfers if prepared is None else prepared.order(room, transfers):
            to, route = transfer.to, room.routes[transfer.to]
            if route.pool is not pool:
                continue
            if self.slots.full(to) or not places.room_for(route.view, transfer.nbytes, self.slots.slot_bytes):
                continue
            self.lines.remove(room, to, transfer.segment)
            planned = None if prepared is None else prepared.take(room, transfer)
            spent = 0.0 if planned is None else planned.seconds
            one = self._posts.begin(room, transfer, partial(self._plan, planned), slot, spent)
            if prepared and planned and (one is None or one[0].tables is not planned.tables):
                # Its pages were taken away meanwhile, or it has become void.
                prepared.gathers.drop((room, transfer.segment))
            if one is not None:
                begun.append((*one, places.add(route.view, transfer.nbytes)))
        return begun

    def _plan(self, planned: Planned | None, route: Route, transfer: Transfer, tables: Tables) -> StagedLayout:
        """What to gather, as ``planned`` for these tables: never more than the part, nor outside the peer's ring."""
        if planned is not None and planned.tables is tables:
            return planned.plan
        offset, nbytes, ring = transfer.offset, transfer.nbytes, route.remote.hello.ring_bytes
        plan = route.plan(StagedLayout, f"a layout of {nbytes} bytes", transfer, tables)
        assert offset is not None
        if offset + nbytes > ring:
            granted = f"granted bytes {offset}-{offset + nbytes} of a ring of {ring}"
            raise RemoteProtocolError(f"{route.remote.name}: {granted}")
        return plan

    def _gather(self, room: PrefillRoom, slot: Slot, begun: list[_Begun]) -> list[Post]:
        """Launch the gather that was prepared for exactly these transfers, or gather them without."""
        moves: dict[int, Move] = {}
        posts: list[tuple[Post, Writes]] = []
        members: list[tuple[Transfer, int]] = []
        first = begun[0][0]
        for post, plan, place in begun:
            where, offset = slot.offset + place, post.transfer.offset
            ring = RegionId(post.route.remote.hello.ring_region)
            assert offset is not None
            moves.setdefault(place, Move(plan, post.tables, where))
            posts.append((post, Writes.one(self._region, where, ring, offset, plan.nbytes)))
            members.append((post.transfer, place))
        started = self._clock()
        try:
            ahead = self.prepared
            launch = None if ahead is None else ahead.gathers.take((room, first.transfer.segment), members)
            if launch is not None:
                event = launch.launch(slot.offset, first.after)
            else:
                event = self._kernels.gather(first.route.pool, list(moves.values()), self._staging, first.after)
        except Exception as exc:
            self._gathered(room, posts, exc)
            return []
        room.handle.report.spend("gather", self._clock() - started)
        if event is None:
            self._gathered(room, posts, None)
        else:
            slot.filling = True
            queued = [one for one in posts if one[0].route.carrier.caps.waits_events]
            waiting = [one for one in posts if not one[0].route.carrier.caps.waits_events]
            self.gathering.append(_Gathering(event, room, slot, [post for post, _ in queued], waiting))
            for post, writes in queued:
                self._posts.post(post, writes, event)
            self._posts.throughput.launched(self._clock() - started)
        return [post for post, _ in posts]

    def look(self) -> None:
        """See :class:`~.base.Mover`."""
        for one in list(self.gathering):
            self._look(one)
        self._posts.looked = self._clock()

    def _look(self, one: _Gathering) -> None:
        """Go on with a gather that has ended, well or not."""
        error: Exception | None = None
        try:
            if not one.event.query():
                return
        except Exception as exc:
            error = exc
        self.gathering.remove(one)
        one.slot.filling = False
        for post in one.posted:
            # Writes that waited for an event which failed say so by their tickets.
            self._posts.crosses(post, self._clock())
        self._gathered(one.room, one.waiting, error)

    def _gathered(self, room: PrefillRoom, posts: list[tuple[Post, Writes]], error: Exception | None) -> None:
        self._posts.reading(room, -1)
        for post, writes in posts:
            if error is None:
                self._posts.post(post, writes, None)
            else:
                post.error = error
                self._posts.end(post)
