"""Repeating requests until they are answered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf

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

    What is not due costs nothing, however many frames there are.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._due: dict[Hashable, _Due] = {}
        self._timers: Timers[Hashable] = Timers()

    def start(self, key: Hashable, send: Send, now: float) -> Send:
        """Send now, and repeat under ``key``; replaces what ran under it."""
        self._due[key] = _Due(send, now + self._options.retry_s, self._options.retry_s)
        self._timers.schedule(key, now + self._options.retry_s)
        return send

    def slow(self, key: Hashable, most_s: float = inf) -> None:
        """It is known, but its answer is still to come: repeat it rarely, should that be lost.

        Args:
            key: what it runs under.
            most_s: the longest pause, in seconds: the receiver forgets it after a longer one.
        """
        due, pause = self._due.get(key), min(self._options.known_s, most_s)
        if due is not None and due.pause != pause:
            due.at += pause - due.pause
            due.pause = pause
            self._timers.schedule(key, due.at)

    def stop(self, key: Hashable) -> None:
        """The answer is here."""
        if self._due.pop(key, None) is not None:
            self._timers.schedule(key, None)

    def clear(self) -> None:
        """Nothing is repeated any more."""
        self._due.clear()
        self._timers.clear()

    def keys(self) -> Iterable[Hashable]:
        """What is being repeated."""
        return tuple(self._due)

    def tick(self, now: float) -> list[Send]:
        """What has to go out again."""
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
