"""The kernels on the CPU's memory, where Triton interprets them; a call is done when it returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..geometry import I64
from ..memory import Buffer, Event, MemoryPool, wait_for
from .base import Move, PageMove
from .checksum.mixing import U64
from .triton_copies import CopyCall, CopyPatterns
from .triton_kernels import ELEMENTS, Op
from .triton_tables import Call, Planes, Shape


class Interpreter:
    """One operation, interpreted.

    Args:
        op: the operation.
    """

    def __init__(self, op: Op) -> None:
        self._op = op

    def move(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Gather or scatter, once ``after`` has happened."""
        tuning = self._op.tuning
        call = Call(Planes(pool, tuning.neighbours_together), moves)
        wait_for(after)
        if call.entries:
            words = np.zeros(call.words, np.int64)
            shape = call.write(words, words.ctypes.data, staging.addr, tuning.tile_bytes, self._op.cells)
            self._run(words, call.entries * shape.tiles, shape)

    def sums(self, pool: MemoryPool, moves: Sequence[Move], first: I64, after: Event | None) -> U64:
        """Checksums, once ``after`` has happened; ``first``: the places of the first cells."""
        call = Call(Planes(pool), moves)
        wait_for(after)
        if not call.entries:
            return np.zeros(0, np.uint64)
        words = np.zeros(call.words + call.entries, np.int64)
        shape = call.write_sums(words, words.ctypes.data, first, self._op.tuning.tile_bytes, self._op.cells)
        self._run(words, call.entries * shape.tiles, shape)
        return words[call.words :].view(np.uint64)

    def copy(self, moves: Sequence[PageMove], programs: int, after: Event | None) -> None:
        """Copy pages into pages with at most that many programs, once ``after`` has happened."""
        pools = {id(pages.pool): pages.pool for move in moves for pages in (move.source, move.target)}
        planes = {key: Planes(pool) for key, pool in pools.items()}
        patterns = CopyPatterns(self._op.tuning.tile_bytes, self._op.cells)
        call = CopyCall(moves, lambda pool: planes[id(pool)], patterns)
        wait_for(after)
        if call.entries:
            words = np.zeros(call.words, np.int64)
            call.write(words, words.ctypes.data)
            self._run(words, call.entries * call.shape.tiles, call.shape, programs)

    def _run(self, words: I64, total: int, shape: Shape, most: int | None = None) -> None:
        """Run for all tiles, with at most so many programs."""
        if total:
            arguments = torch.from_numpy(words), shape.tiles, total, ELEMENTS[shape.element_bytes], *shape.constants
            # NumPy warns of what a conversion rounds to infinity, or of NaN.
            with np.errstate(over="ignore", invalid="ignore"):
                self._op.kernel[(min(total, most or total),)](*arguments, *self._op.constants)
