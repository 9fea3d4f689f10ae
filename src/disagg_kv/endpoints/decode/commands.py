"""What the handles of a decode endpoint post to its thread."""

from __future__ import annotations

from functools import partial

from ...core import RoomKey
from ...errors import AbortedError
from ..loop.driver import Driver
from .handle import CheckedExpectation
from .rooms import DecodeSide


class PostedCommands:
    """Satisfies :class:`~disagg_kv.endpoints.decode.handle.DecodeCommands`, which says what each of them does.

    Args:
        driver: runs them, in the engine's calls or on the endpoint's thread.
        side: does what they say.
    """

    def __init__(self, driver: Driver, side: DecodeSide) -> None:
        self.admission = driver.admission
        self._driver = driver
        self._side = side

    def expect(self, key: RoomKey, wanted: CheckedExpectation) -> None:
        """Await rows."""
        self._driver.post(partial(self._side.expect, key, wanted))

    def abort(self, key: RoomKey, error: AbortedError) -> None:
        """Give a room up."""
        self._driver.post(partial(self._side.abort, key, error))
