"""Spans for Perfetto."""

from __future__ import annotations

import json

from disagg_kv.ids import RoomId
from disagg_kv.trace import Span, chrome_trace


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
