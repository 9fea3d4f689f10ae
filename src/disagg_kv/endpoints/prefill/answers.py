"""Answers to decode ranks whose rooms wait for the engine, or cannot be."""

from __future__ import annotations

from ...core import RoomFrame, RoomKey, RoomOutcome, Send
from ...core.room.flow import room_head
from ...core.wire.frames import Abort, Expect, Expected, Head, words
from ...errors import RemoteProtocolError
from ...ids import Epoch, Generation, RoomId
from ..loop.event_loop import EventLoop
from .early import EarlyArrivals


class EarlyAnswers:
    """Keeps what comes early, and answers it."""

    def __init__(self, loop: EventLoop, early: EarlyArrivals) -> None:
        self._loop = loop
        self._early = early

    def park(self, expect: Expect) -> None:
        """Keep an expectation, if there is space for it, until its room is open."""
        loop, epoch = self._loop, Epoch(expect.src)
        if not self._early.add(expect, loop.now + loop.options.silence_s, alone=len(loop.remotes) == 1):
            loop.observer.count("frames.not_parked")
            return
        loop.send(Send(epoch, Expected(**self._head(expect), parked=True)))
        loop.siblings.point_on(epoch)

    def refuse(self, frame: RoomFrame, reason: object, tag: bytes = b"") -> None:
        """The sender's room ends; ``tag``: of the room that another has here."""
        epoch, name, generation = Epoch(frame.src), RoomId(frame.room), Generation(frame.generation)
        # Remembered, or its answer would be taken for a word about the room that others have.
        self._loop.remember([epoch], RoomKey(name, generation), RoomOutcome.FAILED)
        self._loop.send(Send(epoch, Abort(**self._head(frame), reason=words(reason), tag=tag)))

    def blame(self, frame: RoomFrame, error: RemoteProtocolError) -> RemoteProtocolError:
        """The error, with the name of the frame's sender."""
        epoch, registry = Epoch(frame.src), self._loop.peer_registry
        return error.about(registry.name(epoch), **registry.who(epoch))

    def _head(self, frame: RoomFrame) -> Head:
        return room_head(self._loop.me.epoch, Epoch(frame.src), RoomId(frame.room), Generation(frame.generation))
