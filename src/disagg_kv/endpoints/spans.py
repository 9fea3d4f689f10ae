"""The span of a whole room."""

from __future__ import annotations

from ..errors import DisaggKVError
from ..ids import RoomId
from ..trace import Span
from .status import Report


def room_span(room: RoomId, opened: float, now: float, report: Report, error: DisaggKVError | None) -> Span:
    """A room that was opened at one time and is forgotten now; times in seconds of the endpoint's clock."""
    outcome = "done" if error is None else "failed"
    labels = {"outcome": outcome, "path": report.path, "transport": report.transport, "segments": str(report.segments)}
    if error is not None:
        labels["error"] = type(error).__name__
    return Span("room", room, opened, now, report.nbytes, report.descriptors, labels)
