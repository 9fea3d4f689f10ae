"""The segments of a flow on a prefill rank, from the plan until their rows have landed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from enum import Enum, auto
from itertools import islice

from attrs import define

from ...planning import Segment
from ..wire.frames import Grant


class SegmentStep(Enum):
    """How far a segment is towards one destination."""

    PLANNED = auto()
    ASKED = auto()
    GRANTED = auto()
    WRITING = auto()
    ANNOUNCED = auto()


@define
class OutboundSegment:
    """A segment that has not landed.

    Args:
        nbytes: bytes of our part.
        step: how far it is. ``ANNOUNCED``: it is written, nothing reads it any more, and ``ChunkReady`` is repeated
            until ``Landed``.
        grant: where it goes; None: to exposed pages, or not granted yet.
        ask: the number of the next or last request for a lease.
        asked_ready: the last request said that the rows are final.
        tries: writes that failed.
    """

    nbytes: int
    step: SegmentStep = SegmentStep.PLANNED
    grant: Grant | None = None
    ask: int = 0
    asked_ready: bool = False
    tries: int = 0


class OutboundSegments(dict[Segment, OutboundSegment]):
    """All segments of a flow that have not landed, in order, and how many are how far.

    Attributes:
        begun: segments that are more than planned.
        announced: segments that were ever announced.
        unacknowledged: announced segments that have not landed.
        segments_landed: those that have.
    """

    def __init__(self) -> None:
        super().__init__()
        self._runs: Counter[range] = Counter()
        self.begun = 0
        self.announced = 0
        self.unacknowledged = 0
        self.segments_landed = 0

    def first(self, count: int) -> Iterator[tuple[Segment, OutboundSegment]]:
        """The first segments in order."""
        return islice(self.items(), count)

    def runs(self) -> Set[range]:
        """Layers of rows that have not landed, as they cross together."""
        return {run for run, segments in self._runs.items() if segments}

    def add(self, segment: Segment, nbytes: int) -> None:
        """Plan a segment, unless it is empty or planned already."""
        if nbytes and segment not in self:
            self[segment] = OutboundSegment(nbytes)
            self._runs[segment.layers] += not segment.state

    def move(self, part: OutboundSegment, step: SegmentStep) -> None:
        """A segment reaches a step, or falls back to it."""
        self.begun += (step is not SegmentStep.PLANNED) - (part.step is not SegmentStep.PLANNED)
        self.announced += step is SegmentStep.ANNOUNCED
        self.unacknowledged += (step is SegmentStep.ANNOUNCED) - (part.step is SegmentStep.ANNOUNCED)
        part.step = step

    def land(self, segment: Segment) -> None:
        """The rows of a segment have landed."""
        part = self.pop(segment)
        self._runs[segment.layers] -= not segment.state
        self.begun -= part.step is not SegmentStep.PLANNED
        self.unacknowledged -= part.step is SegmentStep.ANNOUNCED
        self.segments_landed += 1

    def land_all(self) -> None:
        """The rows of every segment have landed."""
        for segment in list(self):
            self.land(segment)

    def clear(self) -> None:
        """Drop all: the flow has failed."""
        super().clear()
        self._runs.clear()
        self.begun = self.unacknowledged = 0

    def check_integrity(self, unquiet: Set[Segment]) -> None:
        """Raise AssertionError if the accounts contradict each other; ``unquiet``: segments that may still be read."""
        parts = self.values()
        assert self.begun == sum(part.step is not SegmentStep.PLANNED for part in parts)
        assert self.unacknowledged == sum(part.step is SegmentStep.ANNOUNCED for part in parts)
        assert self.runs() == {segment.layers for segment in self if not segment.state}
        for segment, part in self.items():
            assert (part.step is SegmentStep.WRITING) == (segment in unquiet), (segment, part)
            assert part.grant is None or part.step not in (SegmentStep.PLANNED, SegmentStep.ASKED), (segment, part)
