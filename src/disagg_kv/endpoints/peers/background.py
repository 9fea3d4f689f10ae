"""Threads for calls that may block: connecting a transport, and asking the rendezvous.

The thread that advances never makes such a call. It starts a job here, and takes the result in one of its next steps.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Protocol

log = logging.getLogger("disagg_kv")

Job = Callable[[], None]

SLOW_S = 0.5
"""Seconds without a job that begins or ends, after which the running jobs give up their places: they wait for something
outside."""


class Background(Protocol):
    """Runs jobs that may block. Simulations bring their own."""

    def start(self, job: Job) -> None:
        """Run a job, soon; never blocks. The job raises nothing; if this raises, the job is never run."""
        ...

    def close(self, timeout_s: float, then: Job) -> bool:
        """Drop the jobs that have not begun, and wait at most ``timeout_s`` for those that have.

        ``then`` is run when all have ended: before this returns, or (False) by the last job's thread.
        """
        ...


class HelperThreads:
    """A daemon thread for each job: a job that never returns holds up neither the others nor the process's exit.

    They run on the cores of the thread that makes this object: a call of an engine may start them.

    Args:
        name: of the threads.
        most: how many jobs have a place. The others wait until one of those ends, or until none has for ``SLOW_S``:
            then as many more begin. So jobs that never return delay the others by little, and jobs that their library
            does one after the other do not all begin at once, which would let most of them run into their time-outs.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._cores = os.sched_getaffinity(0)
        lock = threading.Lock()
        self._free, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._threads = 0
        self._places: set[int] = set()
        self._moved = -inf  # when a job has begun or ended
        self._closed = False
        self._then: Job | None = None

    def start(self, job: Job) -> None:
        """See :meth:`Background.start`; holds no lock that an interrupt could leave behind.

        Raises:
            RuntimeError: the host has no thread left.
        """
        threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def close(self, timeout_s: float, then: Job) -> bool:
        """See :meth:`Background.close`."""
        with self._free:
            self._closed = True
            self._free.notify_all()
            if not self._ended.wait_for(lambda: not self._threads, timeout_s):
                self._then = then
                return False
        then()
        return True

    def _wait(self) -> None:
        """Wait for a place, or for the end of all."""
        while not self._closed and len(self._places) >= self._most:
            left_s = self._moved + SLOW_S - time.monotonic()
            if left_s > 0.0:
                self._free.wait(left_s)
            else:
                self._places.clear()
                self._free.notify(self._most)

    def _run(self, job: Job) -> None:
        with suppress(OSError):  # the process has other cores now
            os.sched_setaffinity(0, self._cores)
        with self._free:
            if self._closed:
                return  # before this thread counted: perhaps nothing waits for it any more
            self._threads += 1
            self._wait()
            begins = not self._closed
            if begins:
                self._places.add(threading.get_ident())
                self._moved = time.monotonic()
        if begins:
            self._guard(job)
        self._end()

    def _end(self) -> None:
        """One thread less; after the last one comes what :meth:`close` left to it."""
        with self._free:
            self._places.discard(threading.get_ident())
            self._moved = time.monotonic()
            self._threads -= 1
            self._free.notify()
            last = not self._threads
            if last:
                self._ended.notify_all()
        if last and self._then is not None:
            self._guard(self._then)

    def _guard(self, job: Job) -> None:
        try:
            job()
        except BaseException:
            log.exception("a job of %s raised, which is a bug", self._name)


class Inline:
    """Runs each job at once, on the calling thread: for endpoints that their caller drives."""

    def start(self, job: Job) -> None:
        """See :meth:`Background.start`."""
        job()

    def close(self, timeout_s: float, then: Job) -> bool:
        """See :meth:`Background.close`."""
        then()
        return True
