"""What the handles of a decode endpoint post to its thread."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from ...core import RoomKey
from ...errors import AbortedError, EndpointBrokenError
from ..loop.admission import Admission
from ..loop.event_loop import EventLoop
from .handle import CheckedExpectation, ReceptionHandle
from .rooms import DecodeSide


class PostedCommands:
    """Satisfies :class:`~disagg_kv.endpoints.decode.handle.DecodeCommands`, which says what each of them does.

    Args:
        loop: runs them.
        side: does what they say, on the loop's thread.
        admission: whether calls are taken.
    """

    def __init__(self, loop: EventLoop, side: DecodeSide, admission: Admission) -> None:
        self.admission = admission
        self._loop = loop
        self._side = side

    def expect(self, key: RoomKey, wanted: CheckedExpectation) -> None:
        """Await rows."""
        self._loop.post(partial(self._side.expect, key, wanted))

    def rang(self, key: RoomKey, handle: ReceptionHandle) -> float:
        """The bells of a room were seen. The frames that follow wake the endpoint's thread: the engine need not."""
        now = self._loop.clock()
        self._side.changed(handle)
        with suppress(EndpointBrokenError):  # it ends the room as the engine has seen it
            self._loop.post(partial(self._side.rang, key), wake=False)
        return now

    def abort(self, key: RoomKey, error: AbortedError) -> None:
        """Give a room up."""
        self._loop.post(partial(self._side.abort, key, error))
