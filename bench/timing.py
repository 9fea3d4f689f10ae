"""What isolates one part of a transfer: kernels that copy nothing, a channel that times grants, a GPU that computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from attrs import frozen

from disagg_kv.channels import Arrived, News, UnixChannel
from disagg_kv.core import Codec
from disagg_kv.core.wire.frames import Box, Grant, StagingRequest
from disagg_kv.geometry import CONVERSION_NAMES
from disagg_kv.ids import RoomId
from disagg_kv.kernels import Checksums, Move, PageMove, kernels_for
from disagg_kv.memory import Buffer, Event, Flag, MemoryPool

CYCLES_PER_S = 1.7e9
"""Of a GPU, about."""


class Queued:
    """Queue work on an engine's GPU that takes about this long.

    Args:
        seconds: its duration.
    """

    def __init__(self, seconds: float) -> None:
        self._first = torch.cuda.Event(enable_timing=True)
        self.over = torch.cuda.Event(enable_timing=True)
        self._began = time.monotonic()
        self._first.record()
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))
        self.over.record()

    def ended(self) -> float:
        """When it had ended, on the clock that all processes of a host share; a little early, never late."""
        seconds: float = self._first.elapsed_time(self.over) / 1e3
        return self._began + seconds


class Still:
    """Kernels that move no bytes."""

    name = "still"
    conversions = CONVERSION_NAMES

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Nothing."""

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
        """Nothing."""

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> None:
        """Nothing."""

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """As everywhere: it copies nothing."""
        return kernels_for(pool.buffers[0].device).checksum(pool, moves, after)


@frozen
class Granted:
    """One grant.

    Args:
        seconds: from handing its request over until it was there.
        request_bytes, grant_bytes: of the two frames.
    """

    seconds: float
    request_bytes: int
    grant_bytes: int


class Timed:
    """A channel that measures the time from each segment's request to its grant.

    It only records times while it is used, and decodes the frames afterwards.
    """

    eager = True

    def __init__(self, inner: UnixChannel) -> None:
        self._inner = inner
        self._codec = Codec()
        self._notes: deque[tuple[float, Sequence[bytes]]] = deque()
        self._asked: dict[tuple[RoomId, Box], tuple[float, int]] = {}

    @property
    def address(self) -> str:
        """The inner channel's."""
        return self._inner.address

    def send(self, address: str, frame: bytes) -> bool:
        """Pass a frame on; the first request for a grant starts its clock."""
        return self.send_all(address, (frame,))

    def send_all(self, address: str, frames: Sequence[bytes]) -> bool:
        """The same for several frames."""
        self._notes.append((time.monotonic(), frames))
        return self._inner.send_all(address, frames)

    def poll(self) -> Sequence[News]:
        """What came in; a grant stops its clock."""
        came = self._inner.poll()
        frames = [event.frame for event in came if isinstance(event, Arrived)]
        if frames:
            self._notes.append((time.monotonic(), frames))
        return came

    def taken(self) -> list[Granted]:
        """Each grant that came since the last call; from any one thread."""
        granted: list[Granted] = []
        while self._notes:
            at, frames = self._notes.popleft()
            for frame in frames:
                found = self._codec.decode(frame)
                if isinstance(found, StagingRequest):
                    self._asked.setdefault((RoomId(found.room), found.segment), (at, len(frame)))
                elif isinstance(found, Grant):
                    asked = self._asked.pop((RoomId(found.room), found.segment), None)
                    if asked is not None:
                        granted.append(Granted(at - asked[0], asked[1], len(frame)))
        return granted

    def wait(self, timeout_s: float) -> None:
        """The inner channel's."""
        self._inner.wait(timeout_s)

    def wake(self) -> None:
        """The inner channel's."""
        self._inner.wake()

    def forget(self, address: str) -> None:
        """The inner channel's."""
        self._inner.forget(address)

    def close(self) -> None:
        """The inner channel's."""
        self._inner.close()
