"""Answers to decode ranks whose rooms wait for the engine, or for the rest of their page tables."""

from __future__ import annotations

from ...core import RoomFrame, RoomKey, RoomOutcome, Send
from ...core.room.flow import room_head
from ...core.wire.frames import Abort, Expect, Expected, Head, TablePart, TablesTaken, words
from ...errors import RemoteProtocolError
from ...ids import Epoch, Generation, RoomId
from ..loop.event_loop import EventLoop
from .early import EarlyArrivals


class EarlyAnswers:
    """Keeps what comes early, and answers it."""

    def __init__(self, loop: EventLoop, early: EarlyArrivals) -> None:
        self._loop = loop
        self._early = early

    def park(self, expect: Expect, *, opened: bool) -> None:
        """Keep an expectation, if there is space for it, until its room is ``opened`` and its page tables are whole."""
        loop, name, epoch = self._loop, RoomId(expect.room), Epoch(expect.src)
        if not self._early.add(expect, loop.now + loop.options.silence_s, alone=len(loop.remotes) == 1, opened=opened):
            loop.observer.count("frames.not_parked")
            return
        at, head = self._early.lacks(name, epoch), self._head(expect)
        waits = Expected(**head, parked=True) if at is None else TablesTaken(**head, upto=at, again=True)
        loop.send(Send(epoch, waits))
        loop.siblings.point_on(epoch)

    def take_part(self, part: TablePart) -> bool:
        """Keep a part of page tables; True: with it, what its sender awaits is whole.

        Raises:
            RemoteProtocolError: the part cannot be.
        """
        name, epoch = RoomId(part.room), Epoch(part.src)
        lacked = self._early.lacks(name, epoch) is not None
        put = self._early.put(part)
        if put is None:
            self._loop.observer.count("frames.unknown_room")
            return False
        self._loop.send(Send(epoch, TablesTaken(**self._head(part), upto=put[0], again=put[1])))
        return lacked and self._early.lacks(name, epoch) is None

    def waits(self, frame: RoomFrame) -> None:
        """Its room is not open yet."""
        self._loop.send(Send(Epoch(frame.src), Expected(**self._head(frame), parked=True)))

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
