"""Faults while ranks of decode vote: a follower that has voted, or rank 0, gives up, stands still or ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from disagg_kv.core import Receiving
from disagg_kv.endpoints.decode.room import DecodeRoom
from disagg_kv.endpoints.decode.rooms import DecodeSide

from .aimed_faults import FROZEN_S, AimedFaults
from .fault import FaultClass
from .node import SimNode

STRUCK, MOST = 0.3, 3
"""Share of a follower's steps after which one happens, while its vote waits; and how many happen in a world at most."""

SOON_S = (0.0005, 0.002, 0.02, 0.1)
"""How long rank 0 may go on after a follower that has voted gives up."""


class VoteFaults(AimedFaults):
    """Waits for such votes, and uses the faults that a scenario has. Its draws do not shift those of others."""

    name, most = "vote", MOST

    def strike(self, node: SimNode) -> None:
        """A process has made a step: a fault may happen before its next one."""
        world, view = self._world, node.view
        if not isinstance(view, DecodeSide) or world.calm or not world.faulty:
            return
        if not self._left or node.failing or node.rank == 0:
            return
        rooms = [room for room in view.rooms.values() if _waits(room)]
        if not rooms or self._random.random() >= STRUCK:
            return
        room = self._random.choice(rooms)
        world.mark("votes:a vote waits")
        first = world.instance("decode back" if node.back else "decode")[0]
        acts = [*self._acts(node, "the follower", room), *self._acts(first, "rank 0", room)]
        gives_up, ends = dict(acts).get("the follower gives up"), dict(acts).get("rank 0 ends")
        if gives_up is not None and ends is not None:
            acts.append(("the follower gives up before rank 0 ends", partial(self._both, gives_up, ends, first)))
        if acts:
            self._left -= 1
            name, act = self._random.choice(acts)
            world.mark(f"votes:{name}")
            act()

    def _acts(self, node: SimNode, who: str, room: DecodeRoom) -> list[tuple[str, Callable[[], object]]]:
        """What may happen to a rank now."""
        world, faults = self._world, self._world.scenario.faults
        acts: list[tuple[str, Callable[[], object]]] = []
        entries = world.entries.values()
        mine = next((e for e in entries if e.node is node and e.room.plan.room == room.key.room), None)
        if FaultClass.ABORT in faults and mine is not None:
            acts.append((f"{who} gives up", partial(mine.room.abort, mine)))
        if not node.alive or node.paused:
            return acts
        if FaultClass.PAUSE in faults:
            acts.append((f"{who} stands still", partial(self._silence, node)))
        if FaultClass.DECODE_CRASH in faults and FaultClass.DECODE_CRASH not in world.hits and not world.healed:
            acts.append((f"{who} ends", partial(self._lose, FaultClass.DECODE_CRASH, node)))
        return acts

    def _both(self, gives_up: Callable[[], object], ends: Callable[[], object], first: SimNode) -> None:
        """Rank 0 may decide before it counts the vote against the room, and then ends before it answers."""
        gives_up()
        self._world.later(self._random.choice(SOON_S), partial(self._end, ends, first))

    def _end(self, ends: Callable[[], object], first: SimNode) -> None:
        world = self._world
        if first.alive and not first.paused and not world.calm and FaultClass.DECODE_CRASH not in world.hits:
            ends()

    def _silence(self, node: SimNode) -> None:
        if node.alive and not node.paused:
            self._world.hit(FaultClass.PAUSE)
            self._freeze(node, FROZEN_S)


def _waits(room: DecodeRoom) -> bool:
    """Whether this rank has voted for success, and knows of no decision."""
    return room.machine.state is Receiving.PLACED
