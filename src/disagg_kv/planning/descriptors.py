"""One-sided writes from pages to pages, without staging: per token and head slice, or per run of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from attrs import frozen

from ..errors import GeometryError
from ..geometry import I64, Group, PageTable, Plane, Share, Site, places
from ..ids import GroupId
from .base import EVERY, RowRange, Segment, Writes
from .staged import part_view

Tables = Mapping[GroupId, PageTable]

REFUSALS, COUNTS = 256, 1024
"""Answers about pairs of pools, and about segments of such pairs, that are kept, those used last."""


@frozen
class Run:
    """The same rows of the same units of one plane on both sides; units are counted within each plane.

    Args:
        source, target: the planes; source_group, target_group: their page spaces.
        source_unit, target_unit: the first unit on either side.
        units: how many; unit_bytes: bytes of one.
        start, stop: the rows.
    """

    source: Plane
    target: Plane
    source_group: Group
    target_group: Group
    source_unit: int
    target_unit: int
    units: int
    unit_bytes: int
    start: int
    stop: int

    def dense(self) -> bool:
        """True where the units of a row follow one another on both sides."""
        return self.units == 1 or self.source.unit_stride == self.target.unit_stride == self.unit_bytes


def runs(source: Site, target: Site, parts: Sequence[Share], segment: Segment, rows: RowRange = EVERY) -> Iterator[Run]:
    """The planes that a segment of ``parts`` touches, in the order of the bytes of a staged segment.

    Raises:
        GeometryError: a pool does not have what the parts name.
    """
    given = tuple(parts)
    ours, theirs = (part_view(site, given, source.spec).for_rows(rows).layout(segment) for site in (source, target))
    source_groups, target_groups = ({g.id: g for g in site.groups} for site in (source, target))
    columns = (ours.plane, theirs.plane, ours.first_unit, theirs.first_unit, ours.units, ours.row_start, ours.row_stop)
    for a, b, source_unit, target_unit, units, start, stop in zip(*(c.tolist() for c in columns), strict=True):
        one, other = source.planes[a], target.planes[b]
        yield Run(
            one,
            other,
            source_groups[one.group],
            target_groups[other.group],
            source_unit,
            target_unit,
            units,
            source.spec.component(one.layer, one.component).unit_bytes,
            start,
            stop,
        )


def slice_writes(
    source: Site,
    target: Site,
    parts: Sequence[Share],
    segment: Segment,
    source_tables: Tables,
    target_tables: Tables,
    rows: RowRange = EVERY,
) -> Writes:
    """One write per row and head slice; where a side keeps the units of a row apart (HND), one per row and unit.

    Args:
        source: the writer's pool.
        target: the pool written to; its pages may have other sizes and strides.
        parts: what the writer was elected to send.
        segment: rows and layers.
        source_tables: the room's pages on the writer's side.
        target_tables: the room's pages on the target's side.
        rows: which rows of the room are awaited.

    Raises:
        GeometryError: a page table is missing or does not have the rows, or a pool lacks what the parts name.
    """
    given = list(runs(source, target, parts, segment, rows))
    _check_tables(given, source_tables, target_tables)
    batch = _Batch(sum(slice_count(run) for run in given))
    cells: dict[tuple[Group, int, int, bool], tuple[I64, I64]] = {}
    for run in given:
        sides: list[I64] = []
        for plane, group, unit, tables, ours in (
            (run.source, run.source_group, run.source_unit, source_tables, True),
            (run.target, run.target_group, run.target_unit, target_tables, False),
        ):
            key = (group, run.start, run.stop, ours)
            if key not in cells:
                cells[key] = places(tables[group.id], group.rows_per_page, run.start, run.stop)
            pages, slots = cells[key]
            offsets = plane.offset + unit * plane.unit_stride + pages * plane.page_stride + slots * plane.row_stride
            if not run.dense():
                offsets = (offsets[:, None] + np.arange(run.units) * plane.unit_stride).ravel()
            sides.append(offsets)
        nbytes = run.unit_bytes * (run.units if run.dense() else 1)
        batch.put(run, sides[0], sides[1], nbytes)
    return batch.writes


def slice_count(run: Run) -> int:
    """How many writes :func:`slice_writes` makes of a run."""
    return _slices(run, run.start, run.stop)


def _slices(run: Run, start: int, stop: int) -> int:
    return (stop - start) * (1 if run.dense() else run.units)


@frozen
class _Kind:
    """Planes of some layers that take equal numbers of writes of any segment: most layers do.

    Args:
        run: one of them; its rows mean nothing.
        index, ways: which of how many near-equal pieces of a run of rows they have.
        low, high: the rows that are needed of them.
        alike: how many they are.
    """

    run: Run
    index: int
    ways: int
    low: int
    high: int
    alike: int

    def rows(self, segment: Segment) -> tuple[int, int]:
        """Which rows of a segment they have; none where the second is not above the first."""
        low = max(self.low, segment.start)
        needed = max(min(self.high, segment.stop) - low, 0)
        return low + needed * self.index // self.ways, low + needed * (self.index + 1) // self.ways


@lru_cache(COUNTS)
def _kinds(
    source: Site, target: Site, parts: tuple[Share, ...], first: int, last: int, state: bool, rows: RowRange
) -> tuple[_Kind, ...]:
    """The planes of some layers, by kind. Kept, by value: a room is cut into many segments of the same layers."""
    box = Segment(0, 1, first, last, state)
    ours, theirs = (part_view(site, parts, source.spec).for_rows(rows).planes(box) for site in (source, target))
    columns = (ours.plane, theirs.plane, ours.units, ours.index, ours.ways, ours.lows, ours.highs)
    found: dict[tuple[int, ...], tuple[Run, int]] = {}
    for a, b, units, *bounds in zip(*(c.tolist() for c in columns), strict=True):
        one, other = source.planes[a], target.planes[b]
        group, unit_bytes = source.group(one.group), source.spec.component(one.layer, one.component).unit_bytes
        kind = (*bounds, units, unit_bytes, group.rows_per_page, one.row_stride, one.unit_stride, other.unit_stride)
        run, alike = found.get(kind, (None, 0))
        if run is None:
            run = Run(one, other, group, target.group(other.group), 0, 0, units, unit_bytes, 0, 1)
        found[kind] = run, alike + 1
    return tuple(_Kind(run, kind[0], kind[1], kind[2], kind[3], alike) for kind, (run, alike) in found.items())


def _total(
    count: Callable[[Run, int, int], int],
    source: Site,
    target: Site,
    parts: tuple[Share, ...],
    segment: Segment,
    rows: RowRange,
) -> int:
    total = 0
    for kind in _kinds(source, target, parts, segment.first, segment.last, segment.state, rows):
        start, stop = kind.rows(segment)
        if start < stop:
            total += kind.alike * count(kind.run, start, stop)
    return total


def slice_total(source: Site, target: Site, parts: tuple[Share, ...], segment: Segment, rows: RowRange) -> int:
    """How many writes :func:`slice_writes` makes of a segment."""
    return _total(_slices, source, target, parts, segment, rows)


def refuse_direct(source: Site, target: Site, parts: Sequence[Share]) -> str | None:
    """Why the two pools cannot exchange whole pages of these parts, with the numbers; None: they can."""
    return _refuse_direct(source, target, tuple(parts))


@lru_cache(REFUSALS)
def _refuse_direct(source: Site, target: Site, parts: tuple[Share, ...]) -> str | None:
    layers = [layer for part in parts for layer in part.layers]
    if not layers:
        return None
    every_row = max(part.row_ways for part in parts)
    tokens = Segment(0, every_row, min(layers), max(layers) + 1)
    states = Segment(0, source.spec.state_rows(), tokens.first, tokens.last, state=True)
    for run in (*runs(source, target, parts, tokens), *runs(source, target, parts, states)):
        where = f"layer {run.source.layer}, {run.source.component!r}"
        held, wanted = (
            sum(len(r) for r in site.shard.units(run.source.layer, run.source.component)) for site in (source, target)
        )
        rows, theirs = run.source_group.rows_per_page, run.target_group.rows_per_page
        if rows != theirs and run.source.group not in source.state_groups:
            return f"{where}: pages of {rows} rows here and of {theirs} rows there"
        if not run.units == held == wanted:
            return f"{where}: {run.units} units to send, but rows have {held} units here and {wanted} there"
        if rows > 1 and run.source.row_stride != run.target.row_stride:
            return f"{where}: rows are {run.source.row_stride} bytes apart here and {run.target.row_stride} there"
        if held > 1 and run.source.unit_stride != run.target.unit_stride:
            return f"{where}: units are {run.source.unit_stride} bytes apart here and {run.target.unit_stride} there"
    return None


def direct_writes(
    source: Site,
    target: Site,
    parts: Sequence[Share],
    segment: Segment,
    source_tables: Tables,
    target_tables: Tables,
    rows: RowRange = EVERY,
) -> Writes:
    """The bytes of :func:`slice_writes` in as few writes as their addresses allow: whole pages and runs of pages.

    Args and errors are those of :func:`slice_writes`; a :class:`GeometryError` too where :func:`refuse_direct` refuses.
    """
    if reason := refuse_direct(source, target, parts):
        raise GeometryError(f"direct: {reason}")
    given = list(runs(source, target, parts, segment, rows))
    _check_tables(given, source_tables, target_tables)
    batch = _Batch(sum(direct_count(run) for run in given))
    for run in given:
        size = run.source_group.rows_per_page
        ours, theirs = source_tables[run.source_group.id], target_tables[run.target_group.id]
        for low, high, first, last in _pieces(run.start, run.stop, size):
            inside, nbytes = _inside(run, low, high)
            here = ours.pages[first - ours.first // size : last - ours.first // size].astype(np.int64)
            there = theirs.pages[first - theirs.first // size : last - theirs.first // size].astype(np.int64)
            batch.put(
                run,
                (run.source.offset + here[:, None] * run.source.page_stride + inside).ravel(),
                (run.target.offset + there[:, None] * run.target.page_stride + inside).ravel(),
                np.tile(nbytes, len(here)),
            )
    return coalesce(batch.writes)


def direct_total(source: Site, target: Site, parts: tuple[Share, ...], segment: Segment, rows: RowRange) -> int:
    """At most how many writes :func:`direct_writes` makes of a segment."""
    return _total(_pages, source, target, parts, segment, rows)


def direct_count(run: Run) -> int:
    """How many writes :func:`direct_writes` makes of a run if no two of its pages follow one another in memory."""
    return _pages(run, run.start, run.stop)


def _pages(run: Run, start: int, stop: int) -> int:
    plane, total = run.source, 0
    for low, high, first, last in _pieces(start, stop, run.source_group.rows_per_page):
        runs_of_one, _ = _byte_runs(high - low, plane.row_stride, run.units, plane.unit_stride, run.unit_bytes)
        total += (last - first) * len(runs_of_one)
    return total


def coalesce(writes: Writes) -> Writes:
    """The same bytes in as few writes as possible: those that follow one another on both sides become one."""
    if not len(writes):
        return writes
    order = np.lexsort((writes.local_off, writes.remote, writes.local))
    local, remote, nbytes = writes.local[order], writes.remote[order], writes.nbytes[order]
    local_off, remote_off = writes.local_off[order], writes.remote_off[order]
    follows = (local[1:] == local[:-1]) & (remote[1:] == remote[:-1])
    follows &= local_off[:-1] + nbytes[:-1] == local_off[1:]
    follows &= remote_off[:-1] + nbytes[:-1] == remote_off[1:]
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Writes(local[starts], local_off[starts], remote[starts], remote_off[starts], np.add.reduceat(nbytes, starts))


class _Batch:
    """Arrays of known length that fill up run by run."""

    def __init__(self, n: int) -> None:
        self.writes = Writes(
            np.empty(n, np.int32),
            np.empty(n, np.int64),
            np.empty(n, np.int32),
            np.empty(n, np.int64),
            np.empty(n, np.int64),
        )
        self._used = 0

    def put(self, run: Run, local_off: I64, remote_off: I64, nbytes: int | I64) -> None:
        place = slice(self._used, self._used + len(local_off))
        self.writes.local[place] = run.source.buffer
        self.writes.local_off[place] = local_off
        self.writes.remote[place] = run.target.buffer
        self.writes.remote_off[place] = remote_off
        self.writes.nbytes[place] = nbytes
        self._used = place.stop


def _check_tables(given: Sequence[Run], source_tables: Tables, target_tables: Tables) -> None:
    needed: dict[tuple[bool, GroupId], tuple[Group, int, int]] = {}
    for run in given:
        for ours, group in ((True, run.source_group), (False, run.target_group)):
            _, start, stop = needed.get((ours, group.id), (group, run.start, run.stop))
            needed[ours, group.id] = group, min(start, run.start), max(stop, run.stop)
    for (ours, _), (group, start, stop) in needed.items():
        tables = source_tables if ours else target_tables
        if group.id not in tables:
            raise GeometryError(f"no page table for group {group.id!r}; there are {sorted(tables)}")
        tables[group.id].check(group, start, stop)


def _pieces(start: int, stop: int, page_rows: int) -> list[tuple[int, int, int, int]]:
    """Cut rows at pages: (first slot, last slot, first page, last page) of the ragged ends and of the whole pages."""
    first, low = divmod(start, page_rows)
    last, high = divmod(stop, page_rows)
    if first == last:
        return [(low, high, first, first + 1)]
    pieces = []
    if low:
        pieces.append((low, page_rows, first, first + 1))
        first += 1
    if first < last:
        pieces.append((0, page_rows, first, last))
    if high:
        pieces.append((0, high, last, last + 1))
    return pieces


def _inside(run: Run, low: int, high: int) -> tuple[I64, I64]:
    """The runs of bytes, offset and length, that the slots ``[low, high)`` of one page of the source make up."""
    plane = run.source
    offsets, lengths = _byte_runs(high - low, plane.row_stride, run.units, plane.unit_stride, run.unit_bytes)
    return offsets + low * plane.row_stride, lengths


@lru_cache(COUNTS)
def _byte_runs(rows: int, row_stride: int, units: int, unit_stride: int, unit_bytes: int) -> tuple[I64, I64]:
    """Offset and length of the runs of bytes that so many rows make up; kept, and so read-only."""
    cells = np.sort((np.arange(rows)[:, None] * row_stride + np.arange(units) * unit_stride).ravel())
    starts = np.flatnonzero(np.concatenate([[True], np.diff(cells) != unit_bytes]))
    offsets, lengths = cells[starts], np.diff(np.append(starts, len(cells))) * unit_bytes
    offsets.flags.writeable = lengths.flags.writeable = False
    return offsets, lengths
