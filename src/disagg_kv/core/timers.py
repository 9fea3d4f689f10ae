"""Due times of many keys, in a heap, and frames that are repeated until they are answered.

A key that is not due costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

from attrs import define

from .base import Options, Send

K = TypeVar("K", bound=Hashable)

SPARE = 16
"""The heap is rebuilt when it has more than this number plus twice the number of keys."""


class Timers(Generic[K]):
    """One time per key. To set, to move and to take a time costs the logarithm of the number of keys.

    An entry of the heap is valid while it is the newest of its key: an older one is dropped when it is met.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._due: dict[K, tuple[float, int]] = {}
        self._number = 0
        self._round = -inf
        self._next_round: list[tuple[float, int, K]] = []

    def schedule(self, key: K, when: float | None) -> None:
        """Make a key due at this time and not before; None: never."""
        if when is None:
            self._due.pop(key, None)
            return
        known = self._due.get(key)
        if known is not None and known[0] == when:
            return
        self._number += 1
        self._due[key] = (when, self._number)
        if when <= self._round:
            self._next_round.append((when, self._number, key))
        else:
            heappush(self._heap, (when, self._number, key))

    def by(self, key: K, when: float) -> None:
        """Make a key due at this time or before.

        An earlier time stays: one check in vain costs less than to move it.
        """
        known = self._due.get(key)
        if known is None or when < known[0]:
            self.schedule(key, when)

    def due(self, now: float) -> Iterable[K]:
        """Keys that are due, the earliest first; each has no time until it gets another.

        Keys come one at a time: if handling one raises, the others keep their times. A key that gets a time meanwhile
        comes with the next call, however early that time is.
        """
        self._begin_round(now)
        return self._pop(now) if self._heap and self._heap[0][0] <= now else ()

    def _pop(self, now: float) -> Iterator[K]:
        while self._heap and self._heap[0][0] <= now:
            _, number, key = heappop(self._heap)
            known = self._due.get(key)
            if known is not None and known[1] == number:
                del self._due[key]
                yield key

    def next_at(self) -> float | None:
        """When the next key is due; None: none is."""
        self._begin_round(-inf)
        while self._heap:
            when, number, key = self._heap[0]
            known = self._due.get(key)
            if known is not None and known[1] == number:
                return when
            heappop(self._heap)
        return None

    def _begin_round(self, now: float) -> None:
        """Add the postponed entries; rebuild the heap if most of its entries are out of date."""
        self._round = now
        if not self._due or len(self._heap) > 2 * len(self._due) + SPARE:
            self._heap = [(at, number, key) for key, (at, number) in self._due.items()]
            heapify(self._heap)
        else:
            for entry in self._next_round:
                heappush(self._heap, entry)
        self._next_round.clear()

    def clear(self) -> None:
        """Remove all keys."""
        self._heap.clear()
        self._next_round.clear()
        self._due.clear()


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
