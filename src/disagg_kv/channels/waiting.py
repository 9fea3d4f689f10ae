"""Waits for descriptors that any thread may make, also while another one uses or closes them."""

from __future__ import annotations

import ctypes
import os
import select
import time
from math import inf

from .readiness import Readiness

LONGEST_S = 1e6
"""The longest wait; the kernel's numbers end somewhere."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Waiter(Readiness):
    """Lets threads wait until a descriptor of an epoll object is readable, or this object is set; all at once.

    The kernel gives the number of a closed descriptor to the next file that any thread opens. The descriptors that
    ``wait`` uses are therefore closed with this object, and a thread that waits refers to it. To close a channel: drop
    the reference to this object, ``end`` it, then close everything else. A thread that waits, or is about to, finds it
    set.

    A wait that finds it set takes that back, and nothing else does: a thread that is waked may be scheduled only after
    the thread that waked it has done many other things, such as polls.

    Args:
        epoll: the caller may change it while threads wait, and close it.
    """

    def __init__(self, epoll: select.epoll) -> None:
        super().__init__()
        epoll.register(self, select.EPOLLIN)
        self._same = select.epoll.fromfd(os.dup(epoll.fileno()))
        self._awaited = _PollFd(self._same.fileno(), select.POLLIN, 0)
        self._ended = False

    def wait(self, timeout_s: float) -> None:
        """Return when a descriptor is readable, this object is set, the time is over, or a signal came."""
        limit = _Timespec(*divmod(int(max(0.0, min(timeout_s, LONGEST_S)) * 1e9), 1_000_000_000))
        # The waits of ``select`` are rounded up to milliseconds.
        if _LIBC.ppoll(ctypes.byref(self._awaited), 1, ctypes.byref(limit), None) > 0:
            self.clear()
            if self._ended:
                self.set()

    def end(self) -> None:
        """Make every wait return from now on."""
        self._ended = True
        self.set()


class Waits:
    """Two methods of a channel that has a waiter, and drops it as the first step of its ``close``."""

    _waiter: Waiter | None

    def wait(self, timeout_s: float) -> None:
        """Block until ``poll`` would return something, ``wake`` is called, or the time is over."""
        if (waiter := self._waiter) is not None:
            waiter.wait(timeout_s)

    def wake(self) -> None:
        """Make a ``wait`` of another thread return, or the next one; also after ``close``."""
        if (waiter := self._waiter) is not None:
            waiter.set()


class Timer:
    """A descriptor that is readable from a time on. A thread that waits for it need not know that the time changes."""

    def __init__(self) -> None:
        self._file: int = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self.at = inf

    def fileno(self) -> int:
        """The descriptor."""
        return self._file

    def set(self, at: float) -> None:
        """From which time of ``time.monotonic`` on it is readable; ``inf``: never."""
        if at != self.at:
            # 1: an absolute time.
            first = _Timespec(*divmod(0 if at == inf else int(at * 1e9) + 1, 1_000_000_000))
            _LIBC.timerfd_settime(self._file, 1, (_Timespec * 2)(_Timespec(), first), None)
            self.at = at

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._file)
