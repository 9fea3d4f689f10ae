"""The state of a room on a decode rank."""

from __future__ import annotations

from attrs import define, field

from ...core import ReceiveRoom, RoomKey
from ...core.room.machine import ours
from ...core.wire.frames import WireFlags
from ...ids import Rank, room_name
from ...memory import Event
from ...planning import InstancePlans, PairPlan, Segment
from ...rendezvous import Source
from ...strategies import TransferPlanner
from ..peers.handshake import RemoteEndpoint
from .handle import CheckedExpectation, ReceptionHandle


@define(eq=False)
class DecodeRoom:
    """A room, its prefill ranks, and the pages of its rows.

    ``ready``: fires once its pages may be written. ``pairs``: what each prefill rank sends of what it awaits.
    ``queued``: since when segments wait for staging memory, for the observer. ``given_up``: the engine has aborted it.
    ``path``: how its rows come, once that is chosen. ``flags``: those of its writers, by rank.
    """

    key: RoomKey
    machine: ReceiveRoom
    handle: ReceptionHandle
    source: Source
    opened: float
    plans: InstancePlans | None = None
    remotes: tuple[RemoteEndpoint, ...] = ()
    wanted: CheckedExpectation | None = None
    ready: Event | None = None
    pairs: dict[Rank, PairPlan] = field(factory=dict)
    queued: dict[Segment, float] = field(factory=dict)
    given_up: bool = False
    path: TransferPlanner | None = None
    flags: tuple[WireFlags, ...] = ()

    def writable(self) -> bool:
        """Whether rows may be written into its pages; True once it has failed: nothing will be.

        Raises:
            DisaggKVError: the engine's event raised.
        """
        if self.ready is not None and self.machine.error is None:
            try:
                if not self.ready.query():
                    return False
            except Exception as exc:
                raise ours(exc, f"{self.name}: the event that its pages wait for failed") from exc
            self.ready = None
        return True

    @property
    def name(self) -> str:
        """For messages."""
        return f"{room_name(self.key.room)} generation {self.key.generation}"
