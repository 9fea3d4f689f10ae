"""Held prefixes: what decode takes of what its engine says, and what prefill accepts of what decode says."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ... import arguments
from ...errors import ConfigurationError, GeometryError, RemoteProtocolError
from ...geometry import PageTable, Site
from ...ids import GroupId, Rank
from ...protocol.frames import Expect

INCREMENTAL = "incremental"
"""The selection that sends only what decode lacks."""


def page_multiple(site: Site) -> int:
    """A held prefix ends at a multiple of so many rows: at a page's end in every group."""
    return math.lcm(*(group.rows_per_page for group in site.token_groups))


def rows_by_group(where: str, held: Mapping[GroupId, int] | None) -> dict[GroupId, int]:
    """A plain copy of what an engine says it holds, with plain numbers; None: nothing.

    Raises:
        GeometryError: a name that is none, or a number of rows that is none or negative.
        ConfigurationError: no mapping.
    """
    given = arguments.mapping({} if held is None else held, f"{where}: held")
    return {
        GroupId(arguments.one(group, f"{where}: held", str, GeometryError)): arguments.count(
            rows, f"{where}: held rows of group {arguments.shown(group)}", error=GeometryError
        )
        for group, rows in given.items()
    }


def taken(where: str, site: Site, given: Mapping[GroupId, int], selection: str) -> int:
    """The rows that count as held: the fewest of any group, rounded down to its pages.

    Raises:
        GeometryError: a group that the pool does not have.
        ConfigurationError: rows are held, but the endpoint's selection is another.
    """
    for group in given:
        site.group(group)
    if any(given.values()) and selection != INCREMENTAL:
        raise ConfigurationError(
            f"{where}: a held prefix {dict(given)} needs the selection 'incremental', the endpoint has {selection!r}"
        )
    fewest = min((given.get(group.id, 0) for group in site.token_groups), default=0)
    return fewest // page_multiple(site) * page_multiple(site)


def after(site: Site, tables: Mapping[GroupId, PageTable], starts: Mapping[GroupId, int]) -> dict[GroupId, PageTable]:
    """Tables without the pages before ``starts``: others may be reading those, so no peer learns of them."""
    cut: dict[GroupId, PageTable] = {}
    for group, table in tables.items():
        rows = site.group(group).rows_per_page
        skip = max(0, (starts[group] - table.first) // rows)
        cut[group] = PageTable(group, table.pages[skip:], table.first + skip * rows)
    return cut


def check_start(room: str, frame: Expect, target: Site, selection: str, rank: Rank, others: Mapping[Rank, int]) -> None:
    """Raise unless we can begin where a decode rank wants us to.

    Args:
        room: for messages.
        frame: what it says.
        target: its pool.
        selection: ours.
        rank: which of its instance it is.
        others: where ranks of its instance wanted us to begin that came before; ranks with nothing but states hold no
            tokens and do not count.

    Raises:
        RemoteProtocolError: not at a page's end, beyond the last row, or not where its other ranks do.
        ConfigurationError: rows are held, but our selection sends all.
    """
    start, rows = frame.start, page_multiple(target)
    if start and selection != INCREMENTAL:
        raise ConfigurationError(
            f"{room}: decode rank {rank} holds {start} rows, but prefill's selection is {selection!r}, "
            f"not {INCREMENTAL!r}"
        )
    if start % rows:
        raise RemoteProtocolError(f"{room}: decode rank {rank} holds {start} rows, which is no multiple of {rows}")
    if frame.stop is not None and start > frame.stop:
        raise RemoteProtocolError(f"{room}: decode rank {rank} holds {start} rows of {frame.stop}")
    for other, held in others.items():
        if held != start and target.token_groups:
            raise RemoteProtocolError(
                f"{room}: decode ranks disagree on the held prefix: rank {other} has {held} rows, rank {rank} {start}"
            )
