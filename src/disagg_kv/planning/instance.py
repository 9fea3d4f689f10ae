"""What the ranks of one instance send to one target: planned once, and the same for all of their rooms."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ..geometry import Shard, Site
from ..geometry.election import rotations
from ..ids import Rank, RoomId
from .base import RowRange
from .cache import PlanCache
from .pair import PairPlan
from .rank_plan import RankPlan, rank_plan_of


class InstancePlans:
    """The plans between a prefill instance and one decode rank, per rotation and window. Threads may share it.

    Args:
        writers: the shard of each rank of the prefill instance, by rank.
        target: the decode rank's pool.

    Raises:
        GeometryError: as :func:`disagg_kv.geometry.elect`.
    """

    def __init__(self, writers: Sequence[Shard], target: Site) -> None:
        self.target = target
        self._writers = tuple(writers)
        self._rotations = rotations(target.spec, self._writers, target.shard)
        self._rank_plans: PlanCache[int, RankPlan] = PlanCache()
        self._pairs: PlanCache[tuple[int, RowRange, Rank, Site], PairPlan] = PlanCache()

    @classmethod
    def of(cls, writers: Sequence[Shard], target: Site) -> InstancePlans:
        """The plans between these shapes: made once, as most peers of a fleet are alike."""
        key = tuple(writers), target
        found = _known.get(key)
        return _known.keep(key, cls(writers, target)) if found is None else found

    def rotation(self, room: RoomId) -> int:
        """Which replica takes which piece of this room: stable between processes, unlike Python's own hash."""
        return int.from_bytes(hashlib.blake2b(room, digest_size=4).digest(), "big") % self._rotations

    def rank_plan(self, rotation: int) -> RankPlan:
        """What the target gets from each writer, for rooms of any rows."""
        found = self._rank_plans.get(rotation)
        if found is None:
            made = rank_plan_of(self.target.spec, self._writers, self.target.shard, rotation)
            found = self._rank_plans.keep(rotation, made)
        return found

    def pair(self, rotation: int, writer: Rank, source: Site, rows: RowRange) -> PairPlan:
        """What one writer sends to the target.

        Args:
            rotation: of the room.
            writer: the prefill rank.
            source: its pool.
            rows: those of the room that decode awaits.
        """
        rows = self.rank_plan(rotation).for_rows(rows).room
        key = rotation, rows, writer, source
        found = self._pairs.get(key)
        if found is None:
            made = PairPlan(source, self.target, self.rank_plan(rotation).parts[writer], rows)
            found = self._pairs.keep(key, made)
        return found


_known: PlanCache[tuple[tuple[Shard, ...], Site], InstancePlans] = PlanCache()
