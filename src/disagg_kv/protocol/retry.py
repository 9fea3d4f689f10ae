"""Repeating requests until they are answered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf

from attrs import define

from .base import Options, Send


@define
class _Due:
    send: Send
    at: float
    pause: float


class Repeater:
    """Frames that are sent again and again, ever slower, until somebody stops them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._due: dict[Hashable, _Due] = {}
        self._soonest = inf
        """Nothing is due before."""

    def start(self, key: Hashable, send: Send, now: float) -> Send:
        """Send now, and repeat under ``key``; replaces what ran under it."""
        due = self._due[key] = _Due(send, now + self._options.retry_s, self._options.retry_s)
        self._soonest = min(self._soonest, due.at)
        return send

    def slow(self, key: Hashable) -> None:
        """It is known, but its answer is still to come: repeat it rarely, should that be lost."""
        due = self._due.get(key)
        if due is not None and due.pause != self._options.known_s:
            due.at += self._options.known_s - due.pause
            due.pause = self._options.known_s
            self._soonest = min(self._soonest, due.at)

    def stop(self, key: Hashable) -> None:
        """The answer is here."""
        self._due.pop(key, None)

    def clear(self) -> None:
        """Nothing is repeated any more."""
        self._due.clear()

    def keys(self) -> Iterable[Hashable]:
        """What is being repeated."""
        return tuple(self._due)

    def tick(self, now: float) -> list[Send]:
        """What has to go out again."""
        out: list[Send] = []
        if now < self._soonest:
            return out
        for due in self._due.values():
            if due.at <= now:
                if due.pause < self._options.retry_most_s:
                    due.pause = min(2 * due.pause, self._options.retry_most_s)
                due.at = now + due.pause
                out.append(due.send)
        self._soonest = min((due.at for due in self._due.values()), default=inf)
        return out

    def next_at(self) -> float | None:
        """When ``tick`` has something to do, or None."""
        return min([due.at for due in self._due.values()]) if self._due else None
