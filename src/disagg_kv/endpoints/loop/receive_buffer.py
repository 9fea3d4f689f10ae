"""What has come in and has not been taken in yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ...channels import Arrived, Channel, News
from .budget import Budget

STALLED_S = 0.5
"""A thread that has not asked the channel for this many seconds was stopped, perhaps with its whole process."""

GRACE_S = 0.05
"""Seconds that a channel then gets to hand over what lies in its sockets: another thread may have to read them."""

FEW = 16
MUCH = 32 << 20
"""A channel that gives more frames and bytes than these may have stopped at a bound of its own, and have more."""


class ReceiveBuffer:
    """What one step has no time for comes first in the next, before the channel is asked for more.

    Args:
        channel: where news come from.
        failed: called with the error that the channel raised; the channel may work again later.
        clock: time, in seconds.
    """

    def __init__(self, channel: Channel, failed: Callable[[Exception], None], clock: Callable[[], float]) -> None:
        self._channel = channel
        self._failed = failed
        self._clock = clock
        self._left: deque[News] = deque()
        self._asked = self._polled = clock()
        self._awake_at = self._asked

    def __len__(self) -> int:
        return len(self._left)

    def fetch(self) -> bool:
        """Unless something is left, ask the channel; False: there is nothing."""
        if not self._left:
            before = self._clock()
            if before - self._polled > STALLED_S:
                self._awake_at = before + GRACE_S
            try:
                self._left.extend(self._channel.poll())
            except Exception as exc:
                self._failed(exc)
            self._polled = self._clock()
            if self._polled - before > STALLED_S:
                self._awake_at = self._polled + GRACE_S
            if before >= self._awake_at and (len(self._left) <= FEW or not self._bounded()):
                self._asked = before
        return bool(self._left)

    def _bounded(self) -> bool:
        """Whether the channel may have more of what had come when it was asked."""
        return sum(len(one.frame) for one in self._left if isinstance(one, Arrived)) > MUCH

    @property
    def caught_up(self) -> float | None:
        """Up to when all that had come has been taken in; None: some of it is left."""
        return None if self._left else self._asked

    def take(self, budget: Budget) -> Iterator[News]:
        """What the budget allows."""
        while self._left and budget.take():
            yield self._left.popleft()
