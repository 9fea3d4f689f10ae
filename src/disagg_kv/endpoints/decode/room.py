"""The state of a room on a decode rank."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from ...core import ReceiveRoom, RoomKey
from ...core.room.machine import ours
from ...core.wire.frames import WireFlags
from ...errors import DisaggKVError, RemoteProtocolError
from ...ids import Epoch, GroupId, Rank, room_name
from ...memory import Event, MemoryPool
from ...planning import InstancePlans, PairPlan, Segment
from ...rendezvous import Source
from ...strategies import TransferPlanner
from ..peers.handshake import RemoteEndpoint
from ..peers.session import HeldMemory, PeerSession
from .handle import CheckedExpectation, ReceptionHandle


@define(eq=False)
class DecodeRoom:
    """A room, its prefill ranks, and the pages of its rows.

    ``ready``: fires once its pages may be written. ``pairs``: what each prefill rank sends of what it awaits.
    ``queued``: since when segments wait for staging memory, for the observer. ``given_up``: the engine has aborted it.
    ``soon_s``: after an event of the room, the shortest time in which something may be due for it.
    ``path``: how its rows come, once that is chosen. ``flags``: those of its writers, by rank.
    ``used``: peers that it uses until it is over.
    """

    key: RoomKey
    machine: ReceiveRoom
    handle: ReceptionHandle
    source: Source
    opened: float
    soon_s: float
    plans: InstancePlans | None = None
    remotes: tuple[RemoteEndpoint, ...] = ()
    wanted: CheckedExpectation | None = None
    ready: Event | None = None
    pairs: dict[Rank, PairPlan] = field(factory=dict)
    queued: dict[Segment, float] = field(factory=dict)
    given_up: bool = False
    path: TransferPlanner | None = None
    flags: tuple[WireFlags, ...] = ()
    used: list[PeerSession] = field(factory=list)

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

    def store(self, pool: MemoryPool, data: bytes) -> DisaggKVError | None:
        """Put aux data into the row that its engine has named, if it has; why that cannot be."""
        if self.wanted is None or self.wanted.aux is None:
            return None
        if len(data) > pool.aux_bytes:
            return RemoteProtocolError(f"aux data of {len(data)} bytes for rows of {pool.aux_bytes}")
        try:
            pool.write_aux(self.wanted.aux, data)
        except Exception as exc:
            return ours(exc, f"{self.name}: aux data could not be stored")
        return None

    def account(self, now: float, *, released: bool) -> None:
        """Say what the room has cost so far."""
        inbound, report = self.machine.inbound, self.handle.report
        report.segments, report.nbytes = inbound.segments_placed, inbound.bytes_placed
        report.transport = self.machine.transport
        if released and "total" not in report.seconds:
            report.spend("total", now - self.opened)

    def unsettled(self, page_bytes: Mapping[GroupId, int]) -> dict[Epoch, HeldMemory]:
        """The memory that waits for evidence about each peer."""
        pages = 0
        if self.wanted is not None:
            pages = sum(len(t.pages) * page_bytes[t.group] for t in self.wanted.tables.values())
        owed = self.machine.owed()
        return {epoch: HeldMemory(ring, pages if exposed else 0) for epoch, (ring, exposed) in owed.items()}

    @property
    def name(self) -> str:
        """For messages."""
        return f"{room_name(self.key.room)} generation {self.key.generation}"
