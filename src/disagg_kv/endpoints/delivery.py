"""What a prefill engine holds of a room and of a forward pass. Every call is checked before anything happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..errors import AbortedError, GeometryError, LocalProtocolError, UnsupportedError
from ..geometry import PageTable
from ..ids import GroupId, LayerId
from ..memory import All, Event, MemoryPool
from ..protocol import MAX_AUX, Effect, RoomKey, SendRoom
from .handles import Happened, RoomHandle, check_tables, joined

Act = Callable[[SendRoom, float], list[Effect]]


class Office(Protocol):
    """The endpoint, as its handles see it; nothing blocks."""

    def change(self, key: RoomKey, act: Act, ready: Event | None = None) -> None:
        """Have a room's machine do something on the endpoint's thread, once ``ready`` has happened."""
        ...

    def withdraw(self, key: RoomKey, fired: Happened) -> None:
        """Stop reading a room's pages."""
        ...


class DeliveryHandle(RoomHandle):
    """A room on a prefill rank; see :class:`~disagg_kv.endpoints.base.Delivery`."""

    def __init__(self, key: RoomKey, pool: MemoryPool, office: Office) -> None:
        super().__init__(key.room)
        self._key = key
        self._pool = pool
        self._office = office
        self._held: Mapping[GroupId, int] | None = None
        self._stop = 0
        self._given = 0
        self._finished = False
        self._again: Mapping[GroupId, PageTable] | None = None
        self._events: list[Event] = []
        self.withdrawals = 0

    @property
    def held(self) -> Mapping[GroupId, int] | None:
        """Rows that decode holds already; None until it has said so."""
        return self._held

    def hold(self, held: Mapping[GroupId, int]) -> None:
        """Endpoint's thread: decode has said so."""
        self._held = held

    def send_chunk(self, stop: int, pages: Sequence[PageTable], ready: Event | None = None) -> None:
        """See :meth:`~disagg_kv.endpoints.base.Delivery.send_chunk`."""
        tables = self.checked(stop, pages)
        after = self._take(stop, tables, ready)
        self._change(lambda machine, now: machine.add(stop, tables, ready=True, after=after, now=now))

    def checked(self, stop: int, pages: Sequence[PageTable]) -> Mapping[GroupId, PageTable]:
        """The tables of the next rows, or an error; nothing has happened yet.

        After a withdrawal they begin where the first chunk given again began: its edges need not be the earlier ones.
        """
        if self._finished and stop > self._stop:
            raise LocalProtocolError(f"room {self.room.hex()}: rows up to {stop} after finish at {self._stop}")
        if stop <= self._given:
            raise LocalProtocolError(f"room {self.room.hex()}: rows up to {stop}, but up to {self._given} were given")
        tables = check_tables(self.room, self._pool.site, pages, self._given, stop)
        return tables if self._again is None else joined(self._pool.site, self._again, tables)

    def _take(self, stop: int, tables: Mapping[GroupId, PageTable], ready: Event | None) -> Event | None:
        """From now on the rows count as handed over; when they, and what they are joined to, are final."""
        if self._again is not None:
            self._again = tables
            if ready is not None:
                self._events.append(ready)
            ready = All(tuple(self._events)) if self._events else None
            if stop >= self._stop:
                self._again = None
        self._given = stop
        self._stop = max(self._stop, stop)
        return ready

    def announce(self, stop: int, tables: Mapping[GroupId, PageTable]) -> None:
        """Rows that a forward pass is about to compute: ask for grants (A4)."""
        self._take(stop, tables, None)
        self._change(lambda machine, now: machine.add(stop, tables, ready=False, after=None, now=now))

    def computed(self, stop: int, ready: Event | None) -> None:
        """The pass is done, or will be at ``ready``."""
        self._change(lambda machine, now: machine.ready(stop, ready, now))

    def finish(
        self,
        stop: int,
        *,
        state: Sequence[PageTable] = (),
        aux: int | None = None,
        tag: bytes = b"",
        ready: Event | None = None,
    ) -> None:
        """See :meth:`~disagg_kv.endpoints.base.Delivery.finish`."""
        if state:
            raise UnsupportedError(f"room {self.room.hex()}: recurrent state is not moved yet")
        if self._finished or stop != self._stop:
            raise LocalProtocolError(
                f"room {self.room.hex()}: finish at row {stop}, "
                + ("which is the second" if self._finished else f"but chunks end at {self._stop}")
            )
        if len(tag) > 256:
            raise LocalProtocolError(f"room {self.room.hex()}: a tag of {len(tag)} bytes; at most 256 are allowed")
        if aux is not None:
            if self._pool.aux_bytes > MAX_AUX:
                raise UnsupportedError(f"aux rows of {self._pool.aux_bytes} bytes; at most {MAX_AUX} are moved yet")
            self._pool.read_aux(aux)
        self._finished = True

        def act(machine: SendRoom, now: float) -> list[Effect]:
            return machine.finish(stop, None if aux is None else self._pool.read_aux(aux), tag, now)

        self._office.change(self._key, act, ready)

    def withdraw(self) -> Event:
        """See :meth:`~disagg_kv.endpoints.base.Delivery.withdraw`."""
        fired = Happened()
        if self.released:
            fired.set()
            return fired
        self.withdrawals += 1
        self._given = 0
        self._again = {}
        self._events.clear()
        self._office.withdraw(self._key, fired)
        return fired

    def abort(self, reason: str) -> None:
        """See :meth:`~disagg_kv.endpoints.base.Handle.abort`."""
        error = AbortedError(f"room {self.room.hex()}: {reason}")
        self._change(lambda machine, now: machine.cancel(error, now))

    def _change(self, act: Act) -> None:
        self._office.change(self._key, act)


class ForwardPass:
    """One forward pass over many rooms; see :class:`~disagg_kv.endpoints.base.Step`."""

    def __init__(self, rooms: Mapping[DeliveryHandle, int], layers: Sequence[LayerId]) -> None:
        self._rooms = [(handle, stop, handle.withdrawals) for handle, stop in rooms.items()]
        self._layers = frozenset(layers)
        self._seen: set[LayerId] = set()
        self._events: list[Event] = []
        self._closed = False

    def layer_ready(self, layer: LayerId, ready: Event | None = None) -> None:
        """See :meth:`~disagg_kv.endpoints.base.Step.layer_ready`; per chunk, rows are final when all layers are."""
        if layer not in self._layers:
            raise GeometryError(f"layer {layer} is not on this rank, which has {sorted(self._layers)}")
        if self._closed or layer in self._seen:
            raise LocalProtocolError(f"layer {layer} announced " + ("after close" if self._closed else "twice"))
        self._seen.add(layer)
        self._add(ready)

    def close(self, ready: Event | None = None) -> None:
        """See :meth:`~disagg_kv.endpoints.base.Step.close`."""
        if self._closed:
            raise LocalProtocolError("the step is closed already")
        self._closed = True
        self._add(ready)
        after = All(tuple(self._events)) if self._events else None
        for handle, stop, withdrawals in self._rooms:
            if handle.withdrawals == withdrawals:
                handle.computed(stop, after)

    def _add(self, ready: Event | None) -> None:
        """Layers often share an event: each counts once."""
        if ready is not None and not any(ready is event for event in self._events):
            self._events.append(ready)
