"""A prefill engine's handles of rooms and passes. Every call checks its arguments before it changes anything."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from ... import arguments
from ...core import Effect, RoomKey, SendRoom
from ...core.room.machine import ours
from ...errors import (
    AbortedError,
    ConfigurationError,
    DisaggKVError,
    EndpointBrokenError,
    GeometryError,
    LocalProtocolError,
)
from ...geometry import PageTable
from ...ids import GroupId, LayerId
from ...memory import Event, Mark, MemoryPool
from ...planning import Batch
from ..expectation import after
from ..handle import HostEvent, RoomHandle, check_states, check_tables, joined
from ..loop.construction import check_aux
from ..loop.driver import Driver

if TYPE_CHECKING:
    from .rooms import PrefillSide

Act = Callable[[SendRoom, float], list[Effect]]


@frozen
class SubmittedChunk:
    """Rows of a room that the engine submitted by one call; ``call_id`` counts the calls. See :class:`Rows`."""

    key: RoomKey
    call_id: int
    start: int
    stop: int
    tables: Mapping[GroupId, PageTable]
    batch: Batch


class DeliveryHandle(RoomHandle):
    """A room on a prefill rank; see :class:`~disagg_kv.endpoints.api.Delivery`.

    Attributes:
        given: rows that were submitted since the last withdrawal.
        held: rows that decode holds already; None: decode has not reported them yet.
    """

    def __init__(self, key: RoomKey, pool: MemoryPool, driver: Driver, side: PrefillSide) -> None:
        super().__init__(key.room)
        self._key = key
        self._pool = pool
        self._driver = driver
        self._side = side
        self.held: Mapping[GroupId, int] | None = None
        self._stop = 0
        self.given = 0
        self._finished = False
        self._ended = False
        self._again: Mapping[GroupId, PageTable] | None = None
        self._edges: list[int] = []
        self._turns = 0
        self._withdrawals = 0
        self._fired: list[HostEvent] = []

    def break_down(self, error: DisaggKVError) -> bool:
        """See :meth:`RoomHandle.break_down`; events of withdrawn pages fail too."""
        for fired in self._fired:
            fired.fail(error)
        return super().break_down(error)

    def hold(self, held: Mapping[GroupId, int]) -> None:
        """Endpoint's thread: decode has reported its held rows."""
        self.held = held

    def send_chunk(self, stop: int, pages: Sequence[PageTable], ready: Event | None = None) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Delivery.send_chunk`."""
        stop = arguments.count(stop, "stop")
        arguments.event(ready, "ready")
        tables = self.checked(stop, pages)
        self._driver.check(self._name)
        self._driver.post(partial(self._side.send, self.taken(stop, tables), ready), self._name)

    def check_chunk(self, stop: int, pages: Sequence[PageTable]) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Delivery.check_chunk`."""
        self.checked(arguments.count(stop, "stop"), pages)

    def checked(self, stop: int, pages: Sequence[PageTable]) -> Mapping[GroupId, PageTable]:
        """The tables of the next rows, or an error; nothing has happened yet.

        After a withdrawal they begin where the first chunk given again began: its edges need not be the earlier ones.
        """
        if self._ended and stop > self._stop:
            raise LocalProtocolError(f"{self._name}: rows up to {stop} after finish at {self._stop}")
        if stop <= self.given:
            raise LocalProtocolError(f"{self._name}: rows up to {stop}, but up to {self.given} were given")
        site = self._pool.site
        held = self.held or {}
        starts = {g.id: max(self.given, min(held.get(g.id, 0), stop)) for g in site.token_groups}
        # Where a window ends is not known yet: its rows are checked as they are read.
        tables = check_tables(self.room, site, pages, starts, stop, site.sliding_groups)
        return tables if self._again is None else joined(site, self._again, tables)

    def taken(self, stop: int, tables: Mapping[GroupId, PageTable], batch: Batch | None = None) -> SubmittedChunk:
        """Count the rows as submitted."""
        start, self.given = self.given, stop
        if self._again is not None:
            self._again = self._open_rows(stop, tables) if stop < self._stop else None
        if stop > self._stop:
            self._stop = stop
            self._edges.append(stop)
        self._turns += 1
        return SubmittedChunk(self._key, self._turns, start, stop, tables, batch or Batch())

    def _open_rows(self, stop: int, tables: Mapping[GroupId, PageTable]) -> Mapping[GroupId, PageTable]:
        """Of tables that end at ``stop``, the pages of the chunk that is not complete yet."""
        edge = self._edges[bisect_right(self._edges, stop) - 1] if self._edges[0] <= stop else 0
        return after(self._pool.site, tables, dict.fromkeys(tables, edge))

    def finish(
        self,
        stop: int,
        *,
        state: Sequence[PageTable] = (),
        aux: int | None = None,
        ready: Event | None = None,
    ) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Delivery.finish`."""
        stop = arguments.count(stop, "stop")
        aux = None if aux is None else arguments.count(aux, "aux")
        arguments.event(ready, "ready")
        states = check_states(self.room, self._pool.site, state)
        if self._finished or stop != self._stop:
            raise LocalProtocolError(
                f"{self._name}: finish at row {stop}, "
                + ("which is the second" if self._finished else f"but chunks end at {self._stop}")
            )
        if aux is not None:
            self._read_aux(aux)
        life = self._withdrawals

        def act(machine: SendRoom, now: float) -> list[Effect]:
            if states and life != self._withdrawals:
                return []  # the slots were taken away while the event was awaited; another call gives others
            try:
                data = None if aux is None else self._read_aux(aux)
            except Exception as exc:
                # A pool may be another project's code: its errors fail this room alone.
                return machine.cancel(ours(exc, f"{self._name}: aux data could not be read"), now)
            return machine.finish(stop, data, now, states)

        loop, side, key = self._driver.loop, self._side, self._key
        done, broken = partial(side.change, key, act), partial(side.broken, [key])
        self._driver.check(self._name)
        self._finished = self._ended = True
        self._driver.post(partial(loop.when, ready, done, broken), self._name)

    def _read_aux(self, slot: int) -> bytes:
        """An aux row; a pool may be another project's code, and give more than it said."""
        data = self._pool.read_aux(slot)
        check_aux(len(data))
        return data

    def withdraw(self) -> Event:
        """See :meth:`~disagg_kv.endpoints.api.Delivery.withdraw`."""
        fired = HostEvent(self._driver.lend)
        self._driver.check(self._name)
        if self.released:
            fired.set()
            return fired
        self._withdrawals += 1
        self._fired = [*(one for one in self._fired if not one.over), fired]
        self.given = 0
        self._again = {}
        if self._pool.site.state_groups:
            self._finished = False
        self._driver.post(partial(self._side.withdraw, self._key, fired), self._name)
        return fired

    def abort(self, reason: str) -> None:
        """See :meth:`~disagg_kv.endpoints.api.Handle.abort`."""
        arguments.one(reason, "reason", str)
        error = AbortedError(f"{self._name}: {reason}")
        if not self._driver.closed:
            with suppress(EndpointBrokenError):  # which has failed the room
                self._driver.post(partial(self._side.change, self._key, lambda room, now: room.cancel(error, now)))


class LayerGroups:
    """The groups of layers of one forward pass that are sent by themselves, as far as they are decided.

    The endpoint's thread adds to them, and looks for commands after that; the engine's thread posts a layer, and looks
    at them after that. So one of the two sees that a group is complete, whichever comes first.

    Args:
        rooms: of the pass.
        whole: layers that rows wait for. A group of all of them crosses when the pass is closed, as every pass does of
            which no single layer matters.
    """

    def __init__(self, rooms: Collection[RoomKey], whole: frozenset[LayerId]) -> None:
        self._whole = whole
        self._undecided = set(rooms)
        self._groups: frozenset[frozenset[LayerId]] = frozenset()

    def add(self, room: RoomKey, groups: Collection[frozenset[LayerId]], *, decided: bool) -> None:
        """Endpoint's thread: add the groups of a room; ``decided``: no other groups follow for this room."""
        self._groups = self._groups.union(group for group in groups if not group >= self._whole)
        if decided:
            self._undecided.discard(room)

    @property
    def decided(self) -> bool:
        """Engine's thread: whether no other groups can come."""
        return not self._undecided

    @property
    def whole(self) -> bool:
        """Engine's thread: whether everything crosses when the pass is closed."""
        return self.decided and not self._groups

    def completes(self, layer: LayerId, seen: Set[LayerId]) -> bool:
        """Engine's thread: whether ``layer`` was the last of a group of which all are ``seen`` now."""
        return any(layer in group and group <= seen for group in self._groups)


class ForwardPass:
    """One forward pass over many rooms, which ``PrefillEndpoint.step`` announces.

    :meth:`close` makes its rows final; with the schedule ``layer_pipelined``, :meth:`layer_ready` does so for single
    layers before. Only a layer that completes a group begins work, and once everything crosses at the end of the pass,
    the calls for layers cost next to nothing.
    """

    def __init__(
        self,
        submitted: Sequence[SubmittedChunk],
        layers: Sequence[LayerId],
        driver: Driver,
        side: PrefillSide,
        cuts: LayerGroups,
        *,
        layered: bool,
        traced: bool,
    ) -> None:
        self._handed = submitted
        self._layers = frozenset(layers)
        self._driver = driver
        self._side = side
        self._cuts = cuts
        self._layered = layered
        self._traced = traced
        self._seen: set[LayerId] = set()
        self._ready: list[tuple[set[LayerId], Event | None]] = []
        self._unmarked: set[LayerId] = set()
        self._mark: Mark | None = None
        self._last: Event | None = None
        self._closed = False

    def __repr__(self) -> str:
        layers = f"{len(self._seen)} of {len(self._layers)} layers declared"
        return f"<ForwardPass of {len(self._handed)} rooms: {layers}{', closed' if self._closed else ''}>"

    def layer_ready(self, layer: int, ready: Event | Mark | None = None) -> bool:
        """Declare the rows of one layer final for all rooms of the pass. Layers come in any order, each once.

        Creating an event costs time, and only some layers need one. With a function as ``ready``, the pass creates
        events only for layers that may complete a group. It calls the function before this method returns. The other
        layers count as final at the next event that is created, at the latest in ``close``. So all functions of a pass
        must create events of one stream, on which the layers are computed.

        Args:
            layer: the layer.
            ready: an event that fires when the rows are final, or a function that creates such an event; None: the rows
                are final now.

        Returns False if everything is sent at ``close`` only. The engine may then skip the remaining layers. Unless it
        gave functions, it must give ``close`` an event that follows all layers.

        Raises:
            ConfigurationError: the function raises, or returns no event.
            GeometryError: the layer is not on this rank.
            LocalProtocolError: the layer was declared before, or the pass is closed.
        """
        layer = LayerId(arguments.count(layer, "layer", least=-arguments.MOST, error=GeometryError))
        if layer not in self._layers:
            raise GeometryError(f"layer {layer} is not on this rank, which has {sorted(self._layers)}")
        if not callable(ready):
            arguments.event(ready, "ready")
        self._driver.check(f"layer {layer}")
        if self._closed or layer in self._seen:
            raise LocalProtocolError(f"layer {layer} announced " + ("after close" if self._closed else "twice"))
        if self._layered and not self._seen:
            loop = self._driver.loop
            loop.post(partial(self._side.begun, self._handed, loop.clock()))
        before = self._mark
        self._seen.add(layer)
        if callable(ready):
            self._unmarked.add(layer)
            self._mark = ready
        else:
            self._add({layer}, ready)
        wanted = self._layered and (self._traced or not self._cuts.whole)
        if wanted:
            try:
                self._say(layer, ready)
            except ConfigurationError:
                # The engine may announce the layer again, with a function that works.
                self._seen.discard(layer)
                self._unmarked.discard(layer)
                self._mark = before
                raise
        return wanted

    def _say(self, layer: LayerId, ready: Event | Mark | None) -> None:
        """Post the layers that are final. An event is created only if it may complete a group, or for a trace."""
        if callable(ready) and (self._traced or not self._cuts.decided or self._cuts.completes(layer, self._seen)):
            self._set_mark(ready)
        self._flush()
        if (self._traced and ready is not None) or self._cuts.completes(layer, self._seen):
            self._driver.drive()

    def close(self, ready: Event | None = None) -> None:
        """End the pass: all layers that were not declared are final at ``ready``.

        Args:
            ready: fires when the rows are final. None: they are final now; or, if ``layer_ready`` was given functions,
                once their stream has done all work that is queued now.

        Raises:
            LocalProtocolError: called twice.
        """
        arguments.event(ready, "ready")
        if self._closed:
            raise LocalProtocolError("the step is closed already")
        if self._mark is not None and (self._unmarked or (ready is None and self._layers > self._seen)):
            self._set_mark(self._mark)
            ready = self._last if ready is None else ready
        last = self._last if ready is None else ready
        self._closed = True
        self._add(self._layers - self._seen, ready)
        self._flush()
        self._driver.post(partial(self._side.closed_at, self._handed, last, self._driver.loop.clock()))

    def _set_mark(self, mark: Mark) -> None:
        """What was computed before is final behind it too: a device computes in order."""
        try:
            event = mark()
        except Exception as exc:
            raise ConfigurationError(f"ready: the function that makes an event raised: {exc}") from exc
        if event is None:  # which would say that the rows are final now
            raise arguments.wrong("ready: what the function made", event, "an event is needed")
        self._add(self._unmarked, arguments.event(event, "ready: what the function made"))
        self._unmarked = set()

    def _flush(self) -> None:
        """Post the layers that are final, and advance nothing."""
        loop = self._driver.loop
        for layers, event in self._ready:
            loop.post(partial(self._side.final_at, self._handed, layers, event, loop.clock()))
        self._ready.clear()

    def _add(self, layers: Collection[LayerId], ready: Event | None) -> None:
        """Layers often share an event: one look at it serves all of them."""
        self._last = self._last if ready is None else ready
        for known, event in self._ready:
            if event is ready:
                known.update(layers)
                return
        self._ready.append((set(layers), ready))
