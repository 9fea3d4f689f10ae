"""The table that the copy kernel reads: entries with a side in each of two pools, and page ids of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve

from ..geometry import I64
from ..memory import PagedMemory
from ..planning import StagedLayout
from .base import PageMove
from .triton_tables import SIDE, Cells, PageIds, Planes, Shape, counted, known_or_made

ENTRY = 2 + 2 * SIDE
"""Words of an entry: units, rows, then the source's side and the target's."""


class _Sides:
    """Entries of one or many moves in their pools, on one side.

    Args:
        pools: of each move.
        layouts: of each move, none of them empty.
    """

    def __init__(self, pools: Sequence[Planes], layouts: Sequence[StagedLayout]) -> None:
        counts = [len(x.plane) for x in layouts]
        words = np.concatenate([p.words[x.plane] for p, x in zip(pools, layouts, strict=True)])
        self.base, self.page_stride, self.row_stride, self.unit_stride, self.rows_per_page, self.unit_bytes = words.T[
            :6
        ]
        self.first_unit = np.concatenate([x.first_unit for x in layouts]).astype(np.int64)
        self.words = np.zeros((len(words), SIDE), np.int64)
        self.words[:, 0] = np.concatenate([p.at(x.plane) for p, x in zip(pools, layouts, strict=True)])
        self.words[:, 1] = self.first_unit
        self.words[:, 2] = np.concatenate([x.row_start - x.row_start[0] for x in layouts])
        # Which of the groups of all moves, counted through, an entry belongs to.
        begins = np.cumsum([0, *(len(p.groups) for p in pools)])[:-1]
        group = np.concatenate([p.group[x.plane] for p, x in zip(pools, layouts, strict=True)])
        self.of = np.repeat(begins, counts) + group
        self.beside = 0
        """Of what is read beside the cells, addresses and strides, or'ed."""
        for p, x in zip(pools, layouts, strict=True):
            self.beside |= p.beside(np.unique(x.plane).tolist())

    def bits(self, side_by_side: npt.NDArray[np.bool_]) -> I64:
        """Of each entry addresses and strides, or'ed; where units are side by side, not that of a unit."""
        bits: I64 = self.base | self.page_stride | self.first_unit * self.unit_stride
        bits |= np.where(self.rows_per_page > 1, self.row_stride, 0) | np.where(side_by_side, 0, self.unit_stride)
        return bits

    def cell_bits(self, units: I64) -> int:
        """The same of cells one by one, in all entries."""
        return int(np.bitwise_or.reduce(self.bits(units == 1)))


class CopyPattern:
    """What calls have in common whose moves differ only in where their rows begin.

    Args:
        ends: source and target of each move.
        moves: of the call, none of them empty.
        tile_bytes: what one program copies at once, a power of two.
        cells: what changes on the way, if anything does.

    Raises:
        UnsupportedError: more than the kernel can count.
    """

    def __init__(
        self,
        ends: Sequence[tuple[Planes, Planes]],
        moves: Sequence[PageMove],
        tile_bytes: int,
        cells: Cells | None = None,
    ) -> None:
        source = _Sides([a for a, _ in ends], [m.copy.source for m in moves])
        target = _Sides([b for _, b in ends], [m.copy.target for m in moves])
        units = np.concatenate([m.copy.source.units for m in moves]).astype(np.int64)
        rows = np.concatenate([m.copy.source.row_stop - m.copy.source.row_start for m in moves])
        self.of = source.of, target.of
        self.words = np.concatenate([units[:, None], rows[:, None], source.words, target.words], axis=1)
        """The entries, as if every move's first row and page ids lay at 0."""
        self.spans = [_span(m.copy.source) for m in moves]
        """Per move the lowest and the highest row, counted from its first entry's first."""
        if cells is None:
            self.shape = _runs(source, target, units, rows, tile_bytes)
        else:
            aligned = cells.aligned(source.cell_bits(units), target.cell_bits(units), source.beside)
            self.shape = counted(cells.shape(aligned, rows * units, tile_bytes), rows * units)


def _span(layout: StagedLayout) -> tuple[int, int]:
    first = layout.row_start[0]
    return int((layout.row_start - first).min()), int((layout.row_stop - first).max())


def _runs(source: _Sides, target: _Sides, units: I64, rows: I64, tile_bytes: int) -> Shape:
    """The widest access that the addresses allow, and tiles as wide as the longest run."""
    side_by_side = (source.unit_stride == source.unit_bytes) & (target.unit_stride == source.unit_bytes)
    run_bytes = np.where(side_by_side, units, 1) * source.unit_bytes
    pieces = rows * (units * source.unit_bytes // run_bytes)
    bits = int(np.bitwise_or.reduce(source.bits(side_by_side) | target.bits(side_by_side) | run_bytes))
    shape = Shape.of_runs(bits, int(run_bytes.max()), tile_bytes)
    chunks = -(-run_bytes // (shape.element_bytes * shape.columns))
    return counted(evolve(shape, tiles=int((-(-pieces // shape.pieces) * chunks).max())), pieces)


class CopyPatterns:
    """Patterns of calls; segments of one size share theirs. One thread at a time.

    Args:
        tile_bytes, cells: see :class:`CopyPattern`.
    """

    def __init__(self, tile_bytes: int, cells: Cells | None = None) -> None:
        self._cut = tile_bytes, cells
        self._known: dict[tuple[Hashable, ...], CopyPattern] = {}

    def of(self, ends: Sequence[tuple[Planes, Planes]], moves: Sequence[PageMove]) -> CopyPattern:
        """The pattern of these moves, none of them empty; planes of one pool are one object."""
        key = tuple([(*pair, _what(m.copy.source), _what(m.copy.target)) for pair, m in zip(ends, moves, strict=True)])
        return known_or_made(self._known, key, lambda: CopyPattern(ends, moves, *self._cut))


def _what(layout: StagedLayout) -> Hashable:
    """Equal where layouts differ in nothing but ``row_start[0]``."""
    if layout.alike is not None:
        return layout.alike
    first = layout.row_start[0]
    columns = layout.plane, layout.first_unit, layout.units, layout.row_start - first, layout.row_stop - first
    return tuple([column.tobytes() for column in columns])


class CopyCall:
    """One call's table, counted before memory is found for it and then written.

    Args:
        moves: of the call; those without entries are left out.
        planes: of a pool; the same object for the same pool.
        patterns: finds or makes the pattern.

    Raises:
        UnsupportedError: more than the kernel can count.
    """

    def __init__(
        self, moves: Sequence[PageMove], planes: Callable[[PagedMemory], Planes], patterns: CopyPatterns
    ) -> None:
        moves = [m for m in moves if len(m.copy.source.plane)]
        self.entries = self.words = 0
        if not moves:
            return
        ends = [(planes(m.source.pool), planes(m.target.pool)) for m in moves]
        self._pattern = patterns.of(ends, moves)
        self.entries = len(self._pattern.words)
        self.shape = self._pattern.shape
        self._ids = PageIds()
        self._places: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
        for (a, b), move, span in zip(ends, moves, self._pattern.spans, strict=True):
            first = int(move.copy.source.row_start[0])
            for places, of, pages in ((self._places[0], a, move.source), (self._places[1], b, move.target)):
                places += self._ids.add(of, pages.tables, first, span)
        self.words = self.entries * ENTRY + self._ids.words

    def write(self, into: I64, at: int) -> None:
        """Write the table.

        Args:
            into: at least ``words`` words.
            at: the address at which the kernel will find what ``into`` holds now.
        """
        end = self.entries * ENTRY
        table = into[:end].reshape(self.entries, ENTRY)
        table[:] = self._pattern.words
        for word, places, of in zip((4, 8), self._places, self._pattern.of, strict=True):
            begins = np.array([(row, at + end * 8 + place * 4) for row, place in places], np.int64)
            table[:, word : word + 2] += begins[of]
        self._ids.write(into[end:])
