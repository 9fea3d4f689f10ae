"""The ceiling: the same bytes between the same ranks over the same transport, in the fewest and largest writes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from disagg_kv.endpoints.staging_memory import new_staging
from disagg_kv.errors import DeadlineError
from disagg_kv.ids import Peer, RegionId
from disagg_kv.kernels.tensors import tensor_of
from disagg_kv.memory import Buffer
from disagg_kv.planning import Writes
from disagg_kv.transports import Transport, Transports, WriteEnded

from .data import blank
from .timing import Queued


class BulkTarget:
    """A decode rank: memory to write to, and nothing else."""

    def __init__(self, transport: Transport, nbytes: int, device: str = "cpu") -> None:
        self._transport = transport
        self._memory = new_staging(Transports([transport]), nbytes, device)
        (self._region,) = transport.register([self._memory])

    def describe(self) -> tuple[bytes, RegionId]:
        """The data that a writer needs."""
        return self._transport.local_descriptor(), self._region

    def blank(self) -> None:
        """Let nothing of an earlier write be there."""
        blank(self._memory)

    def sums(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """The checksum of each part, given as (start, length)."""
        memory = tensor_of(self._memory)
        return [_sum(memory[at : at + nbytes]) for at, nbytes in parts]

    def work(self) -> None:
        """One poll, for transports that need it of a target."""
        self._transport.poll()

    def close(self) -> None:
        """Release the memory."""
        self._transport.close(0.0)


class BulkSource:
    """A prefill rank: one write to each target, all at once."""

    def __init__(self, transport: Transport, memory: Sequence[Buffer], timeout_s: float) -> None:
        self._transport = transport
        self._memory = memory[0]
        self._region = transport.register(memory)[0]
        self._timeout_s = timeout_s
        self._pause_s = 50e-6 if memory[0].device == "cpu" else 0.0
        self._batches: list[tuple[Peer, Writes]] = []

    def connect(self, targets: Sequence[tuple[bytes, RegionId, int, int]]) -> None:
        """Learn every target as (descriptor, region, offset there, bytes)."""
        for descriptor, region, offset, nbytes in targets:
            peer = self._transport.connect(descriptor, self._timeout_s)
            self._batches.append((peer, Writes.one(self._region, 0, region, offset, nbytes)))

    def move(self, queued: Queued | None = None) -> tuple[float, float]:
        """When it began, and when the last write had ended; behind ``queued``, from when that was over."""
        began = time.monotonic()
        after = None if queued is None else queued.over
        waiting = {self._transport.submit(peer, writes, after=after) for peer, writes in self._batches}
        while True:
            for event in self._transport.poll():
                if isinstance(event, WriteEnded):
                    if event.error is not None:
                        raise event.error
                    waiting.discard(event.ticket)
            now = time.monotonic()
            if not waiting:
                return began if queued is None else queued.ended(), now
            if now - began > self._timeout_s:
                raise DeadlineError(f"{len(waiting)} plain writes have not ended after {self._timeout_s:g} s")
            time.sleep(self._pause_s)

    def sums(self) -> list[int]:
        """The checksum of each write's bytes."""
        memory = tensor_of(self._memory)
        return [_sum(memory[: int(writes.nbytes[0])]) for _, writes in self._batches]

    def close(self) -> None:
        """Forget everything."""
        self._transport.close(1.0)


def spread(sizes: Sequence[int]) -> list[int]:
    """Where in a target's memory each writer's bytes begin."""
    return [int(at) for at in np.cumsum([0, *sizes])[:-1]]


def _sum(memory: torch.Tensor) -> int:
    return int(memory.sum(dtype=torch.int64))
