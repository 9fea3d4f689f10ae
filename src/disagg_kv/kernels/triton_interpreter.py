"""The kernels on the CPU's memory, where Triton interprets them; a call is done when it returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..geometry import I64
from ..memory import Buffer, Event, MemoryPool, PagedMemory
from .base import Move, PageMove
from .checksum.mixing import U64
from .triton_copies import CopyCall, CopyPatterns, PoolWords
from .triton_kernels import ELEMENTS, Launchable, Tuning
from .triton_kinds import Kind, numbers_of
from .triton_tables import Call, Planes, Shape


class Interpreter:
    """One kernel, interpreted.

    Args:
        kernel: one of :data:`.triton_kernels.OPS`.
        tuning: how a call is cut into programs.
        kind: of the conversion, if the kernel converts.
    """

    def __init__(self, kernel: Launchable, tuning: Tuning, kind: Kind | None = None) -> None:
        self._kernel = kernel
        self._tuning = tuning
        self._kind = kind

    def move(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """Gather or scatter, once ``after`` has happened."""
        planes = Planes(pool, self._tuning.neighbours_together)
        call = Call(planes, moves)
        if after is not None:
            after.synchronize()
        if call.entries:
            words = np.zeros(call.words, np.int64)
            shape = call.write(words, words.ctypes.data, staging.addr, self._tuning.tile_bytes, numbers_of(self._kind))
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
        shape = call.write_sums(words, words.ctypes.data, first, self._tuning.tile_bytes, numbers_of(self._kind))
        self._run(planes, words, call.entries * shape.tiles, shape)
        return words[call.words :].view(np.uint64)

    def copy(self, moves: Sequence[PageMove], programs: int, after: Event | None) -> None:
        """Copy pages into pages with at most that many programs, once ``after`` has happened."""
        pools: dict[int, PoolWords] = {}

        def words_of(pool: PagedMemory) -> PoolWords:
            if id(pool) not in pools:
                planes = Planes(pool)
                pools[id(pool)] = PoolWords(planes, planes.words.ctypes.data)
            return pools[id(pool)]

        call = CopyCall(moves, words_of, CopyPatterns(self._tuning.tile_bytes, numbers_of(self._kind)))
        if after is not None:
            after.synchronize()
        if call.entries:
            words = np.zeros(call.words, np.int64)
            call.write(words, words.ctypes.data)
            counts = call.shape.tiles, call.total
            self._launch((words,), counts, min(programs, call.total), call.shape)

    def _run(self, planes: Planes, words: I64, programs: int, shape: Shape) -> None:
        self._launch((planes.words, words), (shape.tiles,), programs, shape)

    def _launch(self, tables: Sequence[I64], counts: Sequence[int], programs: int, shape: Shape) -> None:
        if programs:
            constants = ELEMENTS[shape.element_bytes], *shape.constants
            more = () if self._kind is None else self._kind.constants
            # NumPy warns of what a conversion rounds to infinity, or of NaN.
            with np.errstate(over="ignore", invalid="ignore"):
                self._kernel[(programs,)](*map(torch.from_numpy, tables), *counts, *constants, *more)
