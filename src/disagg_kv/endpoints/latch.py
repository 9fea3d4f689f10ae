"""Waiting for another thread, also in a signal handler."""

from __future__ import annotations

import threading

LOOK_S = 0.05
"""How often a waiting thread looks, where another one that waited was interrupted before it could let it go on."""


class Latch:
    """Set once, by one thread; any thread waits for it.

    A signal handler that interrupts a call of this may make any other. A ``threading.Event`` does not allow that: each
    of its calls holds a lock of its own for a moment. The thread that sets the event would wait for that lock, and the
    handler for the thread. Here the one lock is free only once nothing waits for it any more.

    ``is_set``: whether it is set.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let all threads go on; again is harmless."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self) -> None:
        """Block until it is set."""
        while not self.is_set:
            if self._lock.acquire(timeout=LOOK_S):
                self._lock.release()
