"""The Protocol of movers.

Calls go one way. A mover never calls the side that drives it: what the side has to know waits until it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....core import Transfer
from ...loop.timing import Budget
from ..room import PrefillRoom
from .posts import Outcome, Post


class Mover(Protocol):
    """Transfers in, outcomes out. Runs on the thread that advances; nothing blocks but kernels of a CPU.

    ``room.machine.reads`` counts whatever may read pages of a room, from before it begins until it cannot read any
    more.
    """

    def add(self, room: PrefillRoom, transfer: Transfer) -> None:
        """Order a transfer; one that is pending already is replaced."""
        ...

    def withdraw(self, room: PrefillRoom) -> None:
        """Drop what is pending for a room that has ended."""
        ...

    def start(self, budget: Budget) -> Sequence[Post]:
        """Begin what can begin, but one gather at most, and return that; empty: nothing else can begin now."""
        ...

    def look(self) -> None:
        """Go on with what has ended since the last look."""
        ...

    def outcome(self) -> Outcome | None:
        """The next thing that the side has to know, the oldest first; None: there is none."""
        ...
