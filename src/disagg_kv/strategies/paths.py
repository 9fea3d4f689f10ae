"""The three paths that come with the library."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LocalProtocolError
from ..geometry import Share, Site
from ..planning import StagedLayout, Writes, direct_writes, refuse_direct, slice_writes
from ..planning.descriptors import direct_total, slice_total
from .base import Job


class DirectPlanner:
    """Whole pages and runs of pages, coalesced by address; only between equal layouts."""

    name = "direct"
    version = 1
    exposes_pages = True

    def refuse(self, source: Site, target: Site, parts: Sequence[Share]) -> str | None:
        """Needs equal page sizes and strides, and all units of a page."""
        return refuse_direct(source, target, parts)

    def send(self, job: Job) -> Writes:
        """One write per run of pages."""
        return direct_writes(
            job.source, job.target, job.parts, job.segment, job.source_tables, job.target_tables, job.rows
        )

    def receive(self, job: Job) -> StagedLayout:
        """Nothing is received into staging."""
        raise LocalProtocolError("the direct path scatters nothing")

    def count(self, job: Job) -> int:
        """At most one write per page and plane."""
        return direct_total(job.source, job.target, tuple(job.parts), job.segment, job.rows)


class SlicePlanner:
    """One write per token and head slice: what every engine can do, and the baseline to beat."""

    name = "slice"
    version = 1
    exposes_pages = True

    def refuse(self, source: Site, target: Site, parts: Sequence[Share]) -> str | None:
        """Any two layouts will do."""
        return None

    def send(self, job: Job) -> Writes:
        """One write per row and run of units."""
        return slice_writes(
            job.source, job.target, job.parts, job.segment, job.source_tables, job.target_tables, job.rows
        )

    def receive(self, job: Job) -> StagedLayout:
        """Nothing is received into staging."""
        raise LocalProtocolError("the slice path scatters nothing")

    def count(self, job: Job) -> int:
        """One write per row and run of units."""
        return slice_total(job.source, job.target, tuple(job.parts), job.segment, job.rows)


class StagedPlanner:
    """Gather into a slot, one bulk write into a lease of the receiver's ring, scatter into its pages."""

    name = "staged"
    version = 1
    exposes_pages = False

    def refuse(self, source: Site, target: Site, parts: Sequence[Share]) -> str | None:
        """Any two layouts will do."""
        return None

    def send(self, job: Job) -> StagedLayout:
        """What to gather."""
        return job.view.layout(job.segment)

    def receive(self, job: Job) -> StagedLayout:
        """What to scatter."""
        return job.view.layout(job.segment)

    def count(self, job: Job) -> int:
        """One bulk write."""
        return 1
