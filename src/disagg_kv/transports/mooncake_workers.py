"""Threads for calls that block: destinations take turns, and none has more than one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from queue import SimpleQueue

Step = Callable[[], bool]
"""Does one part of a job; True while there is more to do. Never raises."""


class WorkerPool:
    """Up to ``threads`` long-lived threads, all but the first begun when they are first needed.

    A job is a step that is called until it returns False. Jobs for one destination run in their order. With as many
    threads as destinations, or fewer that are slow than threads, a slow one delays only itself.

    The threads are daemons: one whose call does not return must not keep the process from ending.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._jobs: dict[Hashable, deque[Step]] = {}
        # Wakes a thread in half the time that a condition takes. None: the thread that takes it ends.
        self._ready: SimpleQueue[Hashable | None] = SimpleQueue()
        self._stopped = False
        self._lock = threading.Lock()
        self._none = threading.Condition(self._lock)
        self._begin()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def put(self, destination: Hashable, job: Step) -> None:
        """Run ``job`` after those that were put before it for the same destination; never raises."""
        with self._lock:
            jobs = self._jobs.get(destination)
            if jobs is not None:
                jobs.append(job)
                return
            if len(self._jobs) >= len(self._threads) < self._most:
                # The process may have no more threads; those that are there do it then.
                with suppress(RuntimeError):
                    self._begin()
            self._jobs[destination] = deque([job])
            self._ready.put(destination)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is left; False if some is after ``timeout_s`` seconds."""
        with self._lock:
            return self._none.wait_for(lambda: not self._jobs, max(timeout_s, 0.0))

    def stop(self) -> None:
        """Begin no step any more; the threads end when their present one does. Does not wait."""
        with self._lock:
            self._stopped = True
            for _ in self._threads:
                self._ready.put(None)

    def _work(self) -> None:
        while (destination := self._ready.get()) is not None:
            with self._lock:
                if self._stopped:
                    return
                step = self._jobs[destination][0]
            more = step()
            with self._lock:
                jobs = self._jobs[destination]
                if not more:
                    jobs.popleft()
                if jobs:
                    self._ready.put(destination)
                else:
                    del self._jobs[destination]
                if not self._jobs:
                    self._none.notify_all()
            del step, jobs
