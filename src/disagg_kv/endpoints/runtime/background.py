"""Threads for calls that may block: connecting a transport, and asking the rendezvous.

The endpoint's thread never makes such a call. It starts a job here, and takes the result in one of its next steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("disagg_kv")

Job = Callable[[], None]


class Background(Protocol):
    """Runs jobs that may block. Simulations bring their own."""

    def start(self, job: Job) -> None:
        """Run a job, soon; never blocks. The job raises nothing."""
        ...

    def close(self, timeout_s: float) -> None:
        """Drop the jobs that have not begun, and wait at most ``timeout_s`` for those that have."""
        ...


class HelperThreads:
    """Daemon threads that exist while there are jobs: a job that never returns does not hold up the process's exit.

    Args:
        name: of the threads.
        most: how many jobs run at a time; the others wait in order.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._running = 0

    def start(self, job: Job) -> None:
        """See :meth:`Background.start`."""
        with self._changed:
            self._jobs.append(job)
            if self._running == self._most:
                return
            self._running += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """See :meth:`Background.close`."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._jobs.clear()
            self._changed.wait_for(lambda: not self._running, max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a job of %s raised, which is a bug", self._name)


def inline(name: str, most: int) -> Inline:
    """See :class:`Inline`."""
    return Inline()


class Inline:
    """Runs each job at once, on the calling thread: for endpoints that their caller drives."""

    def start(self, job: Job) -> None:
        """See :meth:`Background.start`."""
        job()

    def close(self, timeout_s: float) -> None:
        """See :meth:`Background.close`."""
