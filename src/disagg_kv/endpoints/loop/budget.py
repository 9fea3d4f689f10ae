"""What an endpoint's thread does of one kind before heartbeats and deadlines have their turn again."""

from __future__ import annotations

from collections.abc import Callable

BUDGET_S = 0.01
"""Seconds after which no further piece of work is begun in a step; a piece that has begun is finished."""

MOST = 256
"""Pieces of work of one kind in a step, however fast they are."""


class Budget:
    """One kind of work in one step: commands of the engine, frames, gathers or scatters.

    Args:
        clock: time, in seconds.
        most: pieces of work.
        seconds: after which no further piece is begun.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST, seconds: float = BUDGET_S) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self._left = most

    def take(self) -> bool:
        """Whether another piece of work may begin in this step; it counts as begun."""
        if self._left <= 0 or self._clock() >= self._until:
            self._left = 0
            return False
        self._left -= 1
        return True

    @property
    def spent(self) -> bool:
        """True once another piece of work was refused: there may be more to do."""
        return self._left <= 0
