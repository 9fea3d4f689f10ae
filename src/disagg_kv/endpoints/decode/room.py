"""The state of a room on a decode rank."""

from __future__ import annotations

from attrs import define, field

from ...ids import Rank, room_name
from ...planning import InstancePlans, PairPlan, Segment
from ...protocol import ReceiveRoom, Receiving, RoomKey
from ...rendezvous import Source
from ..kept_pages import CachedPagesCheck
from ..runtime.handshake import RemoteEndpoint
from .handle import CheckedExpectation, ReceptionHandle


@define(eq=False)
class DecodeRoom:
    """A room, its prefill ranks, and the pages of its rows.

    ``checking``: the comparison of its cached pages. ``pairs``: what each prefill rank sends of what it awaits.
    ``queued``: since when segments wait for staging memory, for the observer.
    """

    key: RoomKey
    machine: ReceiveRoom
    handle: ReceptionHandle
    source: Source
    silence_s: float
    opened: float
    plans: InstancePlans | None = None
    remotes: tuple[RemoteEndpoint, ...] = ()
    wanted: CheckedExpectation | None = None
    checking: CachedPagesCheck | None = None
    pairs: dict[Rank, PairPlan] = field(factory=dict)
    queued: dict[Segment, float] = field(factory=dict)

    def next_at(self) -> float | None:
        """When something is due: a deadline, a repeat, or the end of the search for its prefill ranks."""
        due, machine = self.machine.next_at(), self.machine
        if machine.writers or machine.state is Receiving.CLOSED:
            return due
        unfound = self.opened + self.silence_s
        return unfound if due is None else min(due, unfound)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{room_name(self.key.room)} generation {self.key.generation}"
