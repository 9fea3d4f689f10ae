"""The times of forward passes: for the estimate of throughput, and as spans for the observer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ...ids import LayerId
from ...memory import Event
from ...trace import Span
from ..loop.event_loop import EventLoop
from .handle import SubmittedChunk
from .throughput import EventFifo, ThroughputEstimator


class PassTimes:
    """Times each pass, and the layers of a traced one. ``broken`` is called if an event of the engine raises."""

    def __init__(self, loop: EventLoop, throughput: ThroughputEstimator) -> None:
        self._loop = loop
        self._throughput = throughput
        self._events = EventFifo(loop.clock)

    def look(self) -> bool:
        """Take in the layers that are computed; True while another one is awaited."""
        return self._events.look()

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
            self._events.add((one.key, one.call_id), ready, partial(self._computed, submitted, layers), broken)

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
