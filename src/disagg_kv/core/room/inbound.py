"""The segments of a room on a decode rank, from the first request until their rows are in our pages.

:meth:`InboundSegment.reusable` alone says when a lease of the staging ring may be reused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from attrs import define, field

from ...errors import RemoteProtocolError
from ...geometry import Coverage
from ...ids import Epoch, Rank
from ...planning import RankPlan, RowRange, Segment
from ...staging import Lease
from .machine import corners, overlap


@define
class InboundSegment:
    """A segment between its first request and its place in pages.

    Args:
        writers: the ranks that have bytes in it.
        offsets: per writer, the first byte in the lease, and how many bytes.
        nbytes: bytes of the lease.
        asker: the peer on whose behalf the ring is asked.
        lease: the grant of the ring.
        asks: the number of each writer's last request.
        asked: writers that may write to the lease, now or once it is granted.
        arrived: writers whose bytes are there.
        staged: writers whose bytes are in the lease and not in the pages yet.
        sums: checksums of the writers' bytes, where the segment is compared.
        prepared: the places of this lease have been passed on for preparing a scatter.
        scattering: the lease, or the pages that its comparison covers, are being read.
    """

    writers: tuple[Rank, ...]
    offsets: dict[Rank, tuple[int, int]]
    nbytes: int
    asker: Epoch
    lease: Lease | None = None
    asks: dict[Rank, int] = field(factory=dict)
    asked: set[Rank] = field(factory=set)
    arrived: set[Rank] = field(factory=set)
    staged: set[Rank] = field(factory=set)
    sums: dict[Rank, bytes] = field(factory=dict)
    prepared: bool = False
    scattering: bool = False

    def reusable(self, ended: Collection[Rank], *, wanted: bool) -> bool:
        """Whether the lease may be reused: no scatter reads it, no writer may write to it, no wanted byte is in it.

        Args:
            ended: ranks that are proved to write nothing more.
            wanted: the room has not failed: bytes that are staged still go to pages.
        """
        writing = self.lease is not None and not self.asked <= self.arrived.union(ended)
        return not (self.scattering or writing or (wanted and self.staged))

    def places(self, of: Collection[Rank]) -> dict[Rank, int]:
        """The byte of the ring at which each of these writers' bytes begin."""
        base = 0 if self.lease is None else self.lease.offset
        return {rank: base + self.offsets[rank][0] for rank in sorted(of)}

    def newly_known(self) -> bool:
        """True once per lease: when all writers have asked for it, so each one's path is known."""
        new = self.lease is not None and not self.prepared and self.asked.issuperset(self.writers)
        self.prepared |= new
        return new

    def granted(self, rank: Rank, lease: int) -> bool:
        """Whether a writer may have written under this lease."""
        return self.lease is not None and self.lease.start == lease and rank in self.asked

    def stale(self, rank: Rank, ask: int) -> bool:
        """Whether a request was given back already: it came late or twice."""
        last = self.asks.get(rank, -1)
        return ask < last or (ask == last and rank not in self.asked)

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        assert self.arrived.issubset(self.writers)
        assert self.staged <= self.arrived <= self.asked | (self.arrived - self.staged)
        assert self.lease is not None or not self.staged
        assert self.asked <= self.asks.keys()
        assert self.lease is None or self.asked


class InboundSegments:
    """All segments of a room that are not placed in pages, and the rows that are."""

    def __init__(self) -> None:
        self._segments: dict[Segment, InboundSegment] = {}
        self._claimed = {state: Coverage() for state in (False, True)}
        self._placed = {state: Coverage() for state in (False, True)}
        self.segments_placed = 0
        self.bytes_placed = 0

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._segments

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments))

    def __getitem__(self, segment: Segment) -> InboundSegment:
        return self._segments[segment]

    def get(self, segment: Segment) -> InboundSegment | None:
        """The segment, if it is not placed."""
        return self._segments.get(segment)

    @property
    def scattering(self) -> bool:
        """Whether any of them is being scattered or compared."""
        return any(part.scattering for part in self._segments.values())

    def has_placed(self, segment: Segment) -> bool:
        """Whether all of its rows are in our pages."""
        return self._placed[segment.state].contains(*corners(segment))

    def find(self, segment: Segment, rank: Rank, epoch: Epoch, rank_plan: RankPlan, rows: range) -> InboundSegment:
        """The segment, added if it is new.

        Args:
            segment: the rows and layers.
            rank: the writer that names it.
            epoch: that writer's incarnation.
            rank_plan: what the room gets from each writer.
            rows: those that may come; states are not bound by them.

        Raises:
            RemoteProtocolError: other rows, an overlap with another segment, or a writer that was not elected.
            GeometryError: no segment that the plan could contain.
        """
        part = self._segments.get(segment)
        new = part is None
        if part is None:
            part = self._new(segment, epoch, rank_plan, rows)
        if rank not in part.writers:
            raise RemoteProtocolError(f"prefill rank {rank} was not elected for any of {segment}")
        if new:
            self._claimed[segment.state].add(*corners(segment))
            self._segments[segment] = part
        return part

    def _new(self, segment: Segment, epoch: Epoch, rank_plan: RankPlan, rows: range) -> InboundSegment:
        check_place(segment, rank_plan, rows)
        if self._claimed[segment.state].overlaps(*corners(segment)):
            raise RemoteProtocolError(f"{segment} overlaps another segment")
        offsets, nbytes = rank_plan.lease(segment)
        return InboundSegment(tuple(offsets), offsets, nbytes, epoch)

    def place(self, segment: Segment) -> None:
        """All rows of a segment are in our pages."""
        part = self._segments[segment]
        part.staged.clear()
        self._placed[segment.state].add(*corners(segment))
        self.segments_placed += 1
        self.bytes_placed += sum(nbytes for _, nbytes in part.offsets.values())

    def drop(self, segment: Segment) -> None:
        """A segment has no lease any more, and no scatter."""
        del self._segments[segment]

    def missing(self, rank_plan: RankPlan, rows: RowRange) -> Sequence[Segment]:
        """Which of these rows are not placed; else which segments are in hand."""
        needed = rank_plan.needed(rows)
        return [box for box in needed if not self._placed[box.state].contains(*corners(box))] or [*self._segments]

    def leased(self, rank: Rank) -> int:
        """Bytes of leases that this writer may still write to, by its own notices."""
        parts = self._segments.values()
        return sum(part.nbytes for part in parts if part.lease is not None and rank in part.asked - part.arrived)

    def check_integrity(self, open_by_rank: dict[Rank, int] | None) -> None:
        """Raise AssertionError if the accounts contradict each other.

        Args:
            open_by_rank: per writer, how many segments it has requested and not announced; None: not known.
        """
        for a, b in combinations(self._segments, 2):
            assert not overlap(a, b), (a, b)
        for part in self._segments.values():
            part.check_integrity()
        for rank, count in (open_by_rank or {}).items():
            asked = [p for p in self._segments.values() if rank in p.asks and rank not in p.arrived]
            assert count == len(asked), (rank, count, asked)


def check_place(segment: Segment, rank_plan: RankPlan, rows: range) -> None:
    """Raise a DisaggKVError as :meth:`InboundSegments.find` does, unless these rows and layers may come."""
    if not segment.state and (segment.start < rows.start or segment.stop > rows.stop):
        raise RemoteProtocolError(f"rows {segment.start}-{segment.stop} outside {rows.start}-{rows.stop}")
    rank_plan.validate(segment)
