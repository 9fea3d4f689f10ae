"""Spans for Perfetto, and several observers at once."""

from __future__ import annotations

import json

import pytest

from disagg_kv.errors import ConfigurationError
from disagg_kv.ids import RoomId
from disagg_kv.trace import Recorder, Several, Silent, Span, chrome_trace


def test_spans_become_events_of_a_process_per_rank_and_a_row_per_kind() -> None:
    """Microseconds since the first span; rooms as text; the document is plain JSON."""
    room = RoomId(b"r\xff")
    spans = [Span("wire", room, 2.0, 2.5, 100, labels={"layers": "0-2"}), Span("gather", room, 1.5, 2.0)]
    trace = json.loads(json.dumps(chrome_trace({"prefill 0": spans, "decode 0": [Span("scatter", room, 2.5, 3.0)]})))
    events = trace["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {(0, None): "prefill 0", (0, 0): "gather", (0, 1): "wire", (1, None): "decode 0", (1, 0): "scatter"}
    wire, gather, scatter = (e for e in events if e["ph"] == "X")
    assert (wire["ts"], wire["dur"], wire["tid"]) == (5e5, 5e5, 1)
    assert wire["args"] == {"room": "r\\xff", "layers": "0-2", "bytes": 100}
    assert (gather["ts"], gather["args"]) == (0, {"room": "r\\xff"})
    assert (scatter["pid"], scatter["ts"]) == (1, 1e6)


def test_no_spans() -> None:
    assert chrome_trace({})["traceEvents"] == []


class Broken(Recorder):
    """Raises at the second span."""

    def span(self, span: Span) -> None:
        assert not self.spans, "enough"
        super().span(span)


class WithoutLayers(Recorder):
    layers = False


def test_several_observers_get_everything_and_one_that_raises_is_dropped_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, broken = Recorder(), Broken()
    several = Several(broken, whole)
    for number in range(3):
        several.span(Span("wire", RoomId(b"r"), 0.0, number))
        several.count("mine", 2)
    assert [span.stop for span in whole.spans] == [0, 1, 2]
    assert whole.counters == {"mine": 6}
    assert (len(broken.spans), broken.counters) == (1, {"mine": 2})
    assert "observer Broken raised and is dropped" in caplog.text


def test_several_observers_want_layers_if_one_does() -> None:
    assert Several(WithoutLayers(), Recorder()).layers
    assert not Several(WithoutLayers(), WithoutLayers(), Silent()).layers
    assert not Several().layers


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="observers: 'object' is no observer: it needs span and count"):
        Several(Recorder(), object())  # type: ignore[arg-type]
