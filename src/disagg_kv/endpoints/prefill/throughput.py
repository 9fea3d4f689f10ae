"""How fast forward passes and transfers are: for the choice of layer groups, and as spans for the observer."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import TypeVar

from attrs import define

from ...core import RoomKey
from ...ids import LayerId
from ...memory import Event
from ...planning import Pace
from ...trace import Span
from ..loop.event_loop import EventLoop
from .handle import SubmittedChunk

K = TypeVar("K")
V = TypeVar("V")

NEW = 0.3
"""The weight of a new measurement against all earlier ones."""

PASSES = 64
"""Forward passes whose layers are awaited; one that never ends is forgotten once this many others have begun."""

FRAMES_S = 3e-4
"""Roughly what the frames of one more segment cost, besides planning and launching it, which is measured; a group costs
0.2 to 0.6 ms with H200s and 0.4 to 0.9 ms on two cores (docs/results.md)."""

LONG_S = 0.1
"""Transfers that follow one another without a pause are measured after this many seconds at the latest."""


LOOKS = 16
"""How often, at most, the endpoint interrupts a forward pass to look for events that wake no thread."""

LEAST_S, MOST_S = 1e-3, 5e-3
"""Bounds of the time between two such looks."""


@define
class _Wire:
    """What moves over one transport: how many transfers, since when, and the bytes of those that have ended since."""

    bytes_per_s: float | None = None
    moving: int = 0
    since: float = 0.0
    nbytes: int = 0


@define
class _Pass:
    tokens: int
    began: float
    last: float
    left: int
    first: float | None = None
    asked: bool = False
    closed: bool = False


class ThroughputEstimator:
    """Seconds per layer and token of forward passes; bytes per second while transfers were in flight, per transport.

    Args:
        clock: seconds.
        layers: how many of them this rank computes in a forward pass.
        traced: True: it is asked about each layer of a pass, perhaps after the pass was closed.
    """

    def __init__(self, clock: Callable[[], float], layers: int, *, traced: bool = False) -> None:
        self._clock = clock
        self._layers = layers
        self._told = layers if traced else 0
        self._passes: OrderedDict[tuple[RoomKey, int], _Pass] = OrderedDict()
        self._computed_at = -math.inf
        self._layer_token_s: float | None = None
        self._plan_s: float | None = None
        self._launch_s: float | None = None
        self._wires: defaultdict[str, _Wire] = defaultdict(_Wire)
        self._crossing: dict[Hashable, _Wire] = {}
        self._queued: dict[Hashable, _Wire] = {}

    @property
    def patience_s(self) -> float:
        """See :class:`~disagg_kv.endpoints.loop.side.Side`; a GPU may be in a pass longer than the engine."""
        tokens = [known.tokens for known in self._passes.values() if not known.asked]
        if not tokens:
            return 0.0
        return min(max((self._layer_token_s or 0.0) * self._layers * max(tokens) / LOOKS, LEAST_S), MOST_S)

    def asked(self, submitted: Sequence[SubmittedChunk]) -> None:
        """All of a pass was asked of the device that computes it."""
        known = self._passes.get(_name(submitted)) if submitted else None
        if known is not None:
            known.asked = True

    def pace(self, transport: str) -> Pace | None:
        """What was measured; None: a forward pass, or a transfer over it, is still missing."""
        wire = self._wires.get(transport)
        if self._layer_token_s is None or wire is None or wire.bytes_per_s is None:
            return None
        return Pace(self._layer_token_s, wire.bytes_per_s, (self._plan_s or 0.0) + (self._launch_s or 0.0) + FRAMES_S)

    def begin(self, submitted: Sequence[SubmittedChunk], at: float) -> None:
        """A forward pass begins."""
        if submitted:
            self._passes[_name(submitted)] = _Pass(sum(submitted[0].batch.tokens), at, at, self._told)
            _bound(self._passes)

    def first(self, submitted: Sequence[SubmittedChunk], at: float) -> None:
        """The engine has computed the first layer of a pass, or asked a device for it."""
        known = self._passes.get(_name(submitted)) if submitted else None
        if known is not None:
            known.first = at

    def computed(self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId], at: float) -> float | None:
        """Layers of a pass became final; since when they can have been computed (None: the pass is not known)."""
        known = self._passes.get(_name(submitted)) if submitted else None
        if known is None:
            return None
        before, known.last = known.last, at
        known.left -= len(layers)
        self._forget(submitted, known)
        return before

    def closed(self, submitted: Sequence[SubmittedChunk], at: float, *, queued: bool) -> float | None:
        """A pass has ended; when it began, if it is known.

        What came before its first layer is not counted: the pass may have been announced early. Nor is what came
        before the end of the pass before it, as a device computes one after the other. ``queued``: a device computed
        the pass, and :meth:`first` gave the time at which the device was asked for the first layer.
        """
        known = self._passes.get(_name(submitted)) if submitted else None
        if known is None:
            return None
        layers = self._layers if queued else self._layers - 1
        if known.first is not None and layers and known.tokens:
            since = max(known.first, self._computed_at)
            if at > since:
                self._layer_token_s = _mixed(self._layer_token_s, (at - since) / (layers * known.tokens))
        self._computed_at = max(self._computed_at, at)
        known.closed = True
        self._forget(submitted, known)
        return known.began

    def _forget(self, submitted: Sequence[SubmittedChunk], known: _Pass) -> None:
        """Forget a pass that is closed and awaits no layer; the events of its layers may happen after it was closed."""
        if known.closed and known.left <= 0:
            del self._passes[_name(submitted)]

    def room_ended(self, key: RoomKey) -> None:
        """Passes that began with a room and were never closed, as their engine gave up, are none any more."""
        for name in [name for name in self._passes if name[0] == key]:
            del self._passes[name]

    def planned(self, seconds: float) -> None:
        """A segment was planned."""
        self._plan_s = _mixed(self._plan_s, seconds)

    def launched(self, seconds: float) -> None:
        """A gather and its writes were queued on a GPU."""
        self._launch_s = _mixed(self._launch_s, seconds)

    def began(self, name: Hashable, transport: str, *, queued: bool) -> None:
        """A transfer begins; ``queued``: behind an event of a GPU, so that nothing moves yet."""
        if queued:
            self._queued[name] = self._wires[transport]
        else:
            self._moves(name, self._wires[transport], self._clock())

    def crossing(self, name: Hashable, at: float) -> None:
        """A transfer, which may have been queued, is on the wire since ``at``."""
        wire = self._queued.pop(name, None)
        if wire is not None:
            self._moves(name, wire, at)

    def _moves(self, name: Hashable, wire: _Wire, at: float) -> None:
        self._crossing[name] = wire
        if wire.moving == 0:
            wire.since = max(wire.since, at)
        wire.moving += 1

    def ended(self, name: Hashable, nbytes: int) -> None:
        """A transfer has ended and moved ``nbytes`` bytes; one that was never on the wire is not counted."""
        if self._queued.pop(name, None) is not None:
            return
        wire, now = self._crossing.pop(name), self._clock()
        wire.moving -= 1
        wire.nbytes += nbytes
        if (wire.moving == 0 or now - wire.since >= LONG_S) and now > wire.since:
            if wire.nbytes:
                wire.bytes_per_s = _mixed(wire.bytes_per_s, wire.nbytes / (now - wire.since))
            wire.since, wire.nbytes = now, 0


_Look = tuple[Event, Callable[[float], None], Callable[[Exception], None]]


class EventFifo:
    """Events of layers, a line for each forward pass, of which only the first is asked.

    However many layers wait, a look is short: it takes the interpreter away from an engine that launches kernels.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.lines: OrderedDict[Hashable, deque[_Look]] = OrderedDict()

    def add(
        self, line: Hashable, event: Event, occurred: Callable[[float], None], broken: Callable[[Exception], None]
    ) -> None:
        """Put an event behind those of the same line; ``occurred`` is called with the time at which it was seen."""
        self.lines.setdefault(line, deque()).append((event, occurred, broken))
        _bound(self.lines)

    def look(self) -> bool:
        """Report the events that have happened; True while another one is awaited."""
        for name in list(self.lines):
            line = self.lines[name]
            while line:
                try:
                    if not line[0][0].query():
                        break
                except Exception as exc:
                    line.popleft()[2](exc)
                else:
                    line.popleft()[1](self._clock())
            if not line:
                del self.lines[name]
        return bool(self.lines)


class PassTimes:
    """Times each pass, and the layers of a traced one. ``broken`` is called if an event of the engine raises."""

    def __init__(self, loop: EventLoop, throughput: ThroughputEstimator) -> None:
        self._loop = loop
        self._throughput = throughput
        self.events = EventFifo(loop.clock)

    def computed(
        self,
        submitted: Sequence[SubmittedChunk],
        layers: Collection[LayerId],
        ready: Event | None,
        at: float,
        broken: Callable[[Exception], None],
    ) -> None:
        """Layers are computed at ``ready``, else at the time ``at``."""
        if not self._loop.traced or not submitted or not submitted[0].batch.layered:
            return
        if ready is None:
            self._computed(submitted, layers, at)
        else:
            one = submitted[0]
            self.events.add((one.key, one.call_id), ready, partial(self._computed, submitted, layers), broken)

    def _computed(self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId], at: float) -> None:
        start = self._throughput.computed(submitted, layers, at)
        if start is not None and layers:
            self._span("compute", submitted, start, at, layers=f"{min(layers)}-{max(layers) + 1}")

    def closed(
        self, submitted: Sequence[SubmittedChunk], ready: Event | None, at: float, broken: Callable[[Exception], None]
    ) -> None:
        """A pass ends at ``ready``, else at the time ``at``."""
        self._throughput.asked(submitted)
        self._loop.when(ready, partial(self._closed, submitted, at if ready is None else None), broken)

    def _closed(self, submitted: Sequence[SubmittedChunk], at: float | None) -> None:
        end = self._loop.clock() if at is None else at
        start = self._throughput.closed(submitted, end, queued=at is None)
        if start is not None:
            self._span("pass", submitted, start, end)

    def _span(self, name: str, submitted: Sequence[SubmittedChunk], start: float, stop: float, **labels: str) -> None:
        for one in submitted:
            rows = {"rows": f"{one.start}-{one.stop}"}
            self._loop.observer.span(Span(name, one.key.room, start, stop, labels={**labels, **rows}))


def _name(submitted: Sequence[SubmittedChunk]) -> tuple[RoomKey, int]:
    return submitted[0].key, submitted[0].call_id


def _bound(passes: OrderedDict[K, V]) -> None:
    """Forget the oldest beyond :data:`PASSES`."""
    while len(passes) > PASSES:
        passes.popitem(last=False)


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else (1 - NEW) * before + NEW * new
