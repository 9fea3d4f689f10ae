"""Launching the checksum: what :mod:`.triton_launch` does, and the sums' way back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from weakref import finalize

import numpy as np
import torch

from ..memory import Event, MemoryPool
from .base import Checksums, Move
from .checksum.mixing import U64, places
from .triton_launch import FULL, Host, Written
from .triton_tables import Call


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
            found = self._interpreter.sums(pool, moves, first, after)
            return Checksums(None, lambda: _split(found, lengths))
        context = self._context(device)
        stream = context.stream()
        call = Call(context.tables.of(pool, stream), moves)
        if not call.entries:
            return Checksums(None, lambda: begin)
        sums = slice(call.words, call.words + call.entries)
        slot = context.slots.take(sums.stop)
        try:
            shape = call.write_sums(slot.words, slot.addr, first, self._op.tuning.tile_bytes, self._op.cells)
        except Exception:
            context.slots.give(slot, slot.event)
            raise
        programs = call.entries * shape.tiles
        launch = Written(context, stream, slot, sums.stop, call.entries, shape, programs, programs >= FULL)
        mark = self._launch(launch, after)

        def read() -> Sequence[U64]:
            # Enqueued with the launch, this copy can make the caller wait for the kernel. Here it waits for nothing.
            with torch.cuda.stream(context.reading):
                found = slot.device[sums].cpu()
            return _split(found.numpy().view(np.uint64), lengths)

        # The sums may never be read. The slot comes back once they cannot be read any more.
        finalize(read, context.slots.give, slot, mark).atexit = False
        return Checksums(mark, read)


def _split(found: U64, lengths: Sequence[int]) -> list[U64]:
    ends = list(accumulate(lengths))
    return [found[end - length : end] for end, length in zip(ends, lengths, strict=True)]
