"""Answers to frames about rooms that have ended on a decode rank."""

from __future__ import annotations

from ...core import RoomFrame, RoomKey, RoomOutcome, Send
from ...core.room.flow import room_head
from ...core.wire.frames import (
    Abort,
    AbortAck,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Landed,
    StagingRequest,
)
from ...ids import Epoch, Generation, RoomId
from ..loop.event_loop import EventLoop
from .cancelled import CancelledBeforeOpen
from .receipts import Receipts


def answer_ended(loop: EventLoop, cancelled: CancelledBeforeOpen, receipts: Receipts, frame: RoomFrame) -> None:
    """Answer a late frame from the tombstone; the room stays ended."""
    epoch, key = Epoch(frame.src), RoomKey(RoomId(frame.room), Generation(frame.generation))
    head = room_head(loop.me.epoch, epoch, key.room, key.generation)
    ended = loop.tombstones.outcome(epoch, key.generation)
    if isinstance(frame, Abort):
        loop.send(Send(epoch, AbortAck(**head)))
    elif isinstance(frame, Drained):
        cancelled.answered(key, epoch)
        loop.send(Send(epoch, DrainedAck(**head)))
    elif ended is None or ended is RoomOutcome.EVICTED:
        loop.observer.count("frames.unknown_room")
    elif ended is RoomOutcome.FAILED:
        loop.send(Send(epoch, Abort(**head, reason="the room has failed")))
    elif isinstance(frame, StagingRequest | ChunkReady):
        receipts.send(Send(epoch, Landed(**head, segments=(frame.segment,))))
    elif isinstance(frame, Done):
        loop.send(Send(epoch, Complete(**head)))
