"""The rows that a decode engine awaits, and where they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from .. import arguments
from ..errors import GeometryError
from ..geometry import PageTable
from ..ids import GroupId
from ..memory import Event
from .cached_prefix import rows_by_group


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
    return tuple(_copy(one) for one in arguments.several(given, "pages", PageTable, GeometryError))


def _state(given: Sequence[PageTable]) -> tuple[PageTable, ...]:
    return tuple(_copy(one) for one in arguments.several(given, "state", PageTable, GeometryError))


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
