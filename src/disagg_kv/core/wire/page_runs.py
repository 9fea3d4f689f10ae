"""Page tables as ``Expect`` carries them: page ids, or runs of them where that is shorter.

Page ids are little-endian int32. A run is two of them: its first page, and its length. The length is negative where one
page comes again and again, as the null page does before a sliding window.

A receiver knows from ``count`` and ``runs`` how many bytes there must be, before it reads any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...errors import ConfigurationError, OversizeError, RemoteProtocolError
from ...geometry import I32, I64, PageTable
from ...ids import GroupId
from .frames import MAX_TABLE, WireTable

ID = 4
RUN = 8
"""Bytes of a page id, and of a run."""


def tables_to_wire(tables: Iterable[PageTable]) -> tuple[WireTable, ...]:
    """Each in the shorter form, with all its bytes."""
    return tuple(_to_wire(table) for table in tables)


def _to_wire(table: PageTable) -> WireTable:
    pages = table.pages
    runs = _runs_of(pages)
    if runs is None:
        return WireTable(table.group, table.first, len(pages), 0, pages.astype("<i4").tobytes())
    return WireTable(table.group, table.first, len(pages), len(runs), runs.astype("<i4").tobytes())


def _runs_of(pages: I32) -> I32 | None:
    """First page and length of each run ``[n, 2]``; None: page ids are not longer."""
    if len(pages) < 1 + RUN // ID:
        return None
    step = np.diff(pages)
    goes_on = (step == 1) | (step == 0)
    # A page begins a run where the step to it is neither, or where the step before it went on in the other way.
    begins = ~goes_on
    begins[1:] |= goes_on[:-1] & (step[1:] != step[:-1])
    if (1 + int(np.count_nonzero(begins))) * RUN >= len(pages) * ID:
        return None
    starts = np.concatenate(([0], 1 + np.flatnonzero(begins)))
    lengths = np.diff(np.append(starts, len(pages)))
    again = (lengths > 1) & (step[np.minimum(starts, len(step) - 1)] == 0)
    return np.stack([pages[starts], np.where(again, -lengths, lengths)], axis=1).astype(np.int32)


def size_of(table: WireTable) -> int:
    """Bytes that its pages must have."""
    return RUN * table.runs if table.runs else ID * table.count


def excess(tables: Sequence[WireTable], most: int) -> OversizeError | None:
    """Why a request cannot expose these pages: more than ``most`` page ids, or more bytes than one frame carries."""
    if (count := sum(table.count for table in tables)) > most:
        return OversizeError("page ids of one request (request_pages)", count, most, "ids")
    if (nbytes := sum(map(size_of, tables))) > MAX_TABLE:
        return OversizeError("bytes of page tables in one frame", nbytes, MAX_TABLE)
    return None


def check_tables(tables: Sequence[WireTable], most: int) -> None:
    """Raise a RemoteProtocolError unless the tables can be, and name at most ``most`` page ids; before any is read."""
    if (count := sum(table.count for table in tables)) > most:
        raise RemoteProtocolError(f"{count} page ids of one request; at most {most} are allowed (request_pages)")
    if len({table.group for table in tables}) < len(tables):
        raise RemoteProtocolError(f"page tables of groups {[t.group for t in tables]}: one is given twice")
    for table in tables:
        if table.runs and RUN * table.runs >= ID * table.count:
            raise _wrong(table, f"{table.runs} runs of {table.count} pages are no shorter than page ids")
        if len(table.pages) != (size := size_of(table)):
            raise _wrong(table, f"{len(table.pages)} bytes of {size}")


def tables_from_wire(wire: Sequence[WireTable], most: int) -> Mapping[GroupId, PageTable]:
    """Tables by group, of at most ``most`` page ids; they are checked against the groups when rows are known.

    Raises:
        RemoteProtocolError: they cannot be.
    """
    check_tables(wire, most)
    tables: dict[GroupId, PageTable] = {}
    for one in wire:
        numbers: I32 = np.frombuffer(one.pages, "<i4")
        try:
            pages = _unfolded(one, numbers.reshape(-1, 2).astype(np.int64)) if one.runs else numbers
            tables[GroupId(one.group)] = PageTable(GroupId(one.group), pages, one.first)
        except ConfigurationError as exc:
            raise _wrong(one, str(exc)) from exc
    return tables


def _unfolded(table: WireTable, runs: I64) -> I64:
    """The page ids of runs, which are checked first: what they say decides how much memory that takes."""
    first, lengths = runs[:, 0], np.abs(runs[:, 1])
    if int(lengths.min()) == 0 or int(lengths.sum()) != table.count:
        raise _wrong(table, f"runs of {int(lengths.sum())} pages, of which none may be empty, for {table.count}")
    ends = first + np.where(runs[:, 1] > 0, lengths, 1)
    if int(first.min()) < 0 or int(ends.max()) > 1 << 31:
        raise _wrong(table, f"runs of pages {int(first.min())} to {int(ends.max()) - 1}")
    # Sorted by their first page: one number of both sorts several times faster than an index.
    ascending = np.sort(first << 32 | ends)
    starts, ends_there = ascending >> 32, ascending & (1 << 32) - 1
    # One page may come again, if it is the null page, which its table's check knows.
    if (np.minimum(ends_there[1:], np.maximum.accumulate(ends_there)[:-1]) - starts[1:] > 1).any():
        raise _wrong(table, "runs overlap")
    steps = np.repeat((runs[:, 1] > 0).astype(np.int64), lengths)
    steps[np.cumsum(lengths) - lengths] = first - np.concatenate(([0], ends[:-1] - 1))
    return np.cumsum(steps, out=steps)


def _wrong(table: WireTable, problem: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"page table of group {table.group!r}: {problem}")
