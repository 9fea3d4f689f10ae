"""The events of the machines besides frames, and their effects. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import attrs
from attrs import field, frozen

from .. import arguments
from ..errors import ConfigurationError
from ..ids import Epoch, Generation, Rank, RoomId
from ..planning import RankPlan, Segment
from ..staging import Lease
from .wire.frames import Frame, WireFlags, WirePace, WireTable
from .wire.verify import Verify


class Phase(Enum):
    """How far a room is; prints as its name. ``released`` says whether the pages are free.

    * ``CONNECTING``: on decode, the prefill ranks are not connected; on prefill, not every decode rank has asked.
    * ``READY``: the other side is there, and the own engine has not submitted or awaited rows.
    * ``WAITING``: decode awaits rows, and not every prefill rank has opened the room; not on prefill.
    * ``MOVING``: rows move, or are being computed.
    * ``DONE``, ``FAILED``: ended.
    """

    __hash__ = object.__hash__  # engines look phases up in every step; Enum's own hash is computed in Python

    FAILED = "failed"
    CONNECTING = "connecting"
    READY = "ready"
    WAITING = "waiting"
    MOVING = "moving"
    DONE = "done"

    def __str__(self) -> str:
        return self.name


@frozen
class Options:
    """Times and bounds of the protocol, all in seconds or counts.

    Args:
        silence_s: a peer that a room depends on, and that sends no frame for this time, is lost.
        total_s: a room that has not ended within this time fails.
        claim_s: a finished prefill room fails if a decode rank has not asked for it within this time, of its end or of
            the last rank that has. A decode room fails if prefill has not opened it within this time.
        heartbeat_s: a peer that a room depends on, and that sent nothing for this time, is asked for a heartbeat.
        missed: a peer that has missed more heartbeats gets no new grants.
        closed_s: time for a broken connection to be restored, and for the rendezvous to answer a look-up.
        retry_s: a request is repeated after this time, then ever slower, up to ten times as slow.
        window: segments of one room that may be between request and acknowledgement towards one destination.
        tombstones: ended rooms that an endpoint remembers by id, to refuse a second use and to agree on them with the
            ranks of its instance; beyond those, and of every peer, it is remembered by number how a room ended.
        parked: places for what peers say of rooms that the engine has not opened: a frame takes one, and one more for
            every 16 KiB of page tables.
        request_pages: page ids of one request that exposes its pages. Decode exposes no more, prefill refuses more.
        peers: endpoints that are known at a time. One more takes the place of one that is lost, or else of one that has
            only introduced itself, or else of one that no room depends on; if there is none, it is refused by name. One
            for which memory here waits for evidence keeps its place.
        link_bytes: bytes of memory for the connections to peers. Above it, peers are forgotten that no room uses: the
            lost ones first, then those that have only introduced themselves, then those used longest ago. Rooms that
            need more get more.
        link_descriptors: the same in file descriptors; None: four fifths of what the process may have beyond 256 for
            all else. Rooms that need more get a quarter more, and then a further peer is refused by name.
    """

    silence_s: float = 30.0
    total_s: float = 300.0
    claim_s: float = 30.0
    heartbeat_s: float = 1.0
    missed: int = 3
    closed_s: float = 3.0
    retry_s: float = 0.2
    window: int = 16
    tombstones: int = 4096
    parked: int = 4096
    request_pages: int = 1 << 22
    peers: int = 16_384
    link_bytes: int = 128 << 20
    link_descriptors: int | None = None

    def __attrs_post_init__(self) -> None:
        for one in attrs.fields(Options):
            name, value = f"option {one.name}", getattr(self, one.name)
            if value is None and one.default is None:
                continue
            is_time = one.name.endswith("_s")
            known = arguments.seconds(value, name) if is_time else arguments.count(value, name, least=1)
            object.__setattr__(self, one.name, known)
        if not self.heartbeat_s < self.silence_s:
            raise ConfigurationError(
                f"options: a peer that beats every {self.heartbeat_s:g} s (heartbeat_s) would be lost after "
                f"{self.silence_s:g} s of silence (silence_s)"
            )

    @property
    def retry_most_s(self) -> float:
        """The longest pause between two repetitions of a request."""
        return 10 * self.retry_s

    @property
    def soon_s(self) -> float:
        """The shortest time after which something may be due for a room."""
        return min(self.retry_s, self.claim_s, self.total_s, self.silence_s)

    def of_room(self, total_s: float | None, claim_s: float | None) -> Options:
        """The same with a room's own times; None: these.

        Raises:
            ConfigurationError: a time that is not positive.
        """
        if total_s is None and claim_s is None:
            return self
        return _of_room(
            self,
            self.total_s if total_s is None else arguments.seconds(total_s, "total_s"),
            self.claim_s if claim_s is None else arguments.seconds(claim_s, "claim_s"),
        )


@lru_cache(64)
def _of_room(options: Options, total_s: float, claim_s: float) -> Options:
    return attrs.evolve(options, total_s=total_s, claim_s=claim_s)


def tags_differ(one: bytes, other: bytes) -> bool:
    """Whether two sides mean different requests by one room id: both have a tag, and the tags differ."""
    return bool(one and other) and one != other


@frozen
class Awaited:
    """Decode's engine has named the rows that it needs, and their pages.

    Args:
        start: first row.
        stop: one past the last row; None: prefill's, if it is not above ``most``.
        most: rows for which there are pages.
        path: the name of that by which all prefill ranks send them.
        tables: the pages, where the path exposes them to the peer's writes; None: they are not exposed.
        verify: how much is to be compared.
        aux_bytes: bytes of the aux row that is to be filled; 0: none is.
        least: where ``stop`` is None: the smallest stop that prefill may have.
        unsegmented: the size of a staging slot cuts no segment.
    """

    start: int
    stop: int | None
    most: int
    path: str
    tables: tuple[WireTable, ...] | None
    verify: Verify = "off"
    aux_bytes: int = 0
    least: int = 0
    unsegmented: bool = False


@frozen
class Introduced:
    """All prefill ranks are known; ``rank_plan`` says what comes from each, ``pace`` how fast one of them last was.

    ``flags``: by rank, those that it may raise for segments that have landed; empty: frames alone announce them.
    """

    writers: tuple[Epoch, ...]
    rank_plan: RankPlan
    pace: WirePace | None = None
    flags: tuple[WireFlags, ...] = ()


@frozen
class Met:
    """A prefill rank is there: again, and it may have given the room up without a frame; or only after its failure."""

    peer: Epoch


@frozen
class Leased:
    """The ring granted a segment's lease."""

    segment: Segment
    lease: Lease


@frozen
class Scattered:
    """A scatter ended; ``error`` None: the bytes are in the pages, and are what was sent where that was compared."""

    segment: Segment
    error: Exception | None = None


@frozen
class Decided:
    """The ranks of our own instance agree."""

    ok: bool
    reason: str


@frozen
class Lost:
    """A peer is lost: silent, reported lost, refused or ended. It proves nothing about its writes; see `Gone`."""

    peer: Epoch
    error: Exception


@frozen
class Gone:
    """Evidence: the peer has closed, its process has ended and its last writes have landed, or it is fenced."""

    peer: Epoch


@frozen
class Cancel:
    """Our engine, or our own failure, ends the room."""

    error: Exception


@frozen
class Tick:
    """Time has passed."""


@frozen
class Offered:
    """Prefill has new rows, pages or their readiness: check again which segments can move.

    Args:
        changed: also of rows that were known before; False: only rows were added.
    """

    changed: bool = True


@frozen
class Finished:
    """Prefill's engine has nothing to add: the room's rows end at ``stop``."""

    stop: int
    aux: bytes | None


@frozen
class Wrote:
    """A segment's write is complete: its bytes are visible at the target; ``sums`` as in ``ChunkReady``."""

    segment: Segment
    sums: bytes | None = None


@frozen
class WriteFailed:
    """A segment's gather or write failed; ``quiet`` False: it may still read or write."""

    segment: Segment
    error: Exception
    quiet: bool


@frozen
class Quiet:
    """Evidence that a failed write neither reads nor writes any more."""

    segment: Segment


@frozen
class Send:
    """Pass this frame to the channel."""

    to: Epoch
    frame: Frame


@frozen
class Reserve:
    """Ask the ring for a segment's lease on behalf of a peer (again: ``ready`` may have become true)."""

    peer: Epoch
    segment: Segment
    nbytes: int
    ready: bool


@frozen
class Free:
    """No writer can write to the segment's lease any more: release it, or leave the queue."""

    segment: Segment


@frozen
class Quarantine:
    """The segment's lease waits for evidence."""

    segment: Segment


@frozen
class Prepare:
    """These writers' parts of a segment will be scattered from here, unless its lease ends before: get ready."""

    segment: Segment
    parts: Mapping[Rank, int]


@frozen
class Scatter:
    """Move these writers' parts (rank -> byte in the ring) of a segment into pages; then compare writers' sums."""

    segment: Segment
    parts: Mapping[Rank, int]
    sums: Mapping[Rank, bytes] = field(factory=dict)


@frozen
class Store:
    """Put aux data where decode's engine wants them."""

    data: bytes


@frozen
class CastVote:
    """Send the ranks of our own instance this rank's outcome of the room."""

    ok: bool
    reason: str


@frozen
class Transfer:
    """Move our part of a segment to a peer: into its ring at ``offset``, or (None) into its pages."""

    to: Epoch
    segment: Segment
    offset: int | None
    nbytes: int
    lease: int | None


@frozen
class Granted:
    """A transfer whose rows are still to be computed has its place: get ready. Void when the grant is given back."""

    transfer: Transfer


Effect = Send | Reserve | Free | Quarantine | Prepare | Scatter | Store | CastVote | Transfer | Granted


class RoomKey(NamedTuple):
    """A room as one endpoint numbers it. A tuple, because most look-ups are by it."""

    room: RoomId
    generation: Generation
