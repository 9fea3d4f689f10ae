"""A decode engine's handle of a room. Every call checks its arguments before it changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from ... import arguments
from ...core import RoomKey
from ...errors import AbortedError, EndpointBrokenError, GeometryError, LocalProtocolError
from ...geometry import ENDLESS, PageTable
from ...ids import GroupId
from ...memory import Event, MemoryPool
from ...strategies import Selection
from ..expectation import Expectation, after, first_row
from ..handle import RoomHandle, check_states, check_tables
from ..loop.driver import Driver

if TYPE_CHECKING:
    from .rooms import DecodeSide


@frozen
class CheckedExpectation:
    """An :class:`~disagg_kv.endpoints.Expectation`, checked against the pool.

    Args:
        start: first row that prefill sends.
        stop: one past the last row; None: where prefill ends.
        most: the largest ``stop`` that the pages allow.
        tables: pages and slots of states by group, from ``start`` on.
        aux: the aux row to fill.
        least: the smallest ``stop`` that prefill may have.
        ready: fires once the pages may be written; None: they may.
    """

    start: int
    stop: int | None
    most: int
    tables: Mapping[GroupId, PageTable]
    aux: int | None
    least: int = 0
    ready: Event | None = None


class ReceptionHandle(RoomHandle):
    """A room on a decode rank; see :class:`~disagg_kv.endpoints.api.Reception`."""

    def __init__(self, key: RoomKey, pool: MemoryPool, driver: Driver, side: DecodeSide, selection: Selection) -> None:
        super().__init__(key.room)
        self._selection = selection
        self._key = key
        self._pool = pool
        self._driver = driver
        self._side = side
        self._expected = False

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        """See :meth:`~disagg_kv.endpoints.api.Reception.expect`."""
        where = self._name
        wanted = arguments.one(expectation, f"{where}: expectation", Expectation)
        if self._expected:
            raise LocalProtocolError(f"{where}: expect was called already")
        checked = self._checked(where, wanted)
        if wanted.aux is not None:
            self._pool.read_aux(wanted.aux)
        self._driver.check(where)
        self._expected = True
        self._driver.post(partial(self._side.expect, self._key, checked), where)
        return {g.id: checked.start for g in self._pool.site.token_groups}

    def _checked(self, where: str, wanted: Expectation) -> CheckedExpectation:
        """The expectation in terms of this pool; see :meth:`expect` for errors."""
        site, stop = self._pool.site, wanted.stop
        start = first_row(where, site, wanted.held, self._selection)
        ends = [t.first + len(t.pages) * site.group(t.group).rows_per_page for t in wanted.pages]
        most = min(ends, default=start if site.token_groups else ENDLESS) if stop is None else stop
        beyond = {group: rows for group, rows in wanted.held.items() if stop is not None and rows > stop}
        if beyond or start > most:
            raise GeometryError(f"{where}: a held prefix {beyond or start} of {most} rows")
        if wanted.least > most:
            raise GeometryError(f"{where}: least {wanted.least}, but there are pages for {most} rows")
        starts = site.first_rows(start, stop)
        tables = after(site, check_tables(self.room, site, wanted.pages, starts, most), starts)
        slots = check_states(self.room, site, wanted.state)
        try:
            site.check_owners((*wanted.pages, *wanted.state))
        except GeometryError as exc:
            raise GeometryError(f"{where}: {exc}") from exc
        least = max(start, wanted.least)
        return CheckedExpectation(start, stop, most, {**tables, **slots}, wanted.aux, least, wanted.ready)

    def abort(self, reason: str) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Handle.abort`."""
        arguments.one(reason, "reason", str)
        if not self._driver.closed:
            with suppress(EndpointBrokenError):  # which has failed the room
                error = AbortedError(f"{self._name}: {reason}")
                self._driver.post(partial(self._side.abort, self._key, error))
