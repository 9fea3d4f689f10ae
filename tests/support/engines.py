"""What an engine's process does in the rounds of pauses and kills, and what it notes about the memory of its rooms.

A request's bytes are a function of the room, the prefill instance, the attempt, the plane, the row, the head and the
byte: bytes of another room, instance or attempt are wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define

from disagg_kv import Source
from disagg_kv.endpoints import Attempt, Expectation, Recovering, RecoveringReceiver
from disagg_kv.endpoints.prefill.handle import DeliveryHandle
from disagg_kv.errors import QuarantineFullError
from disagg_kv.ids import RoomId
from disagg_kv.memory import U8
from tests.support.processes import PLANES, POISON, Member, Setup, State


def content(room: bytes, instance: str, attempt: int) -> bytes:
    """The name of the bytes that a prefill instance sends in an attempt."""
    return b"%d %b %b" % (attempt, instance.encode(), room)


@define
class _Room:
    """Where a room is sent from in each attempt, its rows, and its pages when they were released."""

    tokens: int
    sources: Sequence[str]
    handle: DeliveryHandle | Recovering
    attempt: int = 1
    snapshot: Sequence[U8] | None = None


class Engine(Member):
    """In the child: a member that polls its endpoint and compares memory."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._open: dict[bytes, _Room] = {}
        self._draw = np.random.default_rng(setup.rank)
        self._recovering: RecoveringReceiver | None = None
        if self.receiver is not None:
            self._recovering = RecoveringReceiver(self.receiver, _Next(self._open), options=setup.knobs.options)

    def prefill(self, room: bytes, tokens: int, attempt: int, cuts: Sequence[int]) -> bool:
        """Prefill: a room whose cache is computed, handed over in chunks that end at ``cuts`` and at its end.

        False: the endpoint takes no more, as too much of its memory waits for evidence.
        """
        name = self.setup.instance
        self.contents[room] = content(room, name, attempt)
        self.rows[room] = self._row()
        try:
            self.begin(room, tokens, attempt)
        except QuarantineFullError:
            self._refused(room)
            return False
        handle = self.rooms[room]
        assert isinstance(handle, DeliveryHandle)
        self._open[room] = _Room(tokens, (name,), handle, attempt)
        start = 0
        for stop in (*cuts, tokens):
            self.send(room, start, stop, stop == tokens)
            start = stop
        return True

    def decode(self, room: bytes, tokens: int, sources: Sequence[str]) -> bool:
        """Decode: a room from the first of these instances, and from the next one where it fails; False: as above."""
        assert self._recovering is not None
        try:
            reception = self._recovering.open(RoomId(room), Source(sources[0]))
        except QuarantineFullError:
            return False
        self.rows[room] = self._row()
        self._open[room] = _Room(tokens, sources, reception)
        reception.expect(Expectation(tokens, [self.take(room, tokens)], aux=self.rows[room]))
        return True

    def _refused(self, room: bytes) -> None:
        """Pages go back as they were."""
        taken = self.pages.pop(room).pages
        for plane in self._planes():
            plane[taken] = POISON
        self.unused = np.concatenate([self.unused, taken])
        self.rows.pop(room)
        self.contents.pop(room)

    def give_up(self, room: bytes) -> None:
        """Abort a room that is still here."""
        if room in self._open:
            self._open[room].handle.abort("the test gives it up")

    def states(self) -> Mapping[bytes, State]:
        """Every room, now. Pages are copied when they are released: nothing may change them afterwards."""
        self.poll()
        found: dict[bytes, State] = {}
        for name, room in self._open.items():
            handle = room.handle
            released, phase, error = handle.released, handle.phase, handle.error
            if isinstance(handle, Recovering):
                room.attempt = handle.attempts
            if released and room.snapshot is None:
                room.snapshot = [plane[self.pages[name].pages] for plane in self._planes()]
            found[name] = State(phase.name, released, type(error).__name__, str(error), room.attempt)
        return found

    def poll(self) -> None:
        """Take the changes, and begin attempts that are due."""
        if self._recovering is not None:
            self._recovering.poll()
        else:
            super().poll()

    def mismatch(self, room: bytes) -> int:
        """Bytes of a room's rows and of its aux row that are not what the source of its last attempt wrote."""
        one = self._open[room]
        name = content(room, one.sources[one.attempt - 1], one.attempt)
        aux = self.pool.read_aux(self.rows[room]).rstrip(b"\0") != name
        return self.differing(room, one.tokens, name) + aux

    def audit(self) -> Sequence[str]:
        """What was written to that should not have been: free pages, rows behind a room's end, released pages."""
        faults: list[str] = []
        for plane, memory in enumerate(self._planes()):
            if stray := int((memory[self.unused] != POISON).sum()):
                faults.append(f"{stray} bytes of free pages, plane {plane}")
            for name, room in self._open.items():
                faults += self._audit(name, room, plane, memory)
        return faults

    def _audit(self, name: bytes, room: _Room, plane: int, memory: U8) -> Sequence[str]:
        """What is wrong in one plane of a room's pages."""
        pages, rest = self.pages[name].pages, room.tokens % self.setup.knobs.page_size
        faults = []
        if (
            plane == 0
            and self.sender is not None
            and (changed := self.differing(name, room.tokens, self.contents[name]))
        ):
            faults.append(f"room {name!r}: {changed} bytes changed at their source")
        if rest and (behind := int((memory[pages[-1], rest:] != POISON).sum())):
            faults.append(f"room {name!r}: {behind} bytes behind its last row, plane {plane}")
        if room.snapshot is not None and (late := int((memory[pages] != room.snapshot[plane]).sum())):
            faults.append(f"room {name!r}: {late} bytes changed after it was released, plane {plane}")
        return faults

    def drop(self, room: bytes) -> None:
        """Forget a released room; its pages are poisoned, and taken again at some time."""
        assert self._open.pop(room).handle.released
        self.free(room)
        self.rows.pop(room)
        self.contents.pop(room, None)
        self.unused = self._draw.permutation(self.unused)

    def _planes(self) -> Sequence[U8]:
        return [self.pool.view(plane) for plane in range(PLANES)]

    def _row(self) -> int:
        used = set(self.rows.values())
        return next(row for row in range(self.setup.knobs.aux_slots) if row not in used)


class _Next:
    """A failed room is sent again by the next of its sources; all ranks of decode know the same ones."""

    def __init__(self, rooms: Mapping[bytes, _Room]) -> None:
        self._rooms = rooms

    def again(self, failed: Attempt) -> Source | None:
        """See :class:`~disagg_kv.endpoints.Recovery`."""
        sources = self._rooms[failed.room].sources
        return Source(sources[failed.number]) if failed.number < len(sources) else None
