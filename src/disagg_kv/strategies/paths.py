"""The paths that come with the library."""

from __future__ import annotations

from ..errors import LocalProtocolError
from ..planning import PageCopy, PairPlan, StagedLayout, Writes, direct_writes, slice_writes
from ..planning.descriptors import direct_total, slice_total
from .base import Job, MoverName


class _Exposing:
    """A path that reaches pages of the receiver."""

    name: str

    def receive(self, job: Job) -> StagedLayout:
        """Nothing is received into staging."""
        raise LocalProtocolError(f"the {self.name} path scatters nothing")


class DirectPlanner(_Exposing):
    """Whole pages and runs of pages, coalesced by address; only between equal layouts."""

    name = "direct"
    version = 1
    mover: MoverName = "direct"

    def refuse(self, pair: PairPlan) -> str | None:
        """Needs equal page sizes and strides, and all units of a page."""
        return pair.direct_refusal

    def send(self, job: Job) -> Writes:
        """One write per run of pages."""
        return direct_writes(job.pair, job.segment, job.source_tables, job.target_tables)

    def count(self, job: Job) -> int:
        """At most one write per page and plane."""
        return direct_total(job.pair, job.segment)


class SlicePlanner(_Exposing):
    """One write per token and head slice: what every engine can do, and the baseline to beat."""

    name = "slice"
    version = 1
    mover: MoverName = "direct"

    def refuse(self, pair: PairPlan) -> str | None:
        """Any two layouts will do."""
        return None

    def send(self, job: Job) -> Writes:
        """One write per row and run of units."""
        return slice_writes(job.pair, job.segment, job.source_tables, job.target_tables)

    def count(self, job: Job) -> int:
        """One write per row and run of units."""
        return slice_total(job.pair, job.segment)


class StagedPlanner:
    """Gather into a slot, one bulk write into a lease of the receiver's ring, scatter into its pages."""

    name = "staged"
    version = 1
    mover: MoverName = "staged"

    def refuse(self, pair: PairPlan) -> str | None:
        """Any two layouts will do."""
        return None

    def send(self, job: Job) -> StagedLayout:
        """What to gather."""
        return job.pair.source_view.layout(job.segment)

    def receive(self, job: Job) -> StagedLayout:
        """What to scatter."""
        return job.pair.target_view.layout(job.segment)

    def count(self, job: Job) -> int:
        """One bulk write."""
        return 1


class MappedPlanner(_Exposing):
    """One kernel copies from the writer's pages into the receiver's, which the transport maps at the writer.

    Page sizes and layouts may differ; nothing is staged. Public measurements of kernels that write through NVLink
    (ParallelKittens, nvbandwidth) reach 93 to 97 % of the copy engine.
    """

    name = "mapped"
    version = 1
    mover: MoverName = "mapped"

    def refuse(self, pair: PairPlan) -> str | None:
        """Any two layouts will do."""
        return None

    def send(self, job: Job) -> PageCopy:
        """What to copy, from page to page."""
        return job.pair.page_copy(job.segment)

    def count(self, job: Job) -> int:
        """One launch at most: segments and destinations may share one."""
        return 1
