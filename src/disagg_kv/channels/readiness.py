"""A descriptor that is readable, for an engine's ``select``, ``epoll`` or asyncio."""

from __future__ import annotations

import os
import weakref


class Readiness:
    """An eventfd of Linux. Any thread sets it; it stays readable until it is cleared. Closed with this object.

    It is not closed earlier: the engine may wait for it in an event loop of its own, and Linux would give its number
    to the next file that any thread opens.
    """

    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not at exit: the endpoint's thread may still run, and must not find another file under this number.
        weakref.finalize(self, os.close, self._file).atexit = False

    def fileno(self) -> int:
        """The descriptor."""
        return self._file

    def set(self) -> None:
        """Make it readable; harmless if it is."""
        os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        """Make it unreadable; harmless if it is."""
        try:
            os.eventfd_read(self._file)
        except BlockingIOError:
            return  # it was not set
