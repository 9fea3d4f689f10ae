"""Gathers that are planned, and prepared where kernels can, while their rows are still computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from attrs import define, frozen

from ..geometry import PageTable
from ..ids import Epoch, GroupId
from ..kernels import Kernels, Move, PreparedGather, SupportsPreparing
from ..memory import Buffer, MemoryPool
from ..planning import Segment, StagedLayout
from ..protocol import RoomKey, Transfer


@frozen(eq=False)
class Planned:
    """What a transfer will gather from these pages, planned in so many seconds.

    ``alone``: no other destination gets some of the segment.
    """

    plan: StagedLayout
    tables: Mapping[GroupId, PageTable]
    alone: bool
    seconds: float


@define(eq=False)
class Foreseen:
    """A transfer's plan and its gather, if that is prepared."""

    transfer: Transfer
    planned: Planned
    gather: PreparedGather | None


class Ahead:
    """Runs on the endpoint's thread only. A room whose pages are taken away is forgotten: a grant may outlive them.

    Only kernels that prepare are worth it: others copy for longer than anybody plans. One transfer is foreseen in a
    turn: an engine may be launching its own kernels meanwhile, and holds the same interpreter.

    Args:
        plan: what a transfer will gather; None: nobody knows by now, or it will not.
        count: told what went wrong.
    """

    def __init__(
        self,
        pool: MemoryPool,
        kernels: Kernels,
        staging: Buffer,
        plan: Callable[[RoomKey, Transfer], Planned | None],
        count: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._preparing = kernels if isinstance(kernels, SupportsPreparing) else None
        self._staging = staging
        self._plan = plan
        self._count = count
        self.waiting: dict[tuple[RoomKey, Epoch, Segment], Transfer] = {}
        self.foreseen: dict[tuple[RoomKey, Epoch, Segment], Foreseen] = {}

    def add(self, room: RoomKey, transfer: Transfer) -> None:
        """A transfer has its grant, and not its rows; it takes the place of one whose grant was given back."""
        if self._preparing is not None:
            key = room, transfer.to, transfer.segment
            self.drop(self.foreseen.pop(key, None))
            self.waiting[key] = transfer

    def take(self, room: RoomKey, transfer: Transfer) -> Foreseen | None:
        """What is known of exactly this transfer, whose rows are there now."""
        key = room, transfer.to, transfer.segment
        self.waiting.pop(key, None)
        found = self.foreseen.pop(key, None)
        if found is not None and found.transfer != transfer:
            self.drop(found)
            return None
        return found

    def forget(self, room: RoomKey) -> None:
        """A room has failed or ended."""
        for key in [key for key in self.waiting if key[0] == room]:
            del self.waiting[key]
        for key in [key for key in self.foreseen if key[0] == room]:
            self.drop(self.foreseen.pop(key))

    def drop(self, found: Foreseen | None) -> None:
        """Its gather, if there is one, is not launched."""
        if found is None or found.gather is None:
            return
        try:
            found.gather.drop()
        except Exception:
            # What the kernels kept for it is lost to them; no room depends on it.
            self._count("gathers.not_dropped")

    def work(self) -> bool:
        """Foresee one; True while others wait for that."""
        if not self.waiting:
            return False
        assert self._preparing is not None
        key = next(iter(self.waiting))
        transfer = self.waiting.pop(key)
        try:
            planned = self._plan(key[0], transfer)
            if planned is not None:
                moves = [Move(planned.plan, planned.tables, 0)]
                alone = planned.alone
                gather = self._preparing.prepare_gather(self._pool, moves, self._staging) if alone else None
                self.foreseen[key] = Foreseen(transfer, planned, gather)
        except Exception:
            # The same is done again when the rows are there: what is wrong is met then, and fails the room.
            self._count("gathers.not_prepared")
        return bool(self.waiting)

    def check_integrity(self, rooms: Container[RoomKey]) -> None:
        """Raise AssertionError unless all of it is for these rooms, which still hope."""
        if not self.waiting and not self.foreseen:
            return
        assert not self.waiting.keys() & self.foreseen.keys()
        assert all(room in rooms for room, _, _ in (*self.waiting, *self.foreseen)), "foreseen for a room that is over"
