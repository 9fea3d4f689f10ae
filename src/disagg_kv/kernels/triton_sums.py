"""Launching the checksum: what :mod:`.triton_launch` does, and the sums' way back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from weakref import finalize

import numpy as np
import torch

from ..geometry import I64
from ..memory import Event, MemoryPool
from .base import Checksums, Move
from .checksum.mixing import U64, places
from .triton_launch import Host
from .triton_tables import Planes, SumCall


class ChecksumLauncher(Host):
    """Checksums on GPUs; see :class:`.triton_launch.Host`."""

    def warm(self, pool: MemoryPool, numbers: Sequence[int] | None = None) -> None:
        """Compile for whatever peers may take of planes of this pool; see :meth:`.Host._compile_all`."""
        self._compile_all(pool, numbers=numbers, single=True)

    def __call__(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None = None) -> Checksums:
        """Enqueue one launch for all ``moves`` behind ``after``; the sums are brought to the host when they are read.

        Does not wait, unless ``after`` is no CUDA event and has not happened.

        Raises:
            RegistrationError: the pool does not lie where Triton runs.
            UnsupportedError: more cells than one launch can count.
            GeometryError: a move names units that the pool does not hold.
        """
        device = pool.buffers[0].device
        self._check_device(device)
        lengths = [len(move.layout.plane) for move in moves]
        begin = [places(pool.site, move.layout) for move in moves]
        first = np.concatenate([*begin, np.zeros(0, np.uint64)]).view(np.int64)
        if device == "cpu":
            call = self._call(Planes(pool), moves, first)
            found = self._interpret(call, after)[call.sums].view(np.uint64)
            return Checksums(None, lambda: _split(found, lengths))
        context = self._context(device)
        stream = context.stream()
        call = self._call(context.tables.of(pool, stream), moves, first)
        written = self._write(context, stream, call, context.slots.take)
        if written is None:
            return Checksums(None, lambda: begin)
        slot, sums = written.slot, call.sums
        mark = self._launch(written, after)

        def read() -> Sequence[U64]:
            # Enqueued with the launch, this copy can make the caller wait for the kernel. Here it waits for nothing.
            with torch.cuda.stream(context.reading):
                found = slot.device[sums].cpu()
            return _split(found.numpy().view(np.uint64), lengths)

        # The sums may never be read. The slot comes back once they cannot be read any more.
        finalize(read, context.slots.give, slot, mark).atexit = False
        return Checksums(mark, read)

    def _call(self, planes: Planes, moves: Sequence[Move], first: I64) -> SumCall:
        return SumCall(planes, moves, self._op.tuning.tile_bytes, self._op.cells, first)


def _split(found: U64, lengths: Sequence[int]) -> list[U64]:
    ends = list(accumulate(lengths))
    return [found[end - length : end] for end, length in zip(ends, lengths, strict=True)]
