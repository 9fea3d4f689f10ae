"""What a decode engine holds of a room. Every call is checked before anything happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from attrs import frozen

from ... import arguments
from ...errors import AbortedError, ConfigurationError, EndpointBrokenError, GeometryError, LocalProtocolError
from ...geometry import ENDLESS, PageTable
from ...ids import GroupId
from ...memory import MemoryPool
from ...protocol import RoomKey, Verify
from ...strategies import Selection
from ..kept_pages import CachedPages, check_kept, kept_layers
from ..runtime.admission import Admission
from ..runtime.cached_prefix import after, first_row, rows_by_group
from ..runtime.handle import RoomHandle, check_states, check_tables, page_tables


@frozen
class Expectation:
    """What an engine awaits: rows ``[start, stop)`` (stop None: prefill's, up to ``most``) in these pages.

    ``kept`` are the pages of the rows before ``start``, where their sums are known.
    """

    start: int
    stop: int | None
    most: int
    tables: Mapping[GroupId, PageTable]
    aux: int | None
    tag: bytes
    kept: tuple[CachedPages, ...] = ()


class DecodeCommands(Protocol):
    """The endpoint, as its handles see it; nothing blocks."""

    @property
    def admission(self) -> Admission:
        """Whether calls are taken."""
        ...

    def expect(self, key: RoomKey, wanted: Expectation) -> None:
        """Rows are awaited."""
        ...

    def abort(self, key: RoomKey, error: AbortedError) -> None:
        """The engine gives the room up."""
        ...


class ReceptionHandle(RoomHandle):
    """A room on a decode rank; see :class:`~disagg_kv.endpoints.api.Reception`."""

    def __init__(
        self, key: RoomKey, pool: MemoryPool, office: DecodeCommands, selection: Selection, verify: Verify = "off"
    ) -> None:
        super().__init__(key.room)
        self._verify: Verify = verify
        self._selection = selection
        self._key = key
        self._pool = pool
        self._office = office
        self._expected = False

    def expect(
        self,
        stop: int | None,
        pages: Sequence[PageTable],
        *,
        held: Mapping[GroupId, int] | None = None,
        kept: Sequence[CachedPages] = (),
        state: Sequence[PageTable] = (),
        aux: int | None = None,
        tag: bytes = b"",
    ) -> Mapping[GroupId, int]:
        """See :meth:`~disagg_kv.endpoints.api.Reception.expect`."""
        where = f"room {self.room.hex()}"
        if self._expected:
            raise LocalProtocolError(f"{where}: expect was called already")
        stop = None if stop is None else arguments.count(stop, f"{where}: stop", error=GeometryError)
        tag = arguments.octets(tag, f"{where}: tag")
        aux = None if aux is None else arguments.count(aux, f"{where}: aux", error=GeometryError)
        pages = page_tables(self.room, "pages", pages)
        kept = arguments.several(kept, f"{where}: kept", CachedPages)
        held = rows_by_group(where, held)
        site = self._pool.site
        start = first_row(where, site, held, self._selection)
        ends = [t.first + len(t.pages) * site.group(t.group).rows_per_page for t in pages]
        most = min(ends, default=start if site.token_groups else ENDLESS) if stop is None else stop
        beyond = {group: rows for group, rows in held.items() if stop is not None and rows > stop}
        if beyond or start > most:
            raise GeometryError(f"{where}: a held prefix {beyond or start} of {most} rows")
        starts = site.first_rows(start, stop)
        tables = after(site, check_tables(self.room, site, pages, starts, most), starts)
        slots = check_states(self.room, site, state)
        summed = any(kept_layers(site, group.id) for group in site.token_groups)
        if start and not kept and summed and self._verify == "full":
            raise ConfigurationError(
                f"{where}: verify is 'full', but {start} rows are held whose pages have no sums to be compared with: "
                "give them as kept"
            )
        proven = check_kept(where, site, kept, start) if start and kept else ()
        if aux is not None:
            self._pool.read_aux(aux)
        with self._office.admission.enter(where):
            self._expected = True
            self._office.expect(self._key, Expectation(start, stop, most, {**tables, **slots}, aux, tag, proven))
        return {g.id: start for g in site.token_groups}

    def abort(self, reason: str) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Handle.abort`."""
        arguments.one(reason, "reason", str)
        if not self._office.admission.ended:
            with suppress(EndpointBrokenError):  # which has failed the room
                self._office.abort(self._key, AbortedError(f"room {self.room.hex()}: {reason}"))
