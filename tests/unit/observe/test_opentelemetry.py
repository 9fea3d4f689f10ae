"""Rooms in OpenTelemetry: their spans lie in the engine's trace, with a child for each piece of work."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest

from disagg_kv import Source
from disagg_kv.errors import ConfigurationError, LocalProtocolError
from disagg_kv.ids import RoomId
from disagg_kv.trace import Several, Span
from tests.support.needs import needs_opentelemetry
from tests.support.observed import NBYTES, endpoints, move, until

if needs_opentelemetry.args[0]:
    pytest.skip("opentelemetry-sdk is not installed", allow_module_level=True)

from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from disagg_kv.observe import opentelemetry as observed
from disagg_kv.observe.opentelemetry import OpenTelemetryObserver

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT = 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "Host": "of the engine"}
ROOM = RoomId(b"room")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> trace.Tracer:
    """Of a provider that samples only what its parent has sampled."""
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(1.0)), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("engine")


def named(exporter: InMemorySpanExporter, name: str) -> Sequence[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == f"disagg_kv.{name}"]


def of_room(stop: float = 1.0, **labels: str) -> Span:
    """The last span of a room."""
    return Span("room", ROOM, 0.0, stop, labels={"outcome": "done", "path": "staged", "segments": "1", **labels})


def test_both_sides_of_a_request_are_in_its_trace(exporter: InMemorySpanExporter, tracer: trace.Tracer) -> None:
    """Gather and wire on prefill, queue and scatter on decode: children of the room, within its time."""
    began = time.time_ns()
    with (
        OpenTelemetryObserver("prefill", "P", tracer=tracer) as p,
        OpenTelemetryObserver("decode", "D", 3, tracer=tracer) as d,
        endpoints(p, d) as (sender, receiver),
    ):
        for one in (p, d):
            one.follow(ROOM, HEADERS)
        move(sender, receiver, "room")
        move(sender, receiver, "that nobody follows")
        until(lambda: bool(named(exporter, "prefill")) and bool(named(exporter, "decode")))
    ended = time.time_ns()
    finished = exporter.get_finished_spans()
    assert {span.context.trace_id for span in finished if span.context} == {TRACE}
    for side, instance, rank, children in (("prefill", "P", 0, "gather wire"), ("decode", "D", 3, "queue scatter")):
        (room,) = named(exporter, side)
        assert room.context is not None
        assert room.parent is not None
        assert room.attributes is not None
        assert room.parent.span_id == PARENT
        assert room.status.status_code is trace.StatusCode.UNSET
        assert dict(room.attributes) == {
            "disagg_kv.room": "room", "disagg_kv.instance": instance, "disagg_kv.rank": rank,
            "disagg_kv.outcome": "done", "disagg_kv.path": "staged", "disagg_kv.transport": "inproc",
            "disagg_kv.bytes": NBYTES,
            "disagg_kv.segments": room.attributes["disagg_kv.segments"],
        }  # fmt: skip
        assert room.start_time is not None
        assert room.end_time is not None
        assert began <= room.start_time <= room.end_time <= ended
        for name in children.split():
            found = named(exporter, name)
            assert len(found) == room.attributes["disagg_kv.segments"]
            for child in found:
                assert child.parent == room.context
                assert child.start_time is not None
                assert child.end_time is not None
                assert room.start_time <= child.start_time <= child.end_time <= room.end_time
                assert child.attributes
                assert "disagg_kv.rows" in child.attributes
    assert sum(int(str((one.attributes or {})["disagg_kv.bytes"])) for one in named(exporter, "wire")) == NBYTES


def test_a_room_that_fails_says_so(exporter: InMemorySpanExporter, tracer: trace.Tracer) -> None:
    """With the type of the error, as OpenTelemetry's conventions have it."""
    with OpenTelemetryObserver("decode", "D", tracer=tracer) as d, endpoints(None, d) as (_, receiver):
        d.follow(ROOM, HEADERS)
        receiver.open(ROOM, Source("P")).abort("enough")
        until(lambda: bool(named(exporter, "decode")))
    (room,) = named(exporter, "decode")
    assert room.status.status_code is trace.StatusCode.ERROR
    assert (room.attributes or {})["error.type"] == "AbortedError"
    assert (room.attributes or {})["disagg_kv.outcome"] == "failed"


def test_a_context_or_the_current_one_may_be_the_parent(exporter: InMemorySpanExporter, tracer: trace.Tracer) -> None:
    """Of an engine that has OpenTelemetry's own objects."""
    observer = OpenTelemetryObserver("decode", "D", tracer=tracer)
    with tracer.start_as_current_span("request") as request:
        observer.follow(ROOM)
    observer.span(of_room())
    observer.follow(ROOM, trace.set_span_in_context(request))
    observer.span(of_room())
    parents = [span.parent for span in named(exporter, "decode")]
    assert parents == [request.get_span_context()] * 2
    observer.follow(ROOM, context.Context())
    observer.span(of_room())
    assert named(exporter, "decode")[-1].parent is None


@pytest.mark.parametrize("header", ["", "garbage", f"00-{0:032x}-{0:016x}-01", "00-" + "f" * 5000, "\udcff\x00"])
def test_a_header_that_is_none_begins_a_new_trace(
    exporter: InMemorySpanExporter, tracer: trace.Tracer, header: str
) -> None:
    """A client may send anything; its request goes on."""
    observer = OpenTelemetryObserver("decode", "D", tracer=tracer)
    observer.follow(ROOM, {"traceparent": header})
    observer.span(of_room())
    (room,) = named(exporter, "decode")
    assert room.parent is None


def test_what_is_not_sampled_costs_no_span(exporter: InMemorySpanExporter, tracer: trace.Tracer) -> None:
    observer = OpenTelemetryObserver("decode", "D", tracer=tracer)
    observer.follow(ROOM, {"TraceParent": HEADERS["traceparent"][:-2] + "00"})
    observer.span(Span("scatter", ROOM, 0.0, 1.0))
    observer.span(of_room())
    observer.close()
    assert not exporter.get_finished_spans()
    # It was not kept: the same id may be followed again.
    observer.follow(ROOM, HEADERS)
    observer.span(of_room())
    assert len(exporter.get_finished_spans()) == 1


def test_times_are_those_of_the_endpoints_clock(exporter: InMemorySpanExporter, tracer: trace.Tracer) -> None:
    """A clock that began elsewhere; spans of layers and counts leave nothing."""
    observer = OpenTelemetryObserver("decode", "D", tracer=tracer, clock=lambda: 1000.0)
    before = time.time_ns()
    observer.follow(ROOM, HEADERS)
    after = time.time_ns()
    observer.count("peers.lost")
    for span in (Span("compute", ROOM, 1000.0, 1000.1), Span("scatter", ROOM, 1000.5, 1000.75), of_room(1002.0)):
        observer.span(span)
    scatter, room = exporter.get_finished_spans()
    for found, seconds in ((scatter.start_time, 0.5), (scatter.end_time, 0.75), (room.end_time, 2.0)):
        assert found is not None
        assert before - 1000 <= found - seconds * 1e9 <= after + 1000


def test_no_span_stays_open(
    exporter: InMemorySpanExporter, tracer: trace.Tracer, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Rooms that are never opened, more rooms than can be followed, and the end of the observer."""
    monkeypatch.setattr(observed, "MOST", 2)
    observer = OpenTelemetryObserver("decode", "D", tracer=tracer)
    observer.follow(ROOM, HEADERS)
    with pytest.raises(LocalProtocolError, match="room room is followed already"):
        observer.follow(ROOM, HEADERS)
    observer.forget(ROOM)
    observer.forget(ROOM)
    for number in range(3):
        observer.follow(RoomId(b"%d" % number), HEADERS)
    assert "room 0: its span ends early" in caplog.text
    observer.close()
    observer.close()
    reasons = [span.status.description for span in exporter.get_finished_spans()]
    assert (
        reasons == ["the room was not opened", "more rooms were followed than can be"] + ["the observer was closed"] * 2
    )
    # Late spans of what was dropped change nothing.
    observer.span(of_room())
    assert len(exporter.get_finished_spans()) == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: OpenTelemetryObserver("both", "P"),  # type: ignore[arg-type]
        lambda: OpenTelemetryObserver(["prefill"], "P"),  # type: ignore[arg-type]
        lambda: OpenTelemetryObserver("prefill", ""),
        lambda: OpenTelemetryObserver("prefill", "P", -1),
        lambda: OpenTelemetryObserver("prefill", "P", tracer=object()),  # type: ignore[arg-type]
        lambda: OpenTelemetryObserver("prefill", "P", clock=None),  # type: ignore[arg-type]
        lambda: OpenTelemetryObserver("prefill", "P").follow("room"),  # type: ignore[arg-type]
        lambda: OpenTelemetryObserver("prefill", "P").follow(ROOM, "00-1-2-01"),  # type: ignore[arg-type]
        lambda: OpenTelemetryObserver("prefill", "P").follow(ROOM, {"traceparent": b"00"}),  # type: ignore[dict-item]
        lambda: OpenTelemetryObserver("prefill", "P").forget(None),  # type: ignore[arg-type]
        lambda: Several(OpenTelemetryObserver("prefill", "P"), object()),  # type: ignore[arg-type]
    ],
    ids=range(11),
)
def test_arguments_that_cannot_be_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        call()


def test_without_a_provider_nothing_is_kept() -> None:
    """OpenTelemetry's API alone does nothing; layers are not traced."""
    with OpenTelemetryObserver("prefill", "P") as observer:
        observer.follow(ROOM)
        observer.follow(ROOM)
        assert not observer.layers


def test_without_the_package_the_error_has_the_command() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from disagg_kv.errors import MissingDependencyError\n"
        "try:\n    import disagg_kv.observe.opentelemetry\n"
        "except MissingDependencyError as exc:\n    print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'disagg_kv[opentelemetry]'" in done.stdout
