"""The endpoint's own thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import SimpleQueue

from ... import arguments
from ...errors import AbortedError, DisaggKVError, EndpointBrokenError, LocalProtocolError
from ..latch import Latch
from .admission import Admission
from .event_loop import EventLoop

_TIMER_SLACK = 29  # PR_SET_TIMERSLACK, see prctl(2)

STEP_S = 1.0
"""The longest single wait; whatever happens wakes the thread earlier."""


def sleep_exactly() -> None:
    """Linux wakes a thread up to 50 us late to save power, as long as a pause of ours; this thread wakes in time."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1)


class EndpointThread:
    """Steps an event loop until it is closed. With ``thread=False`` the caller steps it.

    The thread that steps the loop also closes it, and :meth:`close` waits for that. So a ``close`` that an exception
    interrupts, such as a ``KeyboardInterrupt``, loses nothing: the endpoint goes on to close, and the next ``close``
    waits again. A ``close`` in a signal handler waits for no lock that the interrupted call may hold: what the engine's
    thread shares with the endpoint's has none.

    Args:
        loop: what is stepped.
        name: of the thread.
        break_down: fails what the engine still has a handle of and has not ended.
        thread: whether there is one.
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        break_down: Callable[[DisaggKVError], None],
        thread: bool,
    ) -> None:
        self.loop = loop
        self._break_down = break_down
        self._where = f"endpoint {loop.me.instance}/{loop.me.rank}"
        self._asked: SimpleQueue[None] = SimpleQueue()  # to close; its ``put`` may interrupt itself
        self._until = inf
        self._over = Latch()
        self._failed: BaseException | None = None
        self._stepped_by: int | None = None
        self.admission = Admission(lambda: self.broken)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self.admission.ended

    @property
    def broken(self) -> EndpointBrokenError | None:
        """Why the endpoint takes no calls any more; None: it does.

        Raises:
            LocalProtocolError: this is a forked child of the process that has the endpoint.
        """
        self.loop.home.check()
        return self.loop.failures.broken

    def step(self, timeout_s: float = 0.0) -> None:
        """One step, on the calling thread; only without a thread of our own.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
            LocalProtocolError: as :attr:`broken`.
        """
        assert self._thread is None
        if self.broken is not None:
            raise self.broken
        self._stepped_by = threading.get_ident()
        try:
            self._step(timeout_s)
        finally:
            self._stepped_by = None
        if self.loop.failures.broken is not None:
            raise self.loop.failures.broken

    def _run(self) -> None:
        if self.loop.idle.linger_s:
            sleep_exactly()
        self._stepped_by = threading.get_ident()
        while self._asked.empty() and self.loop.failures.broken is None:
            self._step(STEP_S)
        self._asked.get()
        self._finish()

    def _step(self, timeout_s: float) -> None:
        """One step. Its errors are handled in it; one that is not ends every room, and then this endpoint."""
        try:
            self.loop.step(timeout_s)
        except BaseException as exc:
            self._break_down(self.loop.failures.break_down(exc))
            self.loop.drop_commands()

    def close(self, drain_s: float) -> None:
        """Abort every open room, wait at most ``drain_s`` seconds for their ends, and stop; a second call is harmless.

        Any thread but the endpoint's own, also in a signal handler. After an interruption, call it again. Of several
        calls the one whose time is over first counts.

        Raises:
            LocalProtocolError: as :attr:`broken`, or the endpoint's own thread calls; nothing is closed then.
            TransportError: the transport could not be closed; all else is.
        """
        self.loop.home.check()
        drain_s = arguments.seconds(drain_s, "drain_s", zero=True)
        if self._stepped_by == threading.get_ident():
            raise LocalProtocolError(f"{self._where}: close was called by its own thread, which cannot wait for itself")
        self.admission.end()
        self._until = min(self._until, self.loop.clock() + drain_s)
        if self._thread is not None:
            self._asked.put(None)
            self.loop.channel.wake()
            self._over.wait()
        elif not self._over.is_set:
            self._finish()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _finish(self) -> None:
        """What raises here is raised by ``close``."""
        self._stepped_by = threading.get_ident()
        try:
            try:
                self._drain()
            finally:
                self._stop()
        except BaseException as exc:
            self._failed = exc
        finally:
            self._stepped_by = None
            self._over.set()

    def _drain(self) -> None:
        """The last steps."""
        loop = self.loop
        with suppress(EndpointBrokenError):
            loop.post(lambda: loop.side.integrity_failure(AbortedError("the endpoint closes")))
        if loop.failures.broken is None:
            self._step(0.0)
        while loop.failures.broken is None and loop.behind:
            self._step(0.0)
        while loop.failures.broken is None and loop.side.open_rooms and loop.clock() < self._until:
            self._step(0.02)

    def _stop(self) -> None:
        """Close everything, and fail every handle that has not ended, whatever raises."""
        loop = self.loop
        try:
            if self._thread is not None:
                loop.directory.withdraw(loop.me.instance, loop.me.rank)
        finally:
            try:
                loop.stop(max(0.0, self._until - loop.clock()))
            finally:
                self._break_down(AbortedError(f"{self._where} has closed"))
