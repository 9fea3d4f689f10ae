"""What isolates one part of a transfer: kernels that copy nothing, and a channel that times grants."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..channels import Arrived, News, ZmqChannel
from ..ids import RoomId
from ..kernels import Move, Sums, kernels_for
from ..memory import Buffer, Event, MemoryPool
from ..protocol import Codec
from ..protocol.frames import Box, Grant, StagingRequest


class Still:
    """Kernels that leave all bytes where they are."""

    name = "still"

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Nothing."""

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Nothing."""

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Sums:
        """As everywhere: it copies nothing."""
        return kernels_for(pool.buffers[0].device).checksum(pool, moves, after)


class Timed:
    """A channel that notes how long each segment's grant is under way; one thread calls all but ``taken``."""

    def __init__(self, inner: ZmqChannel) -> None:
        self._inner = inner
        self._codec = Codec()
        self._asked: dict[tuple[RoomId, Box], float] = {}
        self._taken: list[float] = []

    @property
    def address(self) -> str:
        """The inner channel's."""
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        """Pass a frame on; the first request for a grant starts its clock."""
        return self.send_all(address, (frame,))

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """The same for several frames."""
        for found in map(self._codec.decode, frames):
            if isinstance(found, StagingRequest):
                self._asked.setdefault((RoomId(found.room), found.segment), time.monotonic())
        return self._inner.send_all(address, frames)

    def poll(self, timeout_s: float) -> Sequence[News]:
        """What came in; a grant stops its clock."""
        came = self._inner.poll(timeout_s)
        now = time.monotonic()
        for event in came:
            found = self._codec.decode(event.frame) if isinstance(event, Arrived) else None
            if isinstance(found, Grant):
                asked = self._asked.pop((RoomId(found.room), found.segment), None)
                if asked is not None:
                    self._taken.append(now - asked)
        return came

    def taken(self) -> tuple[float, ...]:
        """Seconds, each since the last call."""
        taken, self._taken = tuple(self._taken), []
        return taken

    def wake(self) -> None:
        """The inner channel's."""
        self._inner.wake()

    def forget(self, address: str) -> None:
        """The inner channel's."""
        self._inner.forget(address)

    def close(self) -> None:
        """The inner channel's."""
        self._inner.close()
