"""What has come in and is not taken in yet, and what was said and is not handed over yet."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from attrs import define, field
from msgspec.structs import replace

from ...channels import MAX_FRAME, MAX_TOGETHER, Arrived, Channel, News, SupportsBatches, check_frame
from ...core import Send
from ...core.wire.frames import Complete, Landed
from ...errors import ConfigurationError, text_of
from ...ids import Epoch
from ...trace import Observer
from ..peers.limited_log import LimitedLog

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

    ``left`` has come, and is not taken in yet.
    """

    def __init__(self, channel: Channel, failed: Callable[[Exception], None], clock: Callable[[], float]) -> None:
        self._channel = channel
        self._failed = failed
        self._clock = clock
        self.left: deque[News] = deque()
        self._asked = self._polled = clock()
        self._awake_at = self._asked

    def fetch(self) -> bool:
        """Unless something is left, ask the channel; False: there is nothing."""
        if not self.left:
            before = self._clock()
            if before - self._polled > STALLED_S:
                self._awake_at = before + GRACE_S
            try:
                self.left.extend(self._channel.poll())
            except Exception as exc:
                self._failed(exc)
            self._polled = self._clock()
            if self._polled - before > STALLED_S:
                self._awake_at = self._polled + GRACE_S
            if before >= self._awake_at and (len(self.left) <= FEW or not self._bounded()):
                self._asked = before
        return bool(self.left)

    def _bounded(self) -> bool:
        """Whether the channel may have more of what had come when it was asked."""
        return sum(len(one.frame) for one in self.left if isinstance(one, Arrived)) > MUCH

    @property
    def caught_up(self) -> float | None:
        """Up to when all that had come has been taken in; None: some of it is left."""
        return None if self.left else self._asked


@define
class _Unflushed:
    """What was said to an address since it was last handed over; it has ``nbytes``."""

    frames: list[bytes] = field(factory=list)
    nbytes: int = 0


class SendBuffer:
    """Runs on the thread that advances. It raises nothing: what is said may be half of what an event leads to.

    Args:
        channel: takes the frames; where it takes one at a time, each is handed over when it is said.
        observer: counts those that it drops.
        log: says why.
        too_large: given the error of a frame that no channel takes.
    """

    def __init__(
        self, channel: Channel, observer: Observer, log: LimitedLog, too_large: Callable[[Exception], None]
    ) -> None:
        self._log = log
        self._channel = channel
        self._together = channel if isinstance(channel, SupportsBatches) else None
        self._observer = observer
        self.unsent: dict[str, _Unflushed] = {}
        self._too_large = too_large

    def put(self, address: str, frame: bytes) -> None:
        """Say something."""
        if len(frame) > MAX_FRAME:
            try:
                check_frame(address, frame)
            except ConfigurationError as exc:
                self._too_large(exc)
            return
        if self._together is None:
            self._hand_over(address, [frame])
            return
        unsent = self.unsent.get(address)
        if unsent is not None and (len(unsent.frames) == MAX_TOGETHER or unsent.nbytes + len(frame) > MAX_FRAME):
            self._hand_over(address, self.unsent.pop(address).frames)
            unsent = None
        if unsent is None:
            unsent = self.unsent[address] = _Unflushed()
        unsent.frames.append(frame)
        unsent.nbytes += len(frame)

    def flush(self) -> None:
        """Hand over what was said."""
        unsent, self.unsent = self.unsent, {}
        for address, frames in unsent.items():
            self._hand_over(address, frames.frames)

    def _hand_over(self, address: str, frames: list[bytes]) -> None:
        try:
            if self._together is None:
                sent = self._channel.send(address, frames[0])
            else:
                sent = self._together.send_all(address, frames)
        except Exception as exc:
            # A lost frame is repeated if it matters.
            self._log.say(logging.WARNING, f"{len(frames)} frames to {address} could not be sent: {text_of(exc)}")
            sent = False
        if not sent:
            self._observer.count("frames.dropped", len(frames))


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
