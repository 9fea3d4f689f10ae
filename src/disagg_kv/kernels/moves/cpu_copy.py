"""Copy on the CPU with NumPy, in one pass.

Gather and scatter cost NumPy some 100 ns a piece, whatever its size. But rows of one page lie at one stride on both
sides, and so do, in most pools, the planes of a model's layers: such a block of many pieces is one assignment of a
strided array. What does not form large blocks goes through a small buffer, as gather and scatter would do it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from attrs import frozen

from ...geometry import I64
from ...memory import U8
from ...planning import StagedLayout
from ..base import Move, PageMove, Pages
from .pieces import Pieces, Run, runs

BUFFERED = 1 << 18
"""Bytes that go through the buffer at once: they stay in a core's cache."""

SMALL = 1 << 12
"""Bytes of a block below which a call of NumPy costs more than the pieces do."""


def copy(move: PageMove) -> None:
    """Copy the cells that a move names."""
    for source, target in _pairs(move):
        if not _in_blocks(source, target):
            _buffered(source, target)


@frozen
class _Part:
    """Entries of one side that have one index.

    Args:
        flat: memory as pieces.
        places: position of each entry's first piece.
        rows: position of the first piece of each row, counted from there.
        row: positions of the pieces of a row, counted from the row's first.
    """

    flat: Pieces
    places: I64
    rows: I64
    row: I64

    def of_bytes(self, nbytes: int) -> tuple[I64, I64, I64]:
        """The same positions in bytes, of pieces that are only ``nbytes`` long."""
        size = self.flat.itemsize
        row = (self.row[:, None] * size + np.arange(0, size, nbytes)).reshape(-1)
        return self.places * size, self.rows * size, row

    def index(self) -> I64:
        """The place of every piece."""
        index: I64 = (self.places[:, None, None] + self.rows[:, None] + self.row).reshape(-1)
        return index


class _Side:
    """The entries of one side, in order."""

    def __init__(self, pages: Pages, layout: StagedLayout) -> None:
        self._runs = runs(pages.pool, Move(layout, pages.tables, 0))
        self._rows = layout.row_stop - layout.row_start
        self._run: Run | None = None
        self._taken = 0

    def left(self) -> int:
        """Entries that can be taken at once; 0: there are no more."""
        if self._run is None or self._taken == len(self._run.places):
            self._run, self._taken = next(self._runs, None), 0
        return 0 if self._run is None else len(self._run.places) - self._taken

    def take(self, entries: int) -> _Part:
        """The next entries."""
        run = self._run
        assert run is not None
        rows = int(self._rows[run.first])
        index = run.index.reshape(rows, len(run.index) // max(rows, 1))
        places = run.places[self._taken : self._taken + entries]
        self._taken += entries
        return _Part(run.flat, places, index[:, :1].reshape(-1), (index[:1] - index[:1, :1]).reshape(-1))


def _pairs(move: PageMove) -> Iterator[tuple[_Part, _Part]]:
    """For as many entries at once as there can be: both sides."""
    ours, theirs = _Side(move.source, move.copy.source), _Side(move.target, move.copy.target)
    while entries := min(ours.left(), theirs.left()):
        yield ours.take(entries), theirs.take(entries)


def _in_blocks(source: _Part, target: _Part) -> bool:
    """Copy as blocks of equal strides, if these are large; else return False and copy nothing."""
    size = math.gcd(source.flat.itemsize, target.flat.itemsize)
    ours, theirs = source.of_bytes(size), target.of_bytes(size)
    axes = [_stretches(a, b) for a, b in zip(ours, theirs, strict=True)]
    nbytes = size * math.prod(map(len, ours))
    if nbytes < SMALL * math.prod(map(len, axes)):
        return False
    cell = np.dtype((np.void, size))
    for block in product(*axes):
        shape = tuple(axis.count for axis in block)
        at, to = sum(axis.source for axis in block), sum(axis.target for axis in block)
        into: Pieces = np.ndarray(shape, cell, target.flat, to, tuple(axis.target_step for axis in block))
        into[:] = np.ndarray(shape, cell, source.flat, at, tuple(axis.source_step for axis in block))
    return True


@frozen
class _Stretch:
    """Positions at one distance on either side: how many, the first ones, and the distances."""

    count: int
    source: int
    target: int
    source_step: int
    target_step: int


def _stretches(source: I64, target: I64) -> Sequence[_Stretch]:
    """Pairs of positions, in order, cut into stretches as long as possible."""
    ours, theirs = np.diff(source), np.diff(target)
    changes = np.flatnonzero((ours[1:] != ours[:-1]) | (theirs[1:] != theirs[:-1])) + 1
    found: list[_Stretch] = []
    begin = 0
    for end in [*changes.tolist(), len(ours)]:
        # Steps up to ``end`` are equal, so the stretch has the position behind the last of them, too.
        if begin <= end and begin < len(source):
            steps = (int(ours[begin]), int(theirs[begin])) if begin < end else (0, 0)
            found.append(_Stretch(end - begin + 1, int(source[begin]), int(target[begin]), *steps))
            begin = end + 1
    return found


def _buffered(source: _Part, target: _Part) -> None:
    """Copy through a buffer."""
    read, written = source.index(), target.index()
    common = math.lcm(source.flat.itemsize, target.flat.itemsize)
    step = max(BUFFERED // common, 1) * common
    buffer: U8 = np.empty(step, np.uint8)
    few, many = step // source.flat.itemsize, step // target.flat.itemsize
    for block in range(-(-len(read) // few)):
        taken, put = read[block * few : (block + 1) * few], written[block * many : (block + 1) * many]
        held = buffer[: len(taken) * source.flat.itemsize]
        # Any other mode than the default writes straight into ``out``; callers have checked the bounds.
        np.take(source.flat, taken, out=held.view(source.flat.dtype), mode="clip")
        target.flat[put] = held.view(target.flat.dtype)
