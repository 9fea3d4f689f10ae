"""What comes before prefill is asked for rows: a path is chosen, and pages that it exposes may be written."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ...core import Awaited, Cancel, Verify
from ...core.room.machine import ours
from ...core.wire.frames import WireTable
from ...core.wire.page_runs import excess, tables_to_wire
from ...errors import DisaggKVError, OversizeError
from ...memory import MemoryPool
from ...planning import RowRange
from ...strategies import exposes_pages
from ..loop.event_loop import EventLoop
from .path_choice import UNSAID, PathChoice, PathChooser
from .room import DecodeRoom

log = logging.getLogger("disagg_kv")


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
        self._rooms: list[tuple[DecodeRoom, Awaited | Cancel]] = []
        self._noted_pages = False

    def __len__(self) -> int:
        return len(self._rooms)

    def add(self, room: DecodeRoom) -> None:
        """Rows are awaited; :meth:`ended` gives the room, at once where nothing has to come first."""
        try:
            event: Awaited | Cancel = self._awaited(room)
        except Exception as exc:
            # A path may be a user's code: its errors fail this room alone.
            event = Cancel(ours(exc, f"{room.name}: no way to send it"))
        self._rooms.append((room, event))

    def _awaited(self, room: DecodeRoom) -> Awaited:
        wanted = room.wanted
        assert wanted is not None
        choice, tables = self._choose(room)
        room.path = choice.path
        room.handle.report.path, room.handle.report.reason = choice.path.name, choice.reason
        rows, aux_bytes = (wanted.start, wanted.stop, wanted.most), 0 if wanted.aux is None else self._pool.aux_bytes
        return Awaited(*rows, choice.path.name, tables, self._verify, aux_bytes, wanted.least, choice.unsegmented)

    def _choose(self, room: DecodeRoom) -> tuple[PathChoice, tuple[WireTable, ...] | None]:
        """The path of a room, and its page tables where the path exposes them."""
        wanted, plans = room.wanted, room.plans
        assert wanted is not None
        assert plans is not None
        said = tuple(UNSAID if one.unmapped is None else one.unmapped for one in room.used)
        asked = room.remotes, said, plans, plans.rotation(room.key.room), RowRange(wanted.start, wanted.stop)
        choice = self._chooser.choose(*asked)
        if not exposes_pages(choice.path):
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
        for pending in list(self._rooms):
            room, event = pending
            try:
                if isinstance(event, Awaited) and event.tables is not None and not room.writable():
                    continue
            except DisaggKVError as exc:
                event = Cancel(exc)
            self._rooms.remove(pending)
            yield room, event

    def _note_pages(self, room: DecodeRoom, beyond: OversizeError) -> str:
        """Note once in the log that a room has more pages than a request may expose, and return that in words."""
        pages = f"{beyond.asked} {beyond.what}, at most {beyond.capacity}"
        if not self._noted_pages:
            self._noted_pages = True
            log.warning("%s: %s, so they are not exposed; later rooms are only counted", room.name, pages)
        return pages
