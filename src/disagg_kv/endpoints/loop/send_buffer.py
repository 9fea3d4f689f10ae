"""What an endpoint sends in a step, until it is handed over: what is for one address crosses together."""

from __future__ import annotations

import logging
from collections.abc import Callable

from attrs import define, field

from ...channels import MAX_FRAME, MAX_TOGETHER, Channel, SupportsBatches, check_frame
from ...errors import ConfigurationError, text_of
from ...trace import Observer
from ..peers.limited_log import LimitedLog


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
