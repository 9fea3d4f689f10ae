"""The path of a strategy: how bytes cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen

from ..geometry import PageTable, Part, Site
from ..ids import GroupId
from ..planning import EVERY, PartView, RowRange, Segment, StagedLayout, Writes

Tables = Mapping[GroupId, PageTable]


@frozen
class Job:
    """One writer's part of one segment, as both sides of it see it.

    Args:
        source: the writer's pool.
        target: the receiver's pool.
        parts: what the writer was elected to send to this receiver.
        view: ``parts`` in the pool of whoever asks: the writer for ``send``, the receiver for ``receive``; for
            ``rows`` already.
        segment: which rows and layers.
        source_tables: the room's pages at the writer; empty for ``receive``.
        target_tables: the room's pages at the receiver, where they are exposed; else empty for ``send``.
        rows: which rows of the room are awaited.
    """

    source: Site
    target: Site
    parts: Sequence[Part]
    view: PartView
    segment: Segment
    source_tables: Tables
    target_tables: Tables
    rows: RowRange = EVERY


class Path(Protocol):
    """How the bytes of one part cross. Pure: it plans, the endpoints act.

    A path has code on both sides, so the endpoints agree on (name, version) before they use it. One that exposes
    pages writes straight into the receiver's pages and plans ``Writes``. One that does not goes through a lease of
    the receiver's ring: ``send`` says what to gather, ``receive`` what to scatter, with equal sizes and order.
    """

    name: str
    version: int
    exposes_pages: bool

    def refuse(self, source: Site, target: Site, parts: Sequence[Part]) -> str | None:
        """Why this path cannot move these parts between these pools, with the numbers; None: it can."""
        ...

    def send(self, job: Job) -> Writes | StagedLayout:
        """What the writer posts (exposed pages: buffer numbers of both sites) or gathers.

        Raises:
            GeometryError: page tables that do not cover the segment.
        """
        ...

    def receive(self, job: Job) -> StagedLayout:
        """What the receiver scatters; never called where pages are exposed."""
        ...

    def count(self, job: Job) -> int:
        """How many writes the job takes, at most; tables are not looked at."""
        ...
