"""Who says how a room ended: what both kinds of verdict have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from attrs import frozen

from ...ids import Epoch, Rank
from ..base import Decided, RoomKey, Send
from ..wire.frames import Decision, Vote


@frozen
class Outcome:
    """A room of this rank is decided. It may be reported again, never otherwise."""

    key: RoomKey
    decided: Decided


class Verdict:
    """How a rank's own outcome of a room becomes the one that its engine sees. Pure: it reads no clock.

    What is defined here holds where no other rank is asked.
    """

    name: ClassVar[str]

    @property
    def undecided(self) -> int:
        """Rooms that wait for an outcome."""
        return 0

    def joined(self, epoch: Epoch, rank: Rank, now: float) -> Sequence[Send | Outcome]:
        """A rank of the instance is there (again, perhaps in a new incarnation, which is the end of its others)."""
        return ()

    def followed(self, epoch: Epoch, rank: Rank) -> None:
        """This incarnation of a rank is there, but a younger one counts, until this one joins or is lost."""

    def lost(self, epoch: Epoch, now: float) -> Sequence[Send | Outcome]:
        """A rank of the instance is lost."""
        return ()

    def vote(self, key: RoomKey, ok: bool | None, reason: str, now: float) -> list[Send | Outcome]:
        """This rank's own outcome: None when the room opens, then one or two votes.

        A success may be withdrawn, a failure not.
        """
        return [] if ok is None else [Outcome(key, Decided(ok, reason))]

    def on_frame(self, frame: Vote | Decision, now: float) -> Sequence[Send | Outcome]:
        """What another rank of the instance has voted or decided."""
        return ()

    def tick(self, now: float) -> Sequence[Send | Outcome]:
        """Time has passed."""
        return ()

    def next_at(self) -> float | None:
        """When a tick is due."""
        return None
