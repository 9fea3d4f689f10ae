"""Held prefixes: checks of what decode's engine gives, and of what decode sends to prefill."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .. import arguments
from ..core.wire.frames import Expect
from ..errors import ConfigurationError, GeometryError, RemoteProtocolError
from ..geometry import PageTable, Site
from ..ids import GroupId, Rank
from ..strategies import Selection


def page_multiple(site: Site) -> int:
    """A held prefix ends at a multiple of this many rows: at a page's end in every group."""
    return math.lcm(*(group.rows_per_page for group in site.token_groups))


def rows_by_group(where: str, held: Mapping[GroupId, int] | Mapping[str, int] | None) -> dict[GroupId, int]:
    """A plain copy of the rows that an engine holds, with plain numbers; None: nothing.

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


def first_row(where: str, site: Site, given: Mapping[GroupId, int], selection: Selection) -> int:
    """The first row that crosses.

    Raises:
        GeometryError: a group that the pool does not have.
        ConfigurationError: the selection does not take what is held, or it leaves out what is not, or part of a page.
    """
    for group in given:
        site.group(group)
    held = {group.id: given.get(group.id, 0) for group in site.token_groups}
    rows, fewest = page_multiple(site), min(held.values(), default=0)
    try:
        start = arguments.count(selection.start(held, rows), f"selection {selection.name!r}: start")
    except ConfigurationError as exc:
        raise ConfigurationError(f"{where}: {exc}") from exc
    if start > fewest or start % rows:
        wanted = f"a multiple of {rows}, and at most {fewest}, is needed"
        raise ConfigurationError(f"{where}: selection {selection.name!r} begins at row {start}: {wanted}")
    return start


def after(site: Site, tables: Mapping[GroupId, PageTable], starts: Mapping[GroupId, int]) -> dict[GroupId, PageTable]:
    """Tables without the pages before ``starts``: others may be reading those, so no peer learns of them."""
    cut: dict[GroupId, PageTable] = {}
    for group, table in tables.items():
        rows = site.group(group).rows_per_page
        skip = max(0, (starts[group] - table.first) // rows)
        cut[group] = PageTable(group, table.pages[skip:], table.first + skip * rows)
    return cut


def check_start(
    room: str, frame: Expect, target: Site, selection: Selection, rank: Rank, others: Mapping[Rank, int]
) -> None:
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
        ConfigurationError: rows are held that our selection sends.
    """
    start, rows = frame.start, page_multiple(target)
    if start and not selection.accepts(start):
        raise ConfigurationError(
            f"{room}: decode rank {rank} holds {start} rows, but prefill's selection {selection.name!r} sends them"
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
