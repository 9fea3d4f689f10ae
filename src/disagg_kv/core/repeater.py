"""Repeating requests until they are answered."""

from __future__ import annotations

from collections.abc import Hashable

from attrs import define

from .base import Options, Send
from .timers import Timers


@define
class _Due:
    send: Send
    at: float
    pause: float


class Repeater:
    """Frames that are sent again and again, ever slower, until their answer stops them.

    A frame that is not due costs nothing, however many frames there are.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._due: dict[Hashable, _Due] = {}
        self._timers: Timers[Hashable] = Timers()

    def start(self, key: Hashable, send: Send, now: float) -> Send:
        """Send now, and repeat under ``key``; replaces the frame that had this key."""
        self._due[key] = _Due(send, now + self._options.retry_s, self._options.retry_s)
        self._timers.schedule(key, now + self._options.retry_s)
        return send

    def slow(self, key: Hashable) -> None:
        """The frame has arrived, but its answer is pending: repeat it rarely, in case the answer is lost.

        Often enough that a receiver which keeps a parked frame for ``silence_s`` never forgets it.
        """
        due, pause = self._due.get(key), self._options.silence_s / 3
        if due is not None and due.pause != pause:
            due.at += pause - due.pause
            due.pause = pause
            self._timers.schedule(key, due.at)

    def stop(self, key: Hashable) -> None:
        """Stop repeating a frame: its answer has arrived."""
        if self._due.pop(key, None) is not None:
            self._timers.schedule(key, None)

    def clear(self) -> None:
        """Stop repeating all frames."""
        self._due.clear()
        self._timers.clear()

    def tick(self, now: float) -> list[Send]:
        """The frames that are due again."""
        out: list[Send] = []
        for key in self._timers.due(now):
            due = self._due[key]
            if due.pause < self._options.retry_most_s:
                due.pause = min(2 * due.pause, self._options.retry_most_s)
            due.at = now + due.pause
            self._timers.schedule(key, due.at)
            out.append(due.send)
        return out

    def next_at(self) -> float | None:
        """When ``tick`` has something to do, or None."""
        return self._timers.next_at() if self._due else None
