"""What an endpoint has said in a turn, until it is handed over: what is for one address crosses together."""

from __future__ import annotations

import logging

from attrs import define, field

from ..channels import MAX_FRAME, MAX_TOGETHER, Channel, SupportsBatches, check_frame
from ..errors import ConfigurationError
from ..trace import Observer

log = logging.getLogger("disagg_kv")


@define
class _Unsent:
    """What was said to an address since it was last handed over; it has ``nbytes``."""

    frames: list[bytes] = field(factory=list)
    nbytes: int = 0


class Outbox:
    """Runs on the endpoint's thread only.

    Args:
        channel: takes the frames; where it takes one at a time, each is handed over when it is said.
        observer: counts those that it drops.
    """

    def __init__(self, channel: Channel, observer: Observer) -> None:
        self._channel = channel
        self._together = channel if isinstance(channel, SupportsBatches) else None
        self._observer = observer
        self.unsent: dict[str, _Unsent] = {}

    def put(self, address: str, frame: bytes) -> None:
        """Say something.

        Raises:
            ConfigurationError: the frame is larger than MAX_FRAME.
        """
        if len(frame) > MAX_FRAME:
            check_frame(address, frame)
        if self._together is None:
            self._hand_over(address, [frame])
            return
        unsent = self.unsent.get(address)
        if unsent is not None and (len(unsent.frames) == MAX_TOGETHER or unsent.nbytes + len(frame) > MAX_FRAME):
            self._hand_over(address, self.unsent.pop(address).frames)
            unsent = None
        if unsent is None:
            unsent = self.unsent[address] = _Unsent()
        unsent.frames.append(frame)
        unsent.nbytes += len(frame)

    def flush(self) -> None:
        """Hand over all that was said."""
        for address in list(self.unsent):
            self._hand_over(address, self.unsent.pop(address).frames)

    def _hand_over(self, address: str, frames: list[bytes]) -> None:
        try:
            if self._together is None:
                sent = self._channel.send(address, frames[0])
            else:
                sent = self._together.send_all(address, frames)
        except ConfigurationError:
            raise
        except Exception as exc:
            # Whoever says how a room ends must get past this; a lost frame is repeated if it matters.
            log.warning("%d frames to %s could not be sent: %s", len(frames), address, exc)
            sent = False
        if not sent:
            self._observer.count("frames.dropped", len(frames))
