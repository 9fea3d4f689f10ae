"""What has come in and has not been taken in yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ...channels import Channel, News
from .budget import Budget


class ReceiveBuffer:
    """What one turn has no time for comes first in the next, before the channel is asked for more.

    Args:
        channel: where news come from.
        failed: told what the channel raised: perhaps it works again later.
        clock: time, in seconds.
    """

    def __init__(self, channel: Channel, failed: Callable[[Exception], None], clock: Callable[[], float]) -> None:
        self._channel = channel
        self._failed = failed
        self._clock = clock
        self._left: deque[News] = deque()
        self._asked = clock()

    def __len__(self) -> int:
        return len(self._left)

    def fetch(self, wait_s: float) -> bool:
        """Ask the channel, which waits so many seconds, unless something is left; False: there is nothing."""
        if not self._left:
            try:
                self._left.extend(self._channel.poll(wait_s))
            except Exception as exc:
                self._failed(exc)
            self._asked = self._clock()
        return bool(self._left)

    @property
    def caught_up(self) -> float | None:
        """When the channel was last asked; None: some of what it gave then is left."""
        return None if self._left else self._asked

    def take(self, budget: Budget) -> Iterator[News]:
        """What the budget allows."""
        while self._left and budget.take():
            yield self._left.popleft()
