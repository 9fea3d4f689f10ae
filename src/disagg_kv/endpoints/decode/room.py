"""What a decode rank keeps per room."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from ...geometry import Share
from ...ids import Rank
from ...planning import PartView
from ...protocol import ReceiveRoom, Receiving, RoomKey
from ...rendezvous import Source
from ..kept_pages import CachedPagesCheck
from ..runtime.handshake import RemoteEndpoint
from ..runtime.plan_cache import PlanCache
from .handle import CheckedExpectation, ReceptionHandle


@define(eq=False)
class DecodeRoom:
    """A room, with what is known of its other side and of where its rows go.

    ``checking``: what it builds on. ``views``: what each prefill rank sends of what it awaits, and where it lies here.
    """

    key: RoomKey
    machine: ReceiveRoom
    handle: ReceptionHandle
    source: Source
    silence_s: float
    opened: float
    routes: PlanCache | None = None
    remotes: tuple[RemoteEndpoint, ...] = ()
    wanted: CheckedExpectation | None = None
    checking: CachedPagesCheck | None = None
    views: dict[Rank, tuple[Sequence[Share], PartView]] = field(factory=dict)

    def next_at(self) -> float | None:
        """When something is due for it: a deadline, a repeat, or that its prefill ranks were not found in time."""
        due, machine = self.machine.next_at(), self.machine
        if machine.writers or machine.state is Receiving.CLOSED:
            return due
        unfound = self.opened + self.silence_s
        return unfound if due is None else min(due, unfound)

    @property
    def name(self) -> str:
        """For messages."""
        return f"room {self.key.room.hex()} generation {self.key.generation}"
