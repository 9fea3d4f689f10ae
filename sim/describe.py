"""A line of a trace, for people."""

from __future__ import annotations

from disagg_kv.core import Codec
from disagg_kv.errors import DisaggKVError


def describe(kind: str, data: object) -> str:
    """What a traced event carries, in words."""
    if kind != "sent":
        return f"{len(data)} bytes" if isinstance(data, bytes) else str(data)
    assert isinstance(data, bytes)
    try:
        frame = Codec().decode(data)
    except DisaggKVError as exc:
        return f"not a frame: {exc}"
    names = (
        "room",
        "generation",
        "segment",
        "lease",
        "offset",
        "nbytes",
        "ready",
        "stop",
        "ok",
        "reason",
        "parked",
    )
    fields = {n: getattr(frame, n) for n in names if hasattr(frame, n)}
    return f"{type(frame).__name__} " + " ".join(
        f"{k}={v.hex() if isinstance(v, bytes) else v}" for k, v in fields.items()
    )
