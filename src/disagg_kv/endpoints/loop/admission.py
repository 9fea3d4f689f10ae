"""Which calls an endpoint still takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import DisaggKVError, LocalProtocolError


class Admission:
    """Every public call that queues something goes through here; thread-safe, and without a lock.

    The endpoint's last command aborts its rooms, and is queued after ``end``. A call looks once more when it has queued
    its own command. If that was not the end yet, its command comes before the last one. If it was, the call is refused
    although it has queued something, and its engine has no handle of what that begins. So a room that was accepted
    always ends. A signal handler may close the endpoint wherever it interrupts a call.

    Args:
        broken: why the endpoint cannot go on; None: it can.
    """

    def __init__(self, broken: Callable[[], DisaggKVError | None]) -> None:
        self._broken = broken
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
        """Queue something inside this block; raises as :meth:`check` does, when it begins and when it ends."""
        self.check(what)
        yield
        self.check(what)

    def end(self) -> None:
        """Take no call any more; again is harmless."""
        self._ended = True
