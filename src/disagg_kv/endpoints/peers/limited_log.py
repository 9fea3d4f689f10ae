"""Log lines that a peer, a store or a library can cause again and again: a log is no bounded thing."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("disagg_kv")

EVERY_S = 1.0
"""Seconds between two lines of one kind."""


class LimitedLog:
    """One line a second at most; the next one says how many were left out. Counters of the observer know the rest.

    Args:
        clock: time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_at: float | None = None
        self._left_out = 0

    def say(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Log a line, with the traceback of ``error``, or leave it out."""
        now = self._clock()
        if self._next_at is not None and now < self._next_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} lines like this were left out)" if self._left_out else ""
        self._next_at, self._left_out = now + EVERY_S, 0
        log.log(level, "%s%s", text, more, exc_info=error)
