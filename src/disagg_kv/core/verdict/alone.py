"""Every rank's outcome of a room is its own, for engines that reduce over ranks themselves."""

from __future__ import annotations

from ...ids import Epoch, Rank
from ..base import Options
from .base import Verdict


class Alone(Verdict):
    """Decides each room as soon as this rank has an outcome of it; satisfies :class:`.Verdict`.

    A failure reaches the other ranks all the same: a prefill rank that learns of it fails the room towards all decode
    ranks that have asked, and towards others when they ask. Ranks to which all had been written before succeed. So the
    engine has to reduce: the request has succeeded if it has on every rank.
    """

    name = "alone"

    def __init__(self, rank: Rank, world: int, epoch: Epoch, options: Options, instance: str) -> None:
        """The arguments are not used."""
