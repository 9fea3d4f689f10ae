"""Observability: spans and counters.

The thread that advances calls an :class:`Observer`, which must return at once. An observer that raises is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from .ids import RoomId

__all__ = ["Observer", "Recorder", "Silent", "Span", "chrome_trace"]

log = logging.getLogger("disagg_kv")


@frozen
class Span:
    """One piece of work on one room.

    Args:
        name: ``pass`` (a forward pass, from its announcement until it is closed), ``compute`` (layers of a pass),
            ``groups`` (their division into groups), ``queue`` (on decode, from a segment's first request for staging
            memory until its grant), ``gather``, ``wire``, ``scatter``, or ``room`` (from ``open`` until the endpoint
            forgets the room; its labels are ``outcome``, ``error``, ``path`` and ``segments``).
        room: the room.
        start: seconds of the endpoint's clock.
        stop: seconds of the endpoint's clock.
        nbytes: bytes moved; 0 where it does not apply.
        descriptors: writes posted; 0 where it does not apply.
        labels: further values, by name.
    """

    name: str
    room: RoomId
    start: float
    stop: float
    nbytes: int = 0
    descriptors: int = 0
    labels: Mapping[str, str] = field(factory=dict)


class Observer(Protocol):
    """Receives spans and counters.

    An observer with an attribute ``layers`` that is False gets no spans of single layers (``pass``, ``compute``), which
    would wake the endpoint's thread for each layer of a forward pass.
    """

    def span(self, span: Span) -> None:
        """A piece of work ended."""

    def count(self, name: str, amount: int = 1) -> None:
        """An event was counted ``amount`` times."""


def wants_layers(observer: Observer) -> bool:
    """Whether an observer gets spans of single layers; see :class:`Observer`."""
    return not isinstance(observer, Silent) and bool(getattr(observer, "layers", True))


class Silent:
    """The default: drops everything."""

    def span(self, span: Span) -> None:
        """Drop it."""

    def count(self, name: str, amount: int = 1) -> None:
        """Drop it."""


class Guarded:
    """Forwards to an observer until it raises. Then the observer is dropped, with one line in the log.

    Args:
        observer: an engine's observer; its errors must not reach the endpoint.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def span(self, span: Span) -> None:
        """Forward it."""
        try:
            self._observer.span(span)
        except Exception:
            self._drop()

    def count(self, name: str, amount: int = 1) -> None:
        """Forward it."""
        try:
            self._observer.count(name, amount)
        except Exception:
            self._drop()

    def _drop(self) -> None:
        log.warning("observer %s raised and is dropped", type(self._observer).__name__, exc_info=True)
        self._observer = Silent()


class Recorder:
    """Stores everything; for demos, benchmarks and tests, not for a server, because it grows without bound."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counters: Counter[str] = Counter()

    def span(self, span: Span) -> None:
        """Store it."""
        self.spans.append(span)

    def count(self, name: str, amount: int = 1) -> None:
        """Add it up."""
        self.counters[name] += amount


def chrome_trace(ranks: Mapping[str, Sequence[Span]]) -> dict[str, object]:
    """Spans in the Trace Event Format of Perfetto and Chrome: a process per rank, a row per kind.

    Times are microseconds since the first span began. All ranks must have used one clock: on one host
    ``time.monotonic`` is the same for every process.

    Args:
        ranks: the spans of each rank, by its name.
    """
    first = min((span.start for spans in ranks.values() for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for pid, (rank, spans) in enumerate(ranks.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": rank}})
        rows = {name: tid for tid, name in enumerate(sorted({span.name for span in spans}))}
        for name, tid in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        for span in spans:
            args: dict[str, object] = {"room": span.room.decode("ascii", "backslashreplace"), **span.labels}
            if span.nbytes:
                args["bytes"] = span.nbytes
            times = {"ts": (span.start - first) * 1e6, "dur": (span.stop - span.start) * 1e6}
            events.append({"ph": "X", "name": span.name, "pid": pid, "tid": rows[span.name], **times, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
