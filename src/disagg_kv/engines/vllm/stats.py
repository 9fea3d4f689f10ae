"""Counters of the connector, in the form of vLLM's statistics."""

from __future__ import annotations

COUNTERS = {
    "sent": "requests whose rows prefill has sent",
    "sent_failed": "requests whose rows prefill could not send",
    "sent_bytes": "bytes that prefill has written",
    "loaded": "requests whose rows have arrived",
    "load_failed": "requests whose rows could not be loaded",
    "loaded_bytes": "bytes that have arrived",
    "load_seconds": "seconds from the request for rows until all were in their pages, summed",
}
"""Name and meaning."""


class Counters:
    """Counts since the last ``take``."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add to counters."""
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """The counts, which begin anew; empty: nothing happened."""
        taken, self._counts = self._counts, {}
        return taken
