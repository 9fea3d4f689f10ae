"""The state of a room on a decode rank."""

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
    """A room, its prefill ranks, and the pages of its rows.

    ``checking``: the comparison of its cached pages. ``views``: the share of each prefill rank, and its place here.
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
        """When something is due: a deadline, a repeat, or the end of the search for its prefill ranks."""
        due, machine = self.machine.next_at(), self.machine
        if machine.writers or machine.state is Receiving.CLOSED:
            return due
        unfound = self.opened + self.silence_s
        return unfound if due is None else min(due, unfound)

    @property
    def name(self) -> str:
        """For messages."""
        return f"room {self.key.room.hex()} generation {self.key.generation}"
