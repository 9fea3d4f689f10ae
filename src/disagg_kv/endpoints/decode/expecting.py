"""What comes before prefill is asked for rows: pages that are exposed may be written."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ...core import Awaited, Cancel, Verify
from ...core.wire.page_runs import excess, tables_to_wire
from ...errors import DisaggKVError, OversizeError
from ...memory import MemoryPool
from ..loop.event_loop import EventLoop
from .handle import CheckedExpectation
from .room import DecodeRoom

log = logging.getLogger("disagg_kv")


class PendingExpectations:
    """Rooms that await rows, until prefill may be asked. Runs on the thread that advances.

    Where pages are exposed, that is once the engine's event for them has happened.

    Args:
        loop: the endpoint's.
        pool: ours.
        exposed: whether peers may write to pages.
        verify: how much is compared.
    """

    def __init__(self, loop: EventLoop, pool: MemoryPool, exposed: bool, verify: Verify) -> None:
        self._loop = loop
        self._pool = pool
        self._exposed = exposed
        self._verify: Verify = verify
        self._rooms: list[DecodeRoom] = []
        self._noted_pages = False

    def __len__(self) -> int:
        return len(self._rooms)

    def add(self, room: DecodeRoom, wanted: CheckedExpectation) -> None:
        """Rows are awaited; :meth:`ended` gives the room, at once where nothing has to come first."""
        room.wanted, room.ready = wanted, wanted.ready
        self._rooms.append(room)

    def ended(self) -> Iterator[tuple[DecodeRoom, Awaited | Cancel]]:
        """Gives each for which nothing more has to come first, and the event for its machine."""
        for room in list(self._rooms):
            error: DisaggKVError | None = None
            try:
                if self._exposed and not room.writable():
                    continue
            except DisaggKVError as exc:
                error = exc
            self._rooms.remove(room)
            yield room, self._awaited(room) if error is None else Cancel(error)

    def _awaited(self, room: DecodeRoom) -> Awaited | Cancel:
        wanted = room.wanted
        assert wanted is not None
        tables = tables_to_wire(wanted.tables.values()) if self._exposed else None
        beyond = None if tables is None else excess(tables, self._loop.options.request_pages)
        if beyond is not None:
            tables = None
            self._loop.observer.count("rooms.too_many_pages")
            self._note_pages(room, beyond)
        paths = tuple(p.name for p in self._loop.me.paths if tables is not None or not p.exposes_pages)
        if beyond is not None and not paths:
            return Cancel(beyond)
        aux_bytes = 0 if wanted.aux is None else self._pool.aux_bytes
        rows = (wanted.start, wanted.stop, wanted.most)
        return Awaited(*rows, paths, tables, self._verify, aux_bytes, wanted.least)

    def _note_pages(self, room: DecodeRoom, beyond: OversizeError) -> None:
        """Note in the report, and once in the log, that a room has more pages than a request may expose."""
        pages = f"{beyond.asked} {beyond.what}, at most {beyond.capacity}"
        room.handle.report.reason = f"staged: {pages}"
        if not self._noted_pages:
            self._noted_pages = True
            log.warning("%s: %s, so they are not exposed; later rooms are only counted", room.name, pages)
