"""What is planned once for a pair of instances and serves all their rooms."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from ...geometry import Shard, Site
from ...geometry.election import rotations
from ...ids import Rank, RoomId
from ...planning import Intake, PartView, intake_of, part_view

KEPT = 64
"""Pairs of instances and targets whose rotations are kept, by value: most endpoints of a run are split alike."""

_rotations = lru_cache(KEPT)(rotations)


class PlanCache:
    """Intakes and part views of one set of writers and one target, per rotation."""

    def __init__(self, writers: Sequence[Shard], target: Site) -> None:
        self.target = target
        self._writers = tuple(writers)
        self._rotations = _rotations(target.spec, self._writers, target.shard)
        self._intakes: dict[int, Intake] = {}
        self._views: dict[tuple[int, Rank, bool], PartView] = {}

    def intake(self, room: RoomId) -> Intake:
        """What the target gets from each writer for this room: the room decides which replica takes which piece."""
        rotation = self.rotation(room)
        if rotation not in self._intakes:
            self._intakes[rotation] = intake_of(self.target.spec, self._writers, self.target.shard, rotation)
        return self._intakes[rotation]

    def view(self, room: RoomId, writer: Rank, site: Site) -> PartView:
        """A writer's parts in the pool of ``site``: the writer's own or the target's."""
        key = (self.rotation(room), writer, site is self.target)
        if key not in self._views:
            self._views[key] = part_view(site, tuple(self.intake(room).parts[writer]), site.spec)
        return self._views[key]

    def rotation(self, room: RoomId) -> int:
        """The room's rotation: stable between processes, unlike Python's own hash."""
        return int.from_bytes(hashlib.blake2b(room, digest_size=4).digest(), "big") % self._rotations
