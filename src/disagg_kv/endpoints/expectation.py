"""The rows that a decode engine awaits and those that it holds: what it says, and checks of that on both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from .. import arguments
from ..core.wire.frames import Expect
from ..errors import ConfigurationError, GeometryError, RemoteProtocolError
from ..geometry import PageTable, Site
from ..ids import GroupId, Rank
from ..memory import Event
from ..strategies import Selection


def _stop(given: int | None) -> int | None:
    return None if given is None else arguments.count(given, "stop", error=GeometryError)


def _aux(given: int | None) -> int | None:
    return None if given is None else arguments.count(given, "aux", error=GeometryError)


def _least(given: int) -> int:
    return arguments.count(given, "least", error=GeometryError)


def _ready(given: Event | None) -> Event | None:
    return arguments.event(given, "ready")


def _copy(table: PageTable) -> PageTable:
    return PageTable(table.group, table.pages.copy(), table.first)


def _pages(given: Sequence[PageTable]) -> tuple[PageTable, ...]:
    return tuple(map(_copy, arguments.several(given, "pages", PageTable, GeometryError)))


def _state(given: Sequence[PageTable]) -> tuple[PageTable, ...]:
    return tuple(map(_copy, arguments.several(given, "state", PageTable, GeometryError)))


def _held(given: Mapping[GroupId, int] | Mapping[str, int] | None) -> Mapping[GroupId, int]:
    return rows_by_group("expectation", given)


@frozen(eq=False)
class Expectation:
    """The rows that a decode engine awaits, and where they go. The engine may reuse its arrays afterwards.

    Args:
        stop: one past the last row; None: where prefill ends, if the pages suffice. If prefill ends later, its rows
            from ``stop`` on are not sent. If it ends earlier, the room fails. See ``least``.
        pages: one table per group of tokens. It begins at the end of the held prefix, rounded down, or before that;
            earlier pages are left alone. A group that awaits no rows needs no table. Where a window slides, the table
            begins at or before the window of ``stop``, whatever is held. Earlier rows may lie in the null page.
        held: leading rows per group that are in the pages already; a group that is left out holds none. All ranks of an
            instance must give the same, or the room fails. A held row counts only while the engine keeps it; see
            :class:`~disagg_kv.prefix.PrefixCache`.
        state: the room's slot in every group of states.
        aux: the aux row to fill, without which the room fails; None: no aux data is awaited.
        least: where ``stop`` is None: if prefill ends before this row, the room fails.
        ready: fires once the pages and slots may be written, for example at the end of a forward pass that still
            writes to them; None: they may be written now. Paths that expose pages ask prefill for rows only then; the
            others ask at once, and rows wait in the staging ring.

    Raises:
        GeometryError: ``pages`` or ``state`` is no list of tables; ``stop``, ``aux``, ``least`` or a number of rows is
            no count; ``least`` beside ``stop``.
        ConfigurationError: another argument of another type.
    """

    stop: int | None = field(converter=_stop)
    pages: Sequence[PageTable] = field(converter=_pages)
    held: Mapping[GroupId, int] = field(default=None, converter=_held, kw_only=True)
    state: Sequence[PageTable] = field(default=(), converter=_state, kw_only=True)
    aux: int | None = field(default=None, converter=_aux, kw_only=True)
    least: int = field(default=0, converter=_least, kw_only=True)
    ready: Event | None = field(default=None, converter=_ready, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.least and self.stop is not None:
            raise GeometryError(f"least {self.least} beside stop {self.stop}: prefill must reach stop anyway")


def page_multiple(site: Site) -> int:
    """A held prefix ends at a multiple of this many rows: at a page's end in every group."""
    return math.lcm(*[group.rows_per_page for group in site.token_groups])


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
