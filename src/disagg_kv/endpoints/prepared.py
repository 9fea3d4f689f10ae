"""Launches that are prepared before they may begin.

Prefill prepares gathers before their rows are final, decode prepares scatters before their bytes have landed. A
prepared launch is good for one key and under one condition. It is taken at most once. Each one that is not taken is
dropped, so that kernels get back what they hold for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from attrs import frozen

from .loop.event_loop import EventLoop


class Launch(Protocol):
    """What kernels have prepared."""

    def drop(self) -> None:
        """It will not be launched: give back what it holds."""
        ...


K = TypeVar("K", bound=Hashable)
W = TypeVar("W")
C = TypeVar("C")
L = TypeVar("L", bound=Launch)


@frozen(eq=False)
class Ready(Generic[C, L]):
    """A prepared launch, and the condition under which it may be used."""

    condition: C
    launch: L


class PreparedLaunches(Generic[K, W, C, L]):
    """Runs on the thread that advances.

    ``waiting`` has what is to be prepared, by key, the oldest first. ``ready`` has what is prepared.

    Args:
        loop: the endpoint's, for its observer.
        what: ``"gathers"`` or ``"scatters"``; counters begin with it.
    """

    def __init__(self, loop: EventLoop, what: str) -> None:
        self._loop = loop
        self._what = what
        self.waiting: dict[K, W] = {}
        self.ready: dict[K, Ready[C, L]] = {}

    def prepare(self, key: K, make: Callable[[], tuple[C, L] | None]) -> None:
        """Keep the launch that ``make`` returns with its condition, in place of an earlier one.

        If ``make`` raises, that is counted: the same is done again, and fails the room, when the launch is due.
        """
        try:
            made = make()
        except Exception:
            self._loop.observer.count(f"{self._what}.not_prepared")
            return
        if made is not None:
            self.drop(key)
            self.ready[key] = Ready(*made)

    def take(self, key: K, condition: C) -> L | None:
        """The launch that was prepared for exactly this; one for another condition is dropped. The caller launches."""
        ready = self.ready.get(key)
        if ready is None:
            return None
        if ready.condition != condition:
            self.drop(key)
            return None
        del self.ready[key]
        return ready.launch

    def forget(self, key: K) -> None:
        """Nothing will be launched for this key, nor prepared."""
        self.waiting.pop(key, None)
        if key in self.ready:
            self.drop(key)

    def drop(self, key: K) -> None:
        """What is prepared for this key will not be launched."""
        ready = self.ready.pop(key, None)
        if ready is None:
            return
        try:
            ready.launch.drop()
        except Exception:
            # The kernels lose what they kept for it; no room depends on it.
            self._loop.observer.count(f"{self._what}.not_dropped")
