"""Engines that open an id again, on one rank, one side or everywhere: nothing hangs, and no byte is wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from attrs import evolve

from disagg_kv.core import Phase
from disagg_kv.errors import LocalProtocolError
from disagg_kv.ids import Epoch, RoomId, room_name

from .cluster import Cluster
from .fault import FaultClass
from .request import Request
from .rooms import Entry, SimRoom

MOST = 4
"""Ids that are opened again, in one seed."""

SHARE = 0.25
"""Share of the ends of a room on a rank after which its id is opened again."""

PAUSES_S = (0.0, 0.001, 0.02, 0.2)


class ReusedIds:
    """Opens them, when a rank has freed a room. Its draws do not shift those of the rest of a seed.

    Args:
        world: where the engines are.
        begin: begins a request whose id was used before, given the room that had it and the ranks that open it again.
    """

    def __init__(self, world: Cluster, begin: Callable[[Request, SimRoom, Collection[str]], None]) -> None:
        self._world = world
        self._begin = begin
        self._random = random.Random(f"reused ids {world.scenario.seed}")
        scenario = world.scenario
        kept = scenario.conversations or scenario.model.states is not None
        self._ids: dict[Epoch, deque[RoomId]] = {}
        self._left = MOST if FaultClass.REUSED in scenario.faults and not kept else 0

    def freed(self, entry: Entry) -> None:
        """A rank has freed a room: its engine may take the id for another one."""
        rng, room = self._random, entry.room
        if not self._left or room.again or rng.random() > SHARE:
            return
        self._left -= 1
        side = room.decode if entry in room.decode else room.prefill
        ranks = [e for e in rng.choice(([entry], side, room.entries, room.entries)) if e.opened]
        plan = evolve(
            room.plan, prefill_late=(0.0, 0.0), decode_late=(0.0, 0.0), pass_s=0.0, open_end=False,
            aux=False, steps=False, abort_decode=None, abort_prefill=None, withdraw=None, late=False, burst=False,
            total_s=rng.choice((0.5, 2.0)), unmet="",
        )  # fmt: skip
        self._world.later(rng.choice(PAUSES_S), partial(self._open, plan, room, {e.node.address for e in ranks}))

    def _open(self, plan: Request, first: SimRoom, ranks: Collection[str]) -> None:
        self._world.hit(FaultClass.REUSED)
        self._begin(plan, first, ranks)

    def opened(self, entry: Entry) -> None:
        """I7: an endpoint has opened a room; it takes none of the ids that it remembers."""
        world, node, name = self._world, entry.node, entry.room.plan.room
        ids = self._ids.setdefault(node.epoch, deque(maxlen=world.scenario.options.tombstones))
        if name in ids:
            world.violation("I7", f"{entry.room.name(entry)}: was opened although the id was used before")
        ids.append(name)

    def refused(self, room: SimRoom, error: LocalProtocolError) -> bool:
        """An endpoint refuses an id; True: the router gives the other ranks' rooms up."""
        if not room.again:
            self._world.violation("I7", f"{room_name(room.plan.room)}: a new id is refused: {error}")
        self._world.mark("used twice:refused")
        return self._random.random() < 0.5

    def ended(self, entry: Entry) -> None:
        """Coverage: what became of a room whose id was used before."""
        if entry.room.again:
            assert entry.handle is not None
            done = entry.handle.phase is Phase.DONE
            self._world.mark("used twice:succeeds" if done else "used twice:fails")
