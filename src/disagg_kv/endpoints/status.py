"""What an endpoint shows to its engine and to operators: the cost of a room, its peers, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import define, field, frozen

from ..core import Phase
from ..errors import DisaggKVError
from ..ids import Epoch, Rank, RoomId
from ..trace import Span


@define
class Report:
    """The cost of one room on this rank, live. The thread that advances writes it.

    Args:
        path: name of the path, which decode chooses: on prefill, that to the last decode rank which has asked.
        reason: on decode, why that path was chosen.
        transport: the one that carries the bytes: on prefill, to the decode rank of the last choice; on decode, those
            of all prefill ranks that send rows, with ``+`` between them; "": not known yet.
        transport_reason: on prefill, why that transport.
        groups: number of layer groups of the last chunk; 0: not decided yet.
        schedule: why that number was chosen.
        nbytes: bytes written to peers, or placed in the pages of this rank.
        descriptors: writes posted.
        segments: segments acknowledged, or placed.
        seconds: time per phase. On prefill ``plan``, ``gather``, ``checksum``, ``post`` and ``wire`` (a write is in
            flight); on decode ``scatter`` and ``checksum``; on both ``total``, from ``open`` until the pages are
            released. Phases of one room overlap. A phase that took no time is not there.
        placed: on decode, the time when all rows of this rank were in its pages, in seconds of the endpoint's clock;
            None: they are not. The other ranks of the instance may still lack rows.
        ended: the time when this rank knew the outcome, in seconds of the endpoint's clock; None: it does not.
        opened: the time when the endpoint began the room, in seconds of its clock; None: it has not yet.
    """

    path: str = ""
    reason: str = ""
    transport: str = ""
    transport_reason: str = ""
    groups: int = 0
    schedule: str = ""
    nbytes: int = 0
    descriptors: int = 0
    segments: int = 0
    seconds: dict[str, float] = field(factory=dict)
    placed: float | None = None
    ended: float | None = None
    opened: float | None = None
    _flying: int = field(default=0, init=False, repr=False)
    _since: float = field(default=0.0, init=False, repr=False)
    _over: float = field(default=0.0, init=False, repr=False)

    def spend(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def span(self, room: RoomId, began: float, now: float, error: DisaggKVError | None) -> Span:
        """A whole room, which is forgotten now; times in seconds of the endpoint's clock."""
        outcome = "done" if error is None else "failed"
        labels = {"outcome": outcome, "path": self.path, "transport": self.transport, "segments": str(self.segments)}
        if error is not None:
            labels["error"] = type(error).__name__
        return Span("room", room, began, now, self.nbytes, self.descriptors, labels)

    def write_begins(self, now: float) -> None:
        """Count a write as in flight from ``now`` on. Overlapping writes count once, even if reported late."""
        if not self._flying:
            self._since = max(now, self._over)
        self._flying += 1

    def write_ends(self, now: float) -> None:
        """End one write that began."""
        self._flying -= 1
        self._over = now
        if not self._flying:
            self.spend("wire", now - self._since)


PeerState = Literal["connected", "idle", "silent", "lost", "ended"]


@frozen
class PeerInfo:
    """One incarnation of another endpoint, and the memory that it holds here. ``confirm_terminated`` takes its epoch.

    Args:
        instance, rank, address, epoch, host, pid: as the peer introduced itself.
        state: ``connected``; ``idle``: no room uses it, so it gets and sends no heartbeats; ``silent``: it missed
            heartbeats; ``lost``; ``ended``: it has closed, or its process was seen or confirmed to have ended, and its
            last writes may still land.
        silent_s: seconds since its last frame; infinite: not known any more.
        ring_bytes: on decode, bytes of ring leases of failed rooms that the peer may still write to. A lease that waits
            for several peers counts for each.
        page_bytes: on decode, bytes of exposed pages of failed rooms that the peer may still write to; all pages of
            such a room count. On prefill, bytes of pages of failed rooms that writes to the peer may still read.
        slot_bytes: on prefill, bytes of staging slots of failed rooms that writes to the peer may still read.
        rooms: the failed rooms that wait for evidence about the peer.
        transport: the one over which this side reaches the peer; "": it does not, as with ranks of its own instance.
            The peer chooses for itself over which one it writes.
        transport_reason: why that one, where the endpoint has several.
    """

    instance: str
    rank: Rank
    address: str
    epoch: Epoch
    host: str
    pid: int
    state: PeerState
    silent_s: float
    ring_bytes: int = 0
    page_bytes: int = 0
    slot_bytes: int = 0
    rooms: tuple[RoomId, ...] = ()
    transport: str = ""
    transport_reason: str = ""

    @property
    def held_bytes(self) -> int:
        """Sum of ring, page and slot bytes."""
        return self.ring_bytes + self.page_bytes + self.slot_bytes


@frozen
class Usage:
    """What an endpoint keeps, at one moment.

    Args:
        rooms: by phase, the rooms that are not released.
        ring_bytes: on decode, size of the staging ring; 0 on prefill.
        ring_used_bytes: bytes of it that are leased, those in quarantine included.
        slots: on prefill, number of staging slots; 0 on decode.
        slots_used: slots that are being filled, or that a write may still read.
        quarantined_bytes: bytes of ring or slots of failed rooms that wait for evidence.
        links: peers to which there are connections, or a watch of their process.
        links_most: links above which those are dropped that no room uses.
    """

    rooms: Mapping[Phase, int]
    ring_bytes: int = 0
    ring_used_bytes: int = 0
    slots: int = 0
    slots_used: int = 0
    quarantined_bytes: int = 0
    links: int = 0
    links_most: int = 0


@frozen
class RoomInfo:
    """A room at one moment.

    Args:
        room, phase: see :class:`~disagg_kv.endpoints.Handle`.
        age_s: seconds since the endpoint began it; None: it has not yet.
        path, nbytes, segments: see :class:`Report`.
        error: why it failed; "": it did not.
    """

    room: RoomId
    phase: Phase
    age_s: float | None
    path: str
    nbytes: int
    segments: int
    error: str


@frozen
class EndpointStatus:
    """What an endpoint does, at one moment.

    Args:
        side: ``prefill`` or ``decode``.
        instance, rank: whose endpoint it is.
        address: of its channel.
        state: ``open``, ``closed``, or ``broken``: see :class:`~disagg_kv.errors.EndpointBrokenError`.
        usage: rooms by phase, and staging memory.
        rooms: those that are not released, in the order in which they were opened; the first of them.
        peers: see :class:`PeerInfo`.
    """

    side: str
    instance: str
    rank: int
    address: str
    state: Literal["open", "closed", "broken"]
    usage: Usage
    rooms: tuple[RoomInfo, ...]
    peers: tuple[PeerInfo, ...]
