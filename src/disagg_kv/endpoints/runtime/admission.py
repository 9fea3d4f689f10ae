"""Which calls an endpoint still takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import DisaggKVError, LocalProtocolError


class Admission:
    """Every public call that queues something goes through here; thread-safe.

    A call that is inside ``enter`` has queued its command before ``end`` returns. So the last command of an endpoint,
    which aborts its rooms, comes after each room that was accepted.

    Args:
        broken: why the endpoint cannot go on; None: it can.
    """

    def __init__(self, broken: Callable[[], DisaggKVError | None]) -> None:
        self._broken = broken
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once no call is taken any more."""
        return self._ended

    def check(self, what: str) -> None:
        """Raise if no call is taken any more; another thread may end that at any moment.

        Raises:
            EndpointBrokenError: the endpoint has failed.
            LocalProtocolError: the endpoint is closed.
        """
        error = self._broken()
        if error is not None:
            raise error
        if self._ended:
            raise LocalProtocolError(f"{what}: the endpoint is closed")

    @contextmanager
    def enter(self, what: str) -> Iterator[None]:
        """Queue something inside this block; raises as :meth:`check` does."""
        self.check(what)  # before the lock, which a forked child may have inherited taken
        with self._lock:
            self.check(what)
            yield

    def end(self) -> bool:
        """Take no call any more; False: it was so before."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first
