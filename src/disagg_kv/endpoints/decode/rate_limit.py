"""How fast arriving bytes may be scattered while an engine is decoding."""

from __future__ import annotations

from ... import arguments

SCATTER_BYTES_PER_S = 100e9
"""The default: 5 % of the time of an H200 that scatters 2.09e12 bytes a second, which is more than a 400 Gbit/s wire
brings (benchmarks/results/h200_kernels.json counts reads and writes)."""

BURST_S = 0.02
"""Seconds of the pace that may be used at once after a pause: what arrives within one step of decoding. A request of 1
or 2 GiB then comes as fast as NVLink brings it. It costs the step in which it comes 1 ms of an H200's scatter rate."""


class RateLimiter:
    """A token bucket. Work of any size passes, and what follows waits the longer.

    Args:
        bytes_per_s: the pace.
        burst_s: seconds of it that a pause saves up.

    Attributes:
        ready_at: when the next piece of work may begin.

    Raises:
        ConfigurationError: a number that is not positive.
    """

    def __init__(self, bytes_per_s: float, burst_s: float = BURST_S) -> None:
        self._pace = arguments.positive(bytes_per_s, "scatter_bytes_per_s")
        self._burst = arguments.seconds(burst_s, "burst_s")
        self.ready_at = float("-inf")

    def ready(self, now: float) -> bool:
        """Whether work may begin now."""
        return now >= self.ready_at

    def begin(self, nbytes: int, now: float) -> None:
        """Begin work of ``nbytes`` bytes; unused time counts up to the burst."""
        self.ready_at = max(self.ready_at, now - self._burst) + nbytes / self._pace
