"""What the handles of a prefill endpoint post to its thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ...core import RoomKey
from ...ids import LayerId
from ...memory import Event
from ..handle import HostEvent
from ..loop.driver import Driver
from .handle import Act, SubmittedChunk
from .rooms import PrefillSide


class PostedCommands:
    """Satisfies :class:`~disagg_kv.endpoints.prefill.handle.PrefillCommands`, which says what each of them does.

    Args:
        driver: runs them, in the engine's calls or on the endpoint's thread.
        side: does what they say.
    """

    def __init__(self, driver: Driver, side: PrefillSide) -> None:
        self.admission = driver.admission
        self._driver = driver
        self._loop = driver.loop
        self._side = side

    def change(self, key: RoomKey, act: Act, ready: Event | None = None) -> None:
        """Change a room behind an event."""
        loop, side = self._loop, self._side
        self._driver.post(lambda: loop.when(ready, lambda: side.change(key, act), lambda exc: side.broken([key], exc)))

    def send(self, submitted: SubmittedChunk, ready: Event | None) -> None:
        """Rows behind an event."""
        self._driver.post(partial(self._side.send, submitted, ready))

    def final(
        self, submitted: Sequence[SubmittedChunk], layers: Collection[LayerId] | None, ready: Event | None
    ) -> None:
        """Layers of submitted rows behind an event."""
        self._loop.post(partial(self._side.final_at, submitted, layers, ready, self._loop.clock()))

    def begun(self, submitted: Sequence[SubmittedChunk]) -> None:
        """The first layer."""
        self._loop.post(partial(self._side.begun, submitted, self._loop.clock()))

    def wake(self) -> None:
        """Advance the loop."""
        self._driver.drive()

    def closed(self, submitted: Sequence[SubmittedChunk], ready: Event | None) -> None:
        """The end of a forward pass."""
        self._driver.post(partial(self._side.closed_at, submitted, ready, self._loop.clock()))

    def withdraw(self, key: RoomKey, fired: HostEvent) -> None:
        """Stop reading a room's pages."""
        self._driver.post(partial(self._side.withdraw, key, fired))

    def lend(self, over: Callable[[], bool]) -> None:
        """Advance the loop until something is over."""
        self._driver.lend(over)
