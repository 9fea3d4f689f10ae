"""What comes before prefill is asked for rows: a path is chosen, and pages that it exposes may be written."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from attrs import frozen

from ...core import Awaited, Cancel, Verify
from ...core.room.machine import ours
from ...core.wire.frames import WireTable
from ...core.wire.page_runs import excess, tables_to_wire
from ...errors import DisaggKVError, OversizeError
from ...memory import MemoryPool
from ...planning import RowRange
from ..loop.event_loop import EventLoop
from .path_choice import PathChoice, PathChooser
from .room import DecodeRoom

log = logging.getLogger("disagg_kv")


@frozen(eq=False)
class _Pending:
    room: DecodeRoom
    choice: PathChoice
    tables: tuple[WireTable, ...] | None


class PendingExpectations:
    """Rooms whose prefill ranks are known, and that await rows, until they may be asked.

    Runs on the thread that advances. Where pages are exposed, that is once the engine's event for them has happened.

    Args:
        loop: the endpoint's.
        pool: ours.
        chooser: of paths.
        verify: how much is compared.
    """

    def __init__(self, loop: EventLoop, pool: MemoryPool, chooser: PathChooser, verify: Verify) -> None:
        self._loop = loop
        self._pool = pool
        self._chooser = chooser
        self._verify: Verify = verify
        self._rooms: list[_Pending] = []
        self._failed: list[tuple[DecodeRoom, Cancel]] = []
        self._noted_pages = False

    def __len__(self) -> int:
        return len(self._rooms) + len(self._failed)

    def add(self, room: DecodeRoom) -> None:
        """Rows are awaited; :meth:`ended` gives the room, at once where nothing has to come first."""
        try:
            choice, tables = self._choose(room)
        except Exception as exc:
            # A path may be a user's code: its errors fail this room alone.
            self._failed.append((room, Cancel(ours(exc, f"{room.name}: no way to send it"))))
            return
        room.path = choice.path
        room.handle.report.path, room.handle.report.reason = choice.path.name, choice.reason
        self._rooms.append(_Pending(room, choice, tables))

    def _choose(self, room: DecodeRoom) -> tuple[PathChoice, tuple[WireTable, ...] | None]:
        """The path of a room, and its page tables where the path exposes them."""
        wanted, plans = room.wanted, room.plans
        assert wanted is not None
        assert plans is not None
        asked = room.remotes, plans, plans.rotation(room.key.room), RowRange(wanted.start, wanted.stop)
        choice = self._chooser.choose(*asked)
        if not choice.path.exposes_pages:
            return choice, None
        tables = tables_to_wire(wanted.tables.values())
        beyond = excess(tables, self._loop.options.request_pages)
        if beyond is None:
            return choice, tables
        self._loop.observer.count("rooms.too_many_pages")
        pages = self._note_pages(room, beyond)
        try:
            return self._chooser.choose(*asked, pages), None
        except DisaggKVError as exc:
            raise beyond from exc

    def ended(self) -> Iterator[tuple[DecodeRoom, Awaited | Cancel]]:
        """Gives each for which nothing more has to come first, and the event for its machine."""
        failed, self._failed = self._failed, []
        yield from failed
        for pending in list(self._rooms):
            room, error = pending.room, None
            try:
                if pending.tables is not None and not room.writable():
                    continue
            except DisaggKVError as exc:
                error = exc
            self._rooms.remove(pending)
            yield room, self._awaited(pending) if error is None else Cancel(error)

    def _awaited(self, pending: _Pending) -> Awaited:
        wanted, choice = pending.room.wanted, pending.choice
        assert wanted is not None
        aux_bytes = 0 if wanted.aux is None else self._pool.aux_bytes
        return Awaited(
            wanted.start,
            wanted.stop,
            wanted.most,
            choice.path.name,
            pending.tables,
            self._verify,
            aux_bytes,
            wanted.least,
            choice.unsegmented,
        )

    def _note_pages(self, room: DecodeRoom, beyond: OversizeError) -> str:
        """Note once in the log that a room has more pages than a request may expose, and return that in words."""
        pages = f"{beyond.asked} {beyond.what}, at most {beyond.capacity}"
        if not self._noted_pages:
            self._noted_pages = True
            log.warning("%s: %s, so they are not exposed; later rooms are only counted", room.name, pages)
        return pages
