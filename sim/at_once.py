"""Engines that give a room up, or take its pages away, before the endpoint has acted on what came just before.

An endpoint takes commands and frames in, and then begins what they order. A transfer that was ordered by a chunk or by
``Expect`` may be void when its turn comes; a copy that the engine's call has launched may be of a room that ends
before the endpoint looks for the copy's end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from disagg_kv.channels import Arrived, Closed, Opened
from disagg_kv.core import Phase

from .cluster import Cluster
from .fault import FaultClass
from .node import SimNode
from .rooms import Entry

MOST = 2
"""At most this many rooms of a world are given up or preempted so."""

ROWS, LAYERS, LAUNCH, EXPECT = 0.08, 0.1, 0.8, 0.5
"""Share of the chunks, of the calls that make layers final, of those that launch a copy, and of the first ``Expect`` of
a room, after which one is. As many calls that make layers final come just after it."""


class AtOnce:
    """Uses the faults ``abort`` and ``withdraw``, where a scenario has them. Its draws do not shift those of others."""

    def __init__(self, world: Cluster) -> None:
        faults = world.scenario.faults
        self._world = world
        self._random = random.Random(f"at once {world.scenario.seed}")
        self._acts = [f for f in (FaultClass.ABORT, FaultClass.WITHDRAW) if f in faults]
        self._left = MOST if self._acts else 0

    def rows(self, entry: Entry) -> None:
        """An engine has handed over rows."""
        if self._drawn(ROWS):
            self._change([entry], "after rows")

    def before_layers(self, entries: Sequence[Entry]) -> None:
        """An engine is about to make layers final."""
        if self._drawn(LAYERS):
            self._change(entries, "before layers")

    def after_layers(self, entries: Sequence[Entry], *, launched: bool) -> None:
        """An engine has made layers final, and may have launched a copy by that."""
        if self._drawn(LAUNCH if launched else LAYERS):
            self._change(entries, "after a launch" if launched else "after layers")

    def awaits(self, node: SimNode) -> bool:
        """Whether frames have come to a process, one of which may be the first ``Expect`` of a room with rows."""
        if not self._left or node.failing or node.behind or not node.channel.inbox or not self._unmet(node):
            return False
        return self._drawn(EXPECT)

    def expected(self, node: SimNode, frames: Sequence[Arrived | Closed | Opened]) -> None:
        """The process takes frames in; its engine acts before anything is begun that they order."""
        waiting = self._unmet(node)
        for frame in frames:
            node.take_in(frame)
        self._change([entry for entry in waiting if entry.askers()], "after Expect")

    def _unmet(self, node: SimNode) -> list[Entry]:
        """Rooms of a prefill rank that have rows, and that no decode rank has asked for."""
        entries = (e for e in self._world.entries.values() if e.node is node and e.given and node.side == "prefill")
        return [e for e in entries if e.handle is not None and e.handle.phase is Phase.CONNECTING and not e.askers()]

    def _drawn(self, share: float) -> bool:
        world = self._world
        return self._left > 0 and world.faulty and not world.calm and self._random.random() < share

    def _change(self, entries: Sequence[Entry], when: str) -> None:
        mine = [entry for entry in entries if entry.withdrawal is None and entry.handle is not None]
        if not mine:
            return
        self._left -= 1
        entry, act = self._random.choice(mine), self._random.choice(self._acts)
        self._world.mark(f"at once:{act.name.lower()} {when}")
        if act is FaultClass.ABORT:
            entry.room.abort(entry)
        else:
            entry.room.withdraw(entry)
