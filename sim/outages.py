"""A process whose transport, channel or handling of errors raises for a while."""

from __future__ import annotations

from functools import partial

from .cluster import Cluster
from .fault import FaultClass
from .simulation import SimProcess

POLL_S = (0.05, 2.5)
"""How long a transport's ``poll`` raises."""


class Outages:
    """Draws such processes, and mends them."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self.random = world.outside.random
        faults = world.scenario.faults
        if FaultClass.POLL in faults:
            world.later(self.random.random() * 0.3, partial(self._strike, FaultClass.POLL))
        if FaultClass.BROKEN in faults:
            world.later(self.random.random() * 0.3, partial(self._strike, FaultClass.BROKEN))

    def _strike(self, fault: FaultClass) -> None:
        """From now on a process's transport raises; with ``BROKEN``, what ends its rooms for that raises, too."""
        nodes = [node for node in self._world.nodes if not node.paused]
        if self._world.healed or not nodes:
            return
        node = self.random.choice(nodes)
        self._world.hit(fault)
        # Not always at the beginning of a turn.
        node.poll_raises, node.polls_left = True, self.random.choice((0, 0, 1, 2, 3))
        node.handling_raises = fault is FaultClass.BROKEN
        node.send_raises = fault is FaultClass.POLL and self.random.random() < 0.5
        node.touch()
        self._world.later(self.random.choice(POLL_S), partial(self._mend, node))

    def _mend(self, node: SimProcess) -> None:
        node.poll_raises = node.send_raises = node.handling_raises = False
        node.touch()

    def heal(self) -> None:
        """The failing call works again; its process continues."""
        for node in self._world.nodes:
            if node.poll_raises:
                self._mend(node)
