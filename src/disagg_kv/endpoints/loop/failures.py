"""What an endpoint does with errors: it counts those of peers, and ends rooms, or itself, for its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVarTuple

from ...errors import DisaggKVError, EndpointBrokenError, RemoteProtocolError, text_of
from ...trace import Observer
from ..peers.limited_log import LimitedLog

log = logging.getLogger("disagg_kv")

A = TypeVarTuple("A")


class Broken(BaseException):
    """The endpoint cannot go on; it passes every ``except Exception`` between here and the thread's end."""

    def __init__(self, error: EndpointBrokenError) -> None:
        self.error = error
        super().__init__(str(error))


class Failures:
    """Runs on the thread that advances.

    Args:
        name: of the endpoint.
        observer: counts errors.
        clock: time, in seconds.
        end_rooms: fails all open rooms.
    """

    def __init__(
        self, name: str, observer: Observer, clock: Callable[[], float], end_rooms: Callable[[DisaggKVError], None]
    ) -> None:
        self._name = name
        self._observer = observer
        self._end_rooms = end_rooms
        self.deferred: list[Exception] = []
        self._warnings, self._errors = LimitedLog(clock), LimitedLog(clock)
        self.broken: EndpointBrokenError | None = None

    def guard(self, act: Callable[[*A], object], *about: *A) -> object:
        """Call something. Whatever goes wrong ends rooms, with the reason, but not this thread; None then.

        Raises:
            Broken: not even that can be handled.
        """
        try:
            return act(*about)
        except Exception as exc:
            self.met(exc)
        return None

    def defer(self, exc: Exception) -> None:
        """Handle an error between events: it was met in the middle of one, whose accounts are half done."""
        self.deferred.append(exc)

    def handle_deferred(self) -> None:
        """Handle those."""
        while self.deferred:
            self.met(self.deferred.pop(0))

    def met(self, exc: Exception) -> None:
        """Something went wrong: of theirs it is counted, of ours it ends rooms."""
        if isinstance(exc, RemoteProtocolError):
            self._observer.count("frames.refused")
            self.warn(f"refused: {exc}")
        else:
            self.unforeseen(exc)

    def warn(self, text: str) -> None:
        """Log what strangers can cause."""
        self._warnings.say(logging.WARNING, text)

    def unforeseen(self, exc: Exception) -> None:
        """No open room can be trusted any more; if not even that can be handled, the endpoint ends."""
        try:
            self._end_rooms(self.note(exc, "its open rooms"))
        except Exception as second:
            raise Broken(self._broken_by(second)) from second

    def note(self, exc: Exception, rooms: str) -> DisaggKVError:
        """Say that these rooms fail for an error that was not foreseen; returns why."""
        self._errors.say(logging.ERROR, f"an endpoint met an error that it did not foresee; {rooms} fail", exc)
        self._observer.count("errors.unforeseen")
        error = DisaggKVError(f"the endpoint failed: {text_of(exc)}")
        error.__cause__ = exc
        return error

    def _broken_by(self, exc: BaseException) -> EndpointBrokenError:
        error = EndpointBrokenError(f"endpoint {self._name} is broken: {text_of(exc)}")
        error.__cause__ = exc
        return error

    def break_down(self, exc: BaseException) -> EndpointBrokenError:
        """The endpoint cannot go on: every later call raises the error that is returned."""
        error = self.broken = exc.error if isinstance(exc, Broken) else self._broken_by(exc)
        log.critical("%s; it takes no calls any more", error, exc_info=exc)
        return error
