"""Channels between endpoints of one process, for tests and simulators."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from ..errors import ConfigurationError
from ..transports import LinkCost
from .base import Arrived, Closed, News, Opened, check_frame


class Hub:
    """The network that in-process channels share. Thread-safe; without threads of its own, so runs repeat exactly.

    Args:
        high_water: frames that an inbox holds; more are dropped.
    """

    def __init__(self, high_water: int = 10_000) -> None:
        if high_water < 1:
            raise ConfigurationError(f"a high water of {high_water} frames: must be positive")
        self.high_water = high_water
        self._lock = threading.RLock()
        self._open: dict[str, InprocChannel] = {}
        self._watchers: dict[str, dict[InprocChannel, None]] = {}


class InprocChannel:
    """An inbox on a :class:`Hub`; satisfies :class:`Channel`. A frame is in the other inbox when ``send`` returns.

    Args:
        hub: whom it can reach.
        name: its address is ``inproc://name``.

    Attributes:
        address: where others on the hub reach this inbox.

    Raises:
        ConfigurationError: an open channel has that name.
    """

    eager = False
    link_cost = LinkCost(200, 0)
    """Two entries of a table."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub = hub
        self.address = f"inproc://{name}"
        self._frames = 0
        self._inbox: deque[News] = deque()
        self._closed = False
        # No lock: a signal handler may interrupt ``wake`` and call it. A thread that waits first shows its queue and
        # then looks at ``_woken``; ``wake`` does the reverse, so one of the two sees what the other did.
        self._woken = False
        self._waiting: list[SimpleQueue[None]] = []
        with hub._lock:
            if self.address in hub._open:
                raise ConfigurationError(f"channel {self.address}: the address is in use")
            hub._open[self.address] = self
            self._announce(Opened(self.address))

    def send(self, address: str, frame: bytes) -> bool:
        """Put a frame into the other inbox. False: no open inbox has that address, or it is full.

        Raises:
            ConfigurationError: the frame is larger than MAX_FRAME.
        """
        check_frame(address, frame)
        with self._hub._lock:
            if self._closed:
                return False
            other = self._hub._open.get(address)
            watchers = self._hub._watchers.setdefault(address, {})
            if self not in watchers:
                watchers[self] = None
                self._put(Closed(address) if other is None else Opened(address))
            if other is None or other._frames >= self._hub.high_water:
                return False
            other._frames += 1
            other._inbox.append(Arrived(bytes(frame)))
            other.wake()
            return True

    def poll(self) -> Sequence[News]:
        """What came in."""
        with self._hub._lock:
            came = tuple(self._inbox)
            self._inbox.clear()
            self._frames = 0
            return came

    def wait(self, timeout_s: float) -> None:
        """Block until ``poll`` would return something, ``wake`` is called, or the time is over."""
        mine: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(mine)
        try:
            if not self._woken and not self._inbox:
                with suppress(Empty):
                    mine.get(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))
            self._woken = self._closed
        finally:
            self._waiting.remove(mine)

    def wake(self) -> None:
        """Make a ``wait`` of another thread return, or the next one; also after ``close``."""
        self._woken = True
        for one in tuple(self._waiting):
            one.put(None)

    def forget(self, address: str) -> None:
        """Report no more events of that address until the next frame is sent to it."""
        with self._hub._lock:
            self._inbox = deque(event for event in self._inbox if getattr(event, "address", None) != address)
            watchers = self._hub._watchers.get(address, {})
            watchers.pop(self, None)
            if not watchers:
                self._hub._watchers.pop(address, None)

    def close(self) -> None:
        """Stop; nothing is received or sent afterwards."""
        with self._hub._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
            for address in [a for a, watchers in self._hub._watchers.items() if self in watchers]:
                self.forget(address)
            del self._hub._open[self.address]
            self._announce(Closed(self.address))
            self.wake()

    def _put(self, event: News) -> None:
        self._inbox.append(event)
        self.wake()

    def _announce(self, event: Closed | Opened) -> None:
        for watcher in self._hub._watchers.get(self.address, {}):
            watcher._put(event)
