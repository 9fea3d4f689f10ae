"""The kernels on the CPU's memory, where Triton interprets them; a call is done when it returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..geometry import I64
from ..memory import Buffer, Event, MemoryPool
from .base import Move
from .checksum.mixing import U64
from .triton_kernels import ELEMENTS, Launchable, Tuning
from .triton_tables import Call, Planes, Shape


class Interpreter:
    """One kernel, interpreted.

    Args:
        kernel: gather, scatter or checksum.
        tuning: how a call is cut into programs.
    """

    def __init__(self, kernel: Launchable, tuning: Tuning) -> None:
        self._kernel = kernel
        self._tuning = tuning

    def move(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Gather or scatter, once ``after`` has happened."""
        planes = Planes(pool, self._tuning.neighbours_together)
        call = Call(planes, moves)
        if after is not None:
            after.synchronize()
        if call.entries:
            words = np.zeros(call.words, np.int64)
            shape = call.write(words, words.ctypes.data, staging.addr, self._tuning.tile_bytes)
            self._run(planes, words, call.entries * shape.tiles, shape)

    def sums(self, pool: MemoryPool, moves: Sequence[Move], first: I64, after: Event | None) -> U64:
        """Checksums, once ``after`` has happened; ``first``: the places of the first cells."""
        planes = Planes(pool, self._tuning.neighbours_together)
        call = Call(planes, moves)
        if after is not None:
            after.synchronize()
        if not call.entries:
            return np.zeros(0, np.uint64)
        words = np.zeros(call.words + call.entries, np.int64)
        shape = call.write_sums(words, words.ctypes.data, first, self._tuning.tile_bytes)
        self._run(planes, words, call.entries * shape.tiles, shape)
        return words[call.words :].view(np.uint64)

    def _run(self, planes: Planes, words: I64, programs: int, shape: Shape) -> None:
        if programs:
            self._kernel[(programs,)](
                torch.from_numpy(planes.words),
                torch.from_numpy(words),
                shape.tiles,
                ELEMENTS[shape.element_bytes],
                shape.aligned,
                shape.pieces,
                shape.columns,
            )
