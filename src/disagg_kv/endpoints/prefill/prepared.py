"""Gathers that are planned, and prepared where kernels can, while their rows are still computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable

from attrs import define, field, frozen

from ...ids import Epoch
from ...kernels import Kernels, Move, PreparedGather, SupportsPreparing
from ...memory import Buffer, Event, MemoryPool
from ...planning import Segment, StagedLayout, Writes
from ...protocol import Transfer
from ...staging import ALIGNMENT
from ...strategies import Tables
from ..runtime.event_loop import EventLoop
from .room import PrefillRoom
from .routes import Route


@frozen(eq=False)
class Planned:
    """What a transfer will gather from these pages.

    Args:
        plan, tables: from where.
        share: transfers of one segment for which this is equal carry the same bytes.
        destinations: how many get some of the segment.
        seconds: what it took to plan.
    """

    plan: StagedLayout
    tables: Tables
    share: Hashable
    destinations: int
    seconds: float


@define
class SlotLayout:
    """Where in a slot each transfer of one gather goes; those that carry the same bytes go to the same place."""

    of: dict[Hashable, int] = field(factory=dict)
    used: int = 0

    def room_for(self, share: Hashable, nbytes: int, slot_bytes: int) -> bool:
        """Whether it fits a slot of so many bytes; the first does always."""
        return share in self.of or not self.of or self.used + nbytes <= slot_bytes

    def add(self, share: Hashable, nbytes: int) -> int:
        """The byte of the slot at which it begins."""
        if share not in self.of:
            self.of[share] = self.used
            self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self.of[share]


@define(eq=False)
class PlannedGather:
    """A prepared gather of a segment, for these transfers, each so far from where it begins; ``over``: done with."""

    members: list[tuple[Transfer, int]]
    gather: PreparedGather
    over: bool = False

    def order(self, transfer: Transfer) -> int:
        """Transfers in this order go where they were prepared to."""
        known = [one for one, _ in self.members]
        return known.index(transfer) if transfer in known else len(known)

    def launch(self, base: int, after: Event | None) -> Event | None:
        """See :meth:`PreparedGather.launch`."""
        self.over = True
        return self.gather.launch(base, after)


class PreparedGathers:
    """Runs on the endpoint's thread only. A room whose pages are taken away is forgotten: a grant may outlive them.

    Only kernels that prepare are worth it: others copy for longer than anybody plans. One transfer is planned in a
    step: an engine may be launching its own kernels meanwhile, and holds the same interpreter. With the last
    destination of a segment the gather for all of them is prepared.

    Args:
        loop: the endpoint's: its clock and observer.
        pool, kernels, staging: what gathers from where, and to where.
        slot_bytes: the most that one gather fills.
        plan: what a transfer gathers, or writes straight to pages.
    """

    def __init__(
        self,
        loop: EventLoop,
        pool: MemoryPool,
        kernels: Kernels,
        staging: Buffer,
        slot_bytes: int,
        plan: Callable[[Route, Transfer, Tables], Writes | StagedLayout],
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._preparing = kernels if isinstance(kernels, SupportsPreparing) else None
        self._staging = staging
        self._slot_bytes = slot_bytes
        self._plan = plan
        self.waiting: dict[tuple[PrefillRoom, Epoch, Segment], Transfer] = {}
        self.planned: dict[tuple[PrefillRoom, Segment], dict[Epoch, tuple[Transfer, Planned]]] = {}
        self.foreseen: dict[tuple[PrefillRoom, Segment], PlannedGather] = {}

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """A transfer has its grant, and not its rows; it takes the place of one whose grant was given back."""
        if self._preparing is not None:
            self._take(room, transfer)
            self.drop(self.foreseen.pop((room, transfer.segment), None))
            self.waiting[room, transfer.to, transfer.segment] = transfer

    def gather(self, room: PrefillRoom, segment: Segment) -> PlannedGather | None:
        """What is prepared for a segment; the caller launches or drops it."""
        return self.foreseen.pop((room, segment), None)

    def take(self, room: PrefillRoom, transfer: Transfer) -> Planned | None:
        """What is planned for exactly this transfer, whose rows are there now."""
        found = self._take(room, transfer)
        return None if found is None or found[0] != transfer else found[1]

    def _take(self, room: PrefillRoom, transfer: Transfer) -> tuple[Transfer, Planned] | None:
        self.waiting.pop((room, transfer.to, transfer.segment), None)
        key = room, transfer.segment
        members = self.planned.get(key, {})
        found = members.pop(transfer.to, None)
        if not members:
            self.planned.pop(key, None)
        return found

    def forget(self, room: PrefillRoom) -> None:
        """A room has failed or ended."""
        for waiting in [key for key in self.waiting if key[0] == room]:
            del self.waiting[waiting]
        for key in [key for key in self.planned if key[0] == room]:
            del self.planned[key]
        for key in [key for key in self.foreseen if key[0] == room]:
            self.drop(self.foreseen.pop(key))

    def drop(self, found: PlannedGather | None) -> None:
        """It is not launched, unless it was."""
        if found is None or found.over:
            return
        found.over = True
        try:
            found.gather.drop()
        except Exception:
            # What the kernels kept for it is lost to them; no room depends on it.
            self._loop.observer.count("gathers.not_dropped")

    def work(self) -> bool:
        """Plan one; True while others wait for that."""
        if not self.waiting:
            return False
        room, to, segment = next(iter(self.waiting))
        transfer = self.waiting.pop((room, to, segment))
        try:
            planned = self._foresee(room, transfer)
            if planned is not None:
                members = self.planned.setdefault((room, segment), {})
                members[to] = transfer, planned
                if len(members) == planned.destinations:
                    self._prepare(room, segment, list(members.values()))
        except Exception:
            # The same is done again when the rows are there: what is wrong is met then, and fails the room.
            self._loop.observer.count("gathers.not_prepared")
        return bool(self.waiting)

    def _foresee(self, room: PrefillRoom, transfer: Transfer) -> Planned | None:
        """What a transfer will gather; None: that cannot be said before its rows are there, or it will not come."""
        segment, started = transfer.segment, self._loop.clock()
        if segment.state or not room.machine.flows[transfer.to].awaits(transfer):
            return None
        tables, route = room.machine.rows.chunk(segment).tables, room.routes[transfer.to]
        plan = None if tables is None else self._plan(route, transfer, tables)
        if tables is None or not isinstance(plan, StagedLayout):
            return None
        destinations = sum(flow.has(segment) for flow in room.machine.flows.values())
        return Planned(plan, tables, route.pair.source_view, destinations, self._loop.clock() - started)

    def _prepare(self, room: PrefillRoom, segment: Segment, members: list[tuple[Transfer, Planned]]) -> None:
        places, moves, where = SlotLayout(), dict[int, Move](), list[tuple[Transfer, int]]()
        for transfer, planned in members:
            if not places.room_for(planned.share, transfer.nbytes, self._slot_bytes):
                return
            place = places.add(planned.share, transfer.nbytes)
            moves.setdefault(place, Move(planned.plan, planned.tables, place))
            where.append((transfer, place))
        assert self._preparing is not None
        gather = self._preparing.prepare_gather(self._pool, list(moves.values()), self._staging)
        if gather is not None:
            self.drop(self.foreseen.pop((room, segment), None))
            self.foreseen[room, segment] = PlannedGather(where, gather)

    def check_integrity(self, rooms: Container[PrefillRoom]) -> None:
        """Raise AssertionError unless all of it is for these rooms, which still hope."""
        if not self.waiting and not self.planned and not self.foreseen:
            return
        known = {(room, to, segment) for (room, segment), some in self.planned.items() for to in some}
        assert not self.waiting.keys() & known
        assert all(self.planned.values()), "nobody's plans"
        for (room, segment), found in self.foreseen.items():
            assert {(room, t.to, segment) for t, _ in found.members} <= known, "prepared for nobody"
        assert all(room in rooms for room, _, _ in (*self.waiting, *known)), "foreseen for a room that is over"
