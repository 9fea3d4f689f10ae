"""Faults that wait for a certain moment of a process, and strike then."""

from __future__ import annotations

import random
from collections.abc import Callable

from .cluster import Cluster
from .fault import FaultClass
from .node import SimNode

FROZEN_S = (0.3, 2.6, 4.5)
"""How long a process may stand still. A peer counts as silent after two seconds."""


class AimedFaults:
    """The faults that a scenario has, with draws of their own, which do not shift those of others.

    Args:
        world: of the processes.
        lose: ends a process.
        freeze: lets a process stand still for one of some times.
    """

    name: str
    most: int
    """How many happen in a world."""

    def __init__(
        self,
        world: Cluster,
        lose: Callable[[FaultClass, SimNode], None],
        freeze: Callable[[SimNode, tuple[float, ...]], object],
    ) -> None:
        self._world = world
        self._lose = lose
        self._freeze = freeze
        self._random = random.Random(f"{self.name} faults {world.scenario.seed}")
        self._left = self.most
