"""The endpoint's own thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from ... import arguments
from ...errors import EndpointBrokenError
from .admission import Admission
from .event_loop import Node
from .handle import RoomHandle

_TIMER_SLACK = 29  # PR_SET_TIMERSLACK, see prctl(2)

TURN_S = 1.0
"""The longest single wait; whatever happens wakes the thread earlier."""


def _sleep_exactly() -> None:
    """Linux wakes a thread up to 50 us late to save power, as long as a pause of ours; this thread wakes in time."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1)


class Driver:
    """Turns a node until it is closed. With ``thread=False`` the caller turns it."""

    def __init__(
        self,
        node: Node,
        name: str,
        abort_all: Callable[[str], None],
        open_rooms: Callable[[], int],
        handles: Callable[[], Iterable[RoomHandle]],
        thread: bool,
    ) -> None:
        self._node = node
        self._abort_all = abort_all
        self._open_rooms = open_rooms
        self._handles = handles
        self._stop = threading.Event()
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
        self._node.home.check()
        return self._node.broken

    def turn(self, timeout_s: float = 0.0) -> None:
        """One turn, on the calling thread; only without a thread of our own.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
            LocalProtocolError: as :attr:`broken`.
        """
        assert self._thread is None
        if self.broken is not None:
            raise self.broken
        self._turn(timeout_s)
        if self._node.broken is not None:
            raise self._node.broken

    def _run(self) -> None:
        if self._node.linger_s:
            _sleep_exactly()
        while not self._stop.is_set() and self._node.broken is None:
            self._turn(TURN_S)

    def _turn(self, timeout_s: float) -> None:
        """One turn. Its errors are handled in it; one that is not ends every room, and then this endpoint."""
        try:
            self._node.turn(timeout_s)
        except BaseException as exc:
            error = self._node.break_down(exc)
            for handle in self._handles():
                handle.break_down(error)

    def close(self, drain_s: float) -> None:
        """Abort every open room, give their last words ``drain_s`` seconds, and stop; again is harmless.

        Raises:
            LocalProtocolError: as :attr:`broken`; nothing is closed then.
        """
        self._node.home.check()
        drain_s = arguments.seconds(drain_s, "drain_s", zero=True)
        if not self.admission.end():
            return
        node = self._node
        until = node.clock() + drain_s
        with suppress(EndpointBrokenError):
            node.post(lambda: self._abort_all("the endpoint closes"))
        if self._thread is not None:
            self._stop.set()
            node.channel.wake()
            self._thread.join()
        if node.broken is None:
            self._turn(0.0)
        while node.broken is None and node.behind:
            self._turn(0.0)
        while node.broken is None and self._open_rooms() and node.clock() < until:
            self._turn(0.02)
        if self._thread is not None:
            node.directory.withdraw(node.me.instance, node.me.rank)
        node.stop(max(0.0, until - node.clock()))
