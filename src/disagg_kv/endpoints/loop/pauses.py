"""Times in which this endpoint's own thread did not run: its process stood still, or the thread was blocked.

Peers notice such a time as silence, and deadlines pass in it. An error that follows names it, since the fault is not at
the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ...errors import AbortedError, DeadlineError, DisaggKVError, InstanceClosedError, PeerLostError

SHARE = 0.1
"""The least part of a room's time that a pause takes if it explains that the room's deadline has passed."""


class Pauses:
    """The last such time.

    Args:
        least_s: what is shorter is none.
        blamed_s: seconds after it in which it explains errors.
        ended: whether the process of a life is known to have ended. No pause explains that.
    """

    def __init__(self, least_s: float, blamed_s: float, ended: Callable[[bytes], bool]) -> None:
        self.least_s = least_s
        self._blamed_s = blamed_s
        self._ended = ended
        self._last = self._until = -inf
        self._seconds = 0.0

    def over(self, before: float, due: float | None, now: float) -> str:
        """The endpoint's thread runs again. Returns a line for the log; empty: it ran in time.

        Args:
            before: when it ran last.
            due: when it would have had something to do; None: never.
            now: the time.
        """
        if due is None or now - max(before, due) < self.least_s:
            return ""
        self._last, self._until, self._seconds = before, now, now - before
        return self._words()

    def explain(self, error: DisaggKVError | None, opened: float, now: float) -> DisaggKVError | None:
        """The error of a room that was opened at a time; it begins with the pause if that may be the reason."""
        if error is None or opened > self._until or now - self._until > self._blamed_s:
            return error
        match error:
            case AbortedError():
                blamed = error.epoch is not None
            case PeerLostError():
                proved = error.epoch is not None and self._ended(error.epoch)
                blamed = not proved and not isinstance(error, InstanceClosedError)
            case DeadlineError():
                blamed = self._seconds >= SHARE * (now - opened)
            case _:
                blamed = False
        return error.about(self._words()) if blamed else error

    def _words(self) -> str:
        return f"this process did not run for {self._seconds:.1f} s"
