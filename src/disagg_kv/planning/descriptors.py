"""One-sided writes from pages to pages, without staging: per token and head slice, or per run of pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..errors import GeometryError
from ..geometry import I64, Group, PageTable, places
from ..ids import GroupId
from .base import Segment, Writes
from .cache import PlanCache
from .pair import PairPlan, Run
from .staged import check_tables

Tables = Mapping[GroupId, PageTable]

_page_runs: PlanCache[tuple[int, int, int, int, int], tuple[I64, I64]] = PlanCache()


def slice_writes(pair: PairPlan, segment: Segment, source_tables: Tables, target_tables: Tables) -> Writes:
    """One write per row and head slice; where a side keeps the units of a row apart (HND), one per row and unit.

    Args:
        pair: what is sent; the pools may differ in the sizes and strides of their pages.
        segment: rows and layers.
        source_tables: the room's pages on the writer's side.
        target_tables: the room's pages on the target's side.

    Raises:
        GeometryError: a page table is missing or does not have the rows, or a pool lacks what the parts name.
    """
    given = list(pair.runs(segment))
    _check_tables(pair, segment, source_tables, target_tables)
    batch = _Batch(sum(_slices(run, run.start, run.stop) for run in given))
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


def _slices(run: Run, start: int, stop: int) -> int:
    """How many writes :func:`slice_writes` makes of these rows of a run."""
    return (stop - start) * (1 if run.dense() else run.units)


def _total(count: Callable[[Run, int, int], int], pair: PairPlan, segment: Segment) -> int:
    total = 0
    for kind in pair.kinds(segment):
        start, stop = kind.rows(segment)
        if start < stop:
            total += kind.planes * count(kind.run, start, stop)
    return total


def slice_total(pair: PairPlan, segment: Segment) -> int:
    """How many writes :func:`slice_writes` makes of a segment."""
    return _total(_slices, pair, segment)


def direct_writes(pair: PairPlan, segment: Segment, source_tables: Tables, target_tables: Tables) -> Writes:
    """The bytes of :func:`slice_writes` in as few writes as their addresses allow: whole pages and runs of pages.

    Args and errors are those of :func:`slice_writes`; a :class:`GeometryError` too where the pair refuses.
    """
    if pair.direct_refusal is not None:
        raise GeometryError(f"direct: {pair.direct_refusal}")
    given = list(pair.runs(segment))
    _check_tables(pair, segment, source_tables, target_tables)
    batch = _Batch(sum(_pages(run, run.start, run.stop) for run in given))
    for run in given:
        size = run.source_group.rows_per_page
        ours, theirs = source_tables[run.source_group.id], target_tables[run.target_group.id]
        for low, high, first, last in _pieces(run.start, run.stop, size):
            plane = run.source
            inside, nbytes = _byte_runs(high - low, plane.row_stride, run.units, plane.unit_stride, run.unit_bytes)
            inside = inside + low * plane.row_stride
            here = ours.pages[first - ours.first // size : last - ours.first // size].astype(np.int64)
            there = theirs.pages[first - theirs.first // size : last - theirs.first // size].astype(np.int64)
            batch.put(
                run,
                (plane.offset + here[:, None] * plane.page_stride + inside).ravel(),
                (run.target.offset + there[:, None] * run.target.page_stride + inside).ravel(),
                np.tile(nbytes, len(here)),
            )
    return coalesce(batch.writes)


def direct_total(pair: PairPlan, segment: Segment) -> int:
    """At most how many writes :func:`direct_writes` makes of a segment."""
    return _total(_pages, pair, segment)


def _pages(run: Run, start: int, stop: int) -> int:
    """How many writes :func:`direct_writes` makes of these rows if no two pages follow one another in memory."""
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


def _check_tables(pair: PairPlan, segment: Segment, source_tables: Tables, target_tables: Tables) -> None:
    check_tables(pair.source, pair.source_view.layout(segment), source_tables)
    check_tables(pair.target, pair.target_view.layout(segment), target_tables)


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


def _byte_runs(rows: int, row_stride: int, units: int, unit_stride: int, unit_bytes: int) -> tuple[I64, I64]:
    """Offset and length of the runs of bytes that rows of a page make up; remembered, and so read-only."""
    key = rows, row_stride, units, unit_stride, unit_bytes
    found = _page_runs.get(key)
    if found is not None:
        return found
    cells = np.sort((np.arange(rows)[:, None] * row_stride + np.arange(units) * unit_stride).ravel())
    starts = np.flatnonzero(np.concatenate([[True], np.diff(cells) != unit_bytes]))
    offsets, lengths = cells[starts], np.diff(np.append(starts, len(cells))) * unit_bytes
    offsets.flags.writeable = lengths.flags.writeable = False
    return _page_runs.keep(key, (offsets, lengths))
