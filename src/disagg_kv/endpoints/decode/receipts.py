"""What has landed and is not acknowledged yet."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ...core import Send
from ...core.wire.frames import Complete, Landed
from ...ids import Epoch


class Receipts:
    """Sends what a room sends, but one ``Landed`` per room and writer for all that landed in a step.

    ``Complete`` acknowledges the same, so a ``Landed`` in ``waiting`` is dropped then.

    Args:
        send: sends a frame.
    """

    def __init__(self, send: Callable[[Send], None]) -> None:
        self._send = send
        self.waiting: dict[tuple[Epoch, bytes, int], Landed] = {}

    def send(self, send: Send) -> None:
        """Send a frame now; a ``Landed`` with the next :meth:`flush`."""
        frame = send.frame
        if isinstance(frame, Landed):
            key = send.to, frame.room, frame.generation
            before = self.waiting[key].segments if key in self.waiting else ()
            self.waiting[key] = replace(frame, segments=(*before, *frame.segments))
            return
        if isinstance(frame, Complete):
            self.waiting.pop((send.to, frame.room, frame.generation), None)
        self._send(send)

    def flush(self) -> None:
        """Send all that waits."""
        waiting, self.waiting = self.waiting, {}
        for (to, _, _), frame in waiting.items():
            self._send(Send(to, frame))
