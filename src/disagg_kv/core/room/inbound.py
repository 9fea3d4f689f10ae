"""The accounts of a room on a decode rank: the prefill ranks that send rows, and the segments that they send.

A segment is in hand from its first request until its rows are in our pages. :meth:`InboundSegment.reusable` alone says
when a lease of the staging ring may be reused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from attrs import define, field

from ...errors import RemoteProtocolError
from ...geometry import Coverage
from ...ids import Epoch, Rank
from ...planning import RankPlan, RowRange, Segment
from ...staging import Lease
from ..base import Awaited
from ..wire.frames import Done, Head
from .machine import overlap


@define
class Writer:
    """One prefill rank of the room, elected for some rows or not.

    Args:
        epoch, rank: its incarnation, and its rank in its instance.
        head: of all frames of this room to it.
        opened: it has opened the room: it has sent a frame about it that does not say that the room is parked.
        transport: what carries its writes; None: neither its ``Expected`` nor its ``Done`` has come.
        done: its ``Done``.
        drained: it has sent ``Drained``.
        gone: it has closed, or its process has ended, and its last writes have landed.
        lost: it is lost, which is no evidence that it writes nothing more.
        open: segments that it has requested and not announced.
        arrived: segments that it has announced.
    """

    epoch: Epoch
    rank: Rank
    head: Head
    opened: bool = False
    transport: str | None = None
    done: Done | None = None
    drained: bool = False
    gone: bool = False
    lost: bool = False
    open: int = 0
    arrived: int = 0

    @property
    def complete(self) -> bool:
        """Whether it is done and all its segments have arrived. A notice may be lost, or come after ``Done``."""
        return self.done is not None and self.arrived == self.done.segments

    @property
    def stop(self) -> int | None:
        """The row at which it ends the room; None: it has not said that."""
        return None if self.done is None else self.done.stop

    @property
    def problem(self) -> str | None:
        """What it did that contradicts its ``Done``; None: nothing does."""
        if self.done is not None and self.arrived > self.done.segments:
            return f"is done after {self.done.segments} segments, and has announced {self.arrived}"
        return None

    @property
    def aux(self) -> bytes | None:
        """Its aux data, once it is done; None: it sends none."""
        return None if self.done is None else self.done.aux

    @property
    def evidence(self) -> bool:
        """Whether it is proved that it writes nothing more for this room."""
        return self.drained or self.gone


def misplaced(ends: Iterable[int | None], awaited: Awaited) -> str | None:
    """What a writer did wrong that ends the room at a row, of those that writers have named; None: nothing."""
    stops = sorted({stop for stop in ends if stop is not None})
    if len(stops) > 1:
        return f"and others end at different rows: {stops}"
    if awaited.stop is not None and stops[0] < awaited.stop:
        return f"ends at row {stops[0]}, not at {awaited.stop}"
    if awaited.stop is None and not awaited.start <= stops[0] <= awaited.most:
        return f"ends at row {stops[0]}; pages are there for {awaited.start}-{awaited.most}"
    if awaited.stop is None and stops[0] < awaited.least:
        return f"ends at row {stops[0]}; decode needs {awaited.least} or more"
    return None


def chosen(results: Iterable[bytes | None]) -> bytes | None:
    """The aux data that count, of those of all writers by rank: the first; None: no writer gives any."""
    return next((aux for aux in results if aux is not None), None)


def unopened(writers: Iterable[Writer]) -> list[int]:
    """The ranks that are not known to have opened the room."""
    return [int(w.rank) for w in writers if not w.opened]


def waited_for(writers: Iterable[Writer]) -> str:
    """Which notices are missing, in words."""
    undone = [int(w.rank) for w in writers if w.done is None]
    words = [f"ranks {undone} are not done"] if undone else []
    for w in writers:
        if w.done is not None and not w.complete:
            words.append(f"rank {w.rank} is done, but {w.arrived} of its {w.done.segments} notices have come")
    return "; ".join(words) or "all ranks are done"


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


class InboundSegments(dict[Segment, InboundSegment]):
    """All segments of a room that are not placed in pages, and the rows that are."""

    def __init__(self) -> None:
        super().__init__()
        self._claimed = {state: Coverage() for state in (False, True)}
        self._placed = {state: Coverage() for state in (False, True)}
        self.segments_placed = 0
        self.bytes_placed = 0

    @property
    def scattering(self) -> bool:
        """Whether any of them is being scattered or compared."""
        return any(part.scattering for part in self.values())

    def has_placed(self, segment: Segment) -> bool:
        """Whether all of its rows are in our pages."""
        return self._placed[segment.state].contains(*segment[:4])

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
        part = self.get(segment)
        new = part is None
        if part is None:
            part = self._new(segment, epoch, rank_plan, rows)
        if rank not in part.writers:
            raise RemoteProtocolError(f"prefill rank {rank} was not elected for any of {segment}")
        if new:
            self._claimed[segment.state].add(*segment[:4])
            self[segment] = part
        return part

    def _new(self, segment: Segment, epoch: Epoch, rank_plan: RankPlan, rows: range) -> InboundSegment:
        if not segment.state and (segment.start < rows.start or segment.stop > rows.stop):
            raise RemoteProtocolError(f"rows {segment.start}-{segment.stop} outside {rows.start}-{rows.stop}")
        rank_plan.validate(segment)
        if self._claimed[segment.state].overlaps(*segment[:4]):
            raise RemoteProtocolError(f"{segment} overlaps another segment")
        offsets, nbytes = rank_plan.lease(segment)
        return InboundSegment(tuple(offsets), offsets, nbytes, epoch)

    def place(self, segment: Segment) -> None:
        """All rows of a segment are in our pages."""
        part = self[segment]
        part.staged.clear()
        self._placed[segment.state].add(*segment[:4])
        self.segments_placed += 1
        self.bytes_placed += sum(nbytes for _, nbytes in part.offsets.values())

    def missing(self, rank_plan: RankPlan, rows: RowRange) -> Sequence[Segment]:
        """Which of these rows are not placed; else which segments are in hand."""
        needed = rank_plan.needed(rows)
        return [box for box in needed if not self._placed[box.state].contains(*box[:4])] or [*self]

    def leased(self, rank: Rank) -> int:
        """Bytes of leases that this writer may still write to, by its own notices."""
        parts = self.values()
        return sum(part.nbytes for part in parts if part.lease is not None and rank in part.asked - part.arrived)

    def check_integrity(self, open_by_rank: dict[Rank, int] | None) -> None:
        """Raise AssertionError if the accounts contradict each other.

        Args:
            open_by_rank: per writer, how many segments it has requested and not announced; None: not known.
        """
        for a, b in combinations(self, 2):
            assert not overlap(a, b), (a, b)
        for part in self.values():
            part.check_integrity()
        for rank, count in (open_by_rank or {}).items():
            asked = [p for p in self.values() if rank in p.asks and rank not in p.arrived]
            assert count == len(asked), (rank, count, asked)
