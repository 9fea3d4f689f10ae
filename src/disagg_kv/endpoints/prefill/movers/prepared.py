"""Gathers that are planned and prepared while their rows are still computed."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from ....core import Transfer
from ....ids import Epoch
from ....kernels import Move, PreparedGather, SupportsPreparing
from ....memory import Buffer
from ....planning import Segment, StagedLayout
from ....strategies import Tables
from ...loop.event_loop import EventLoop
from ...prepared import PreparedLaunches
from ..room import PrefillRoom
from ..routes import Route
from .posts import SlotLayout, take_out


@frozen(eq=False)
class Planned:
    """What a transfer will gather from these pages.

    Args:
        plan, tables: from where.
        seconds: time that planning took.
    """

    plan: StagedLayout
    tables: Tables
    seconds: float


_At = tuple[PrefillRoom, Segment]
_Members = list[tuple[Transfer, int]]
"""Transfers that one gather serves, each with its place in the slot."""


class PreparedGathers:
    """Runs on the thread that advances. A room whose pages are taken away is forgotten: a grant may outlive them.

    It is there only for kernels that prepare: others copy for longer than planning takes. One transfer is planned in a
    step: an engine may be launching its own kernels meanwhile, and holds the same interpreter. With the last
    destination of a segment the gather for all of them is prepared.

    Args:
        loop: the endpoint's: its clock and observer.
        kernels, staging: what gathers, and to where.
        slot_bytes: the most that one gather fills.
        plan: what a transfer gathers.
    """

    def __init__(
        self,
        loop: EventLoop,
        kernels: SupportsPreparing,
        staging: Buffer,
        slot_bytes: int,
        plan: Callable[[Route, Transfer, Tables], StagedLayout],
    ) -> None:
        self._loop = loop
        self._kernels = kernels
        self._staging = staging
        self._slot_bytes = slot_bytes
        self._plan = plan
        self.planned: dict[_At, dict[Epoch, tuple[Transfer, Planned]]] = {}
        self.gathers: PreparedLaunches[_At, dict[Epoch, Transfer], _Members, PreparedGather] = PreparedLaunches(
            loop, "gathers"
        )

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """A transfer has its grant, and not its rows; it takes the place of one whose grant was given back."""
        self._take(room, transfer)
        self.gathers.drop((room, transfer.segment))
        self.gathers.waiting.setdefault((room, transfer.segment), {})[transfer.to] = transfer

    def order(self, room: PrefillRoom, transfers: list[Transfer]) -> list[Transfer]:
        """Transfers of one segment, in the order in which a gather is prepared for them, if one is."""
        ready = self.gathers.ready.get((room, transfers[0].segment)) if len(transfers) > 1 else None
        if ready is None:
            return transfers
        places = {transfer: number for number, (transfer, _) in enumerate(ready.condition)}
        return sorted(transfers, key=lambda transfer: places.get(transfer, len(places)))

    def take(self, room: PrefillRoom, transfer: Transfer) -> Planned | None:
        """What is planned for exactly this transfer, whose rows are there now."""
        found = self._take(room, transfer)
        return None if found is None or found[0] != transfer else found[1]

    def _take(self, room: PrefillRoom, transfer: Transfer) -> tuple[Transfer, Planned] | None:
        key = room, transfer.segment
        if key in self.gathers.waiting:
            take_out(self.gathers.waiting, key, transfer.to)
        return take_out(self.planned, key, transfer.to) if key in self.planned else None

    def forget(self, room: PrefillRoom) -> None:
        """A room has failed or ended, or its pages are taken away."""
        for key in [key for key in {**self.gathers.waiting, **self.gathers.ready, **self.planned} if key[0] is room]:
            self.gathers.forget(key)
            self.planned.pop(key, None)

    def work(self) -> bool:
        """Plan one transfer of the segment that was granted first; True while others wait for that."""
        key = next(iter(self.gathers.waiting), None)
        if key is None:
            return False
        transfer = next(iter(self.gathers.waiting[key].values()))
        take_out(self.gathers.waiting, key, transfer.to)
        self.gathers.prepare(key, lambda: self._prepare(key[0], transfer))
        return bool(self.gathers.waiting)

    def _prepare(self, room: PrefillRoom, transfer: Transfer) -> tuple[_Members, PreparedGather] | None:
        """Plan a transfer; with the last one of its segment, a gather for all of them."""
        planned = self._foresee(room, transfer)
        if planned is None:
            return None
        known = self.planned.setdefault((room, transfer.segment), {})
        known[transfer.to] = transfer, planned
        destinations = sum(transfer.segment in flow.outbound for flow in room.machine.flows.values())
        return self._gather(room, list(known.values())) if len(known) == destinations else None

    def _foresee(self, room: PrefillRoom, transfer: Transfer) -> Planned | None:
        """What a transfer will gather; None: that is not known before its rows are there, or it has become void."""
        segment, started = transfer.segment, self._loop.clock()
        if segment.state or not room.machine.flows[transfer.to].awaits(transfer):
            return None
        tables = room.machine.rows.chunk(segment).tables
        if tables is None:
            return None
        plan = self._plan(room.routes[transfer.to], transfer, tables)
        return Planned(plan, tables, self._loop.clock() - started)

    def _gather(
        self, room: PrefillRoom, members: list[tuple[Transfer, Planned]]
    ) -> tuple[_Members, PreparedGather] | None:
        places, moves, where = SlotLayout(), dict[int, Move](), list[tuple[Transfer, int]]()
        pool = room.routes[members[0][0].to].pool
        for transfer, planned in members:
            route = room.routes[transfer.to]
            if route.pool is not pool or not places.room_for(route.view, transfer.nbytes, self._slot_bytes):
                return None
            place = places.add(route.view, transfer.nbytes)
            moves.setdefault(place, Move(planned.plan, planned.tables, place))
            where.append((transfer, place))
        gather = self._kernels.prepare_gather(pool, list(moves.values()), self._staging)
        return None if gather is None else (where, gather)
