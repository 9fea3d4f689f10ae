"""What the connector counts and measures, in the form of vLLM's statistics: values that JSON can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTERS = {
    "sent": "requests whose rows prefill has sent",
    "loaded": "requests whose rows have arrived",
}
"""Name and meaning."""

FAILURES = {
    "sent_failed": "requests whose rows prefill could not send, by reason",
    "load_failed": "requests whose rows could not be loaded, by reason",
}
"""The same, with the ``code`` of the error as a label."""

BYTES = tuple(1 << power for power in range(16, 36, 2))
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

HISTOGRAMS = {
    "sent_bytes": ("bytes of a request that a rank of prefill has written", BYTES),
    "loaded_bytes": ("bytes of a request that have arrived at a rank of decode", BYTES),
    "load_seconds": ("seconds from the request for rows until all were in their pages", SECONDS),
}
"""Name, meaning, and upper bounds of the buckets."""

REASONS = ("aborted", "deadline", "incompatible_peer", "integrity", "peer_lost", "remote_protocol", "transport")
"""Codes of errors that are counted from the start, with 0; see :mod:`disagg_kv.errors`. Others come with the first."""


class Counters:
    """Counts and measurements since the last ``take``."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}

    def add(self, name: str, **measured: float) -> None:
        """Count a request, and add its measurements."""
        self._data = merged(self._data, {name: 1, **{of: [value] for of, value in measured.items()}})

    def fail(self, name: str, error: object) -> None:
        """Count a request that has failed."""
        self._data = merged(self._data, {name: {code_of(error): 1}})

    def take(self) -> dict[str, Any]:
        """The data, which begin anew; empty: nothing happened."""
        taken, self._data = self._data, {}
        return taken


def code_of(error: object) -> str:
    """What a failure is counted by."""
    return str(getattr(error, "code", "failed"))


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The data of two ranks, or of two steps."""
    out = dict(one)
    for name, value in other.items():
        if name not in out:
            out[name] = value
        elif isinstance(value, Mapping):
            out[name] = merged(out[name], value)
        else:
            out[name] = out[name] + value
    return out


def logged(data: Mapping[str, Any]) -> dict[str, int | float]:
    """As vLLM logs them, in one line: sums, and failures by reason."""
    out: dict[str, int | float] = {}
    for name in (*COUNTERS, *HISTOGRAMS):
        if name in data:
            out[name] = round(sum(data[name]) if name in HISTOGRAMS else data[name], 4)
    for name in FAILURES:
        out |= {f"{name}_{code}": count for code, count in data.get(name, {}).items()}
    return out
