"""Spans of rooms for OpenTelemetry, in the traces of an engine's requests; needs the extra ``opentelemetry``.

::

    observer = OpenTelemetryObserver("prefill", "prefill-0", rank)
    endpoint = PrefillEndpoint(..., instance="prefill-0", rank=rank, observer=observer)
    observer.follow(room, headers)  # of the request: traceparent, tracestate
    delivery = endpoint.open(room)

The parent of a room's span comes as a mapping of W3C headers, since this is how engines carry it from their HTTP server
to their scheduler: vLLM as ``Request.trace_headers``, SGLang as ``external_trace_header`` of a request. See W3C's
Trace Context, and OpenTelemetry's page on context propagation. A room that the engine does not name has no span, and
neither has one of a request that is not sampled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import get_args

from attrs import define

from .. import arguments
from ..closing import Closing
from ..errors import ConfigurationError, LocalProtocolError, MissingDependencyError
from ..ids import Rank, Role, RoomId, room_name, room_text
from ..trace import Span

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Status, StatusCode, Tracer
except ImportError as exc:
    raise MissingDependencyError(
        "disagg_kv.observe.opentelemetry", str(exc), "pip install 'disagg_kv[opentelemetry]'"
    ) from exc

log = logging.getLogger("disagg_kv")


PREFIX = "disagg_kv."
"""Of the names of spans and attributes."""

CHILDREN = frozenset({"queue", "gather", "wire", "scatter"})
"""Spans of an endpoint that become children of the room's."""

MOST = 16384
"""Rooms that are followed at once; beyond them the oldest one's span ends."""


@define(eq=False)
class _Followed:
    """The span of a room.

    Args:
        span: of OpenTelemetry, not ended.
        inside: the context in which its children begin.
        offset_ns: what to add to the endpoint's clock, so that it shows nanoseconds since 1970.
        last: when the last child ended. The endpoint takes a room's time once per step, so it may be earlier.
    """

    span: trace.Span
    inside: Context
    offset_ns: int
    last: float = 0.0

    def at(self, seconds: float) -> int:
        """A time of the endpoint's clock as OpenTelemetry wants it."""
        return self.offset_ns + int(seconds * 1e9)


class OpenTelemetryObserver(Closing):
    """The :class:`~disagg_kv.trace.Observer` of one endpoint; a context closes it.

    A room's span is called ``disagg_kv.prefill`` or ``disagg_kv.decode``. Its children are ``disagg_kv.queue``,
    ``gather``, ``wire`` and ``scatter``, one for each segment. Spans are given to the tracer's provider on the
    thread that advances: its processor must return at once, as OpenTelemetry's ``BatchSpanProcessor`` does.

    Args:
        side: ``"prefill"`` or ``"decode"``.
        instance: name of the endpoint's instance.
        rank: its rank.
        tracer: makes the spans; None: that of OpenTelemetry's global provider.
        clock: the endpoint's, in seconds.

    Raises:
        ConfigurationError: another side, no name, a negative rank, no tracer or no clock.
    """

    layers = False

    def __init__(
        self,
        side: Role,
        instance: str,
        rank: int = 0,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if side not in get_args(Role):
            raise ConfigurationError(f"side: 'prefill' or 'decode', not {arguments.shown(side)}")
        if tracer is None:
            tracer = trace.get_tracer("disagg_kv")
        self._tracer = arguments.one(tracer, "tracer", Tracer)  # type: ignore[type-abstract]
        arguments.clock(clock, "clock")
        self._clock = clock
        self._name = f"{PREFIX}{side}"
        self._attributes: dict[str, str | int] = {
            f"{PREFIX}instance": arguments.text(instance, "instance", least=1, most=256),
            f"{PREFIX}rank": Rank(arguments.count(rank, "rank")),
        }
        self._lock = threading.Lock()
        self._rooms: dict[RoomId, _Followed] = {}

    def follow(self, room: RoomId, parent: Mapping[str, str] | Context | None = None) -> None:
        """Begin the span of a room. Call it before ``open``; the span ends when the endpoint forgets the room.

        Args:
            room: its id; a retry has another one.
            parent: headers of the request (``traceparent``, ``tracestate``; other ones may be among them), or a context
                of OpenTelemetry; None: the calling thread's current context. Headers without a valid ``traceparent``
                begin a new trace.

        Raises:
            ConfigurationError: no id, or a parent of another type.
            LocalProtocolError: the room is followed already.
        """
        room = RoomId(arguments.room_id(room))
        context = _context(parent)
        offset_ns = time.time_ns() - int(self._clock() * 1e9)
        with self._lock:
            if room in self._rooms:
                raise LocalProtocolError(f"{room_name(room)} is followed already", room=room)
            span = self._tracer.start_span(self._name, context, attributes={**self._attributes, **_named(room)})
            if not span.is_recording():
                return
            self._rooms[room] = _Followed(span, trace.set_span_in_context(span, context), offset_ns)
            oldest = next(iter(self._rooms)) if len(self._rooms) > MOST else None
        if oldest is not None:
            log.warning("%s: its span ends early, since more than %d rooms are followed", room_name(oldest), MOST)
            self._drop(oldest, "more rooms were followed than can be")

    def span(self, span: Span) -> None:
        """See :class:`~disagg_kv.trace.Observer`."""
        followed = self._rooms.get(span.room)
        if followed is None:
            return
        if span.name in CHILDREN:
            child = self._tracer.start_span(
                PREFIX + span.name, followed.inside, start_time=followed.at(span.start), attributes=_of(span)
            )
            child.end(followed.at(span.stop))
            followed.last = max(followed.last, span.stop)
        elif span.name == "room" and self._rooms.pop(span.room, None) is followed:
            _end(followed, span)

    def count(self, name: str, amount: int = 1) -> None:
        """See :class:`~disagg_kv.trace.Observer`. Counts are for metrics."""

    def forget(self, room: RoomId) -> None:
        """End the span of a room that was followed and not opened after all. Harmless for any other room."""
        self._drop(RoomId(arguments.room_id(room)), "the room was not opened")

    def close(self) -> None:
        """End all spans. May be repeated."""
        for room in list(self._rooms):
            self._drop(room, "the observer was closed")

    def _drop(self, room: RoomId, reason: str) -> None:
        followed = self._rooms.pop(room, None)
        if followed is not None:
            followed.span.set_status(Status(StatusCode.ERROR, reason))
            followed.span.end()


def _end(followed: _Followed, span: Span) -> None:
    """End the span of a room with what the endpoint says of it."""
    followed.span.set_attributes(_of(span))
    error = span.labels.get("error")
    if error is not None:
        # OpenTelemetry's conventions for errors: the type as an attribute, and a status.
        followed.span.set_attribute("error.type", error)
        followed.span.set_status(Status(StatusCode.ERROR, error))
    followed.span.end(followed.at(max(followed.last, span.stop)))


def _context(parent: object) -> Context:
    """The context of a request."""
    if parent is None:
        return contexts.get_current()
    if isinstance(parent, Context):
        return parent
    headers = arguments.mapping(parent, "parent")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(f"parent: headers are text, not {arguments.shown(name)}: {arguments.shown(value)}")
    # Names of headers have no case; OpenTelemetry's own getter looks for small letters.
    return propagate.extract({str(name).lower(): str(value) for name, value in headers.items()}, Context())


def _named(room: RoomId) -> dict[str, str]:
    return {f"{PREFIX}room": room_text(room)}


def _of(span: Span) -> dict[str, str | int]:
    """The attributes of a span."""
    found: dict[str, str | int] = {PREFIX + name: text for name, text in span.labels.items() if name != "error"}
    if span.name == "room":
        found[f"{PREFIX}segments"] = int(span.labels["segments"])
    if span.nbytes:
        found[f"{PREFIX}bytes"] = span.nbytes
    return found
