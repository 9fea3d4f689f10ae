"""A limit for calls that must not block, so that one that does fails its test instead of stopping the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 1e-3
"""Seconds that are left to an outer timer which came due meanwhile."""


@contextmanager
def at_most(timeout_s: float, what: str) -> Iterator[None]:
    """Raise an AssertionError where the block has not returned after ``timeout_s`` seconds.

    A signal interrupts it, which Python handles on the main thread only; on another thread there is no limit. A timer
    of pytest-timeout is kept.

    Args:
        timeout_s: seconds.
        what: for the message, for example ``"submit"``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise AssertionError(f"{what} blocks: it did not return within {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    outer_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            left_s = outer_s - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, GRACE_S), interval_s)


def held() -> int:
    """Threads and file descriptors that this process has now."""
    return len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))
