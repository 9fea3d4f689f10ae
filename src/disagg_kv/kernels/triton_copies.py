"""The table that the copy kernel reads: entries with a side in each of two pools, and page ids of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from attrs import evolve

from ..geometry import I64
from ..memory import PagedMemory
from ..planning import StagedLayout
from .base import PageMove
from .triton_tables import SIDE, Cells, PageIds, Planes, Shape, Side, counted, first_rows, known_or_made, span

ENTRY = 2 + 2 * SIDE
"""Words of an entry: units, rows, then the source's side and the target's."""


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
        read, written = [m.copy.source for m in moves], [m.copy.target for m in moves]
        source, target = Side([a for a, _ in ends], read), Side([b for _, b in ends], written)
        units = np.concatenate([x.units for x in read]).astype(np.int64)
        rows = np.concatenate([x.row_stop - x.row_start for x in read])
        self.of = source.of, target.of
        self.words = np.concatenate([units[:, None], rows[:, None], source.words, target.words], axis=1)
        """The entries, as if every move's first row and page ids lay at 0."""
        self.words[:, 4], self.words[:, 8] = first_rows(read), first_rows(written)
        self.spans = [span(x) for x in read]
        if cells is None:
            self.shape = _runs(source, target, units, rows, tile_bytes)
        else:
            aligned = cells.aligned(source.cell_bits(units), target.cell_bits(units), source.beside)
            self.shape = counted(cells.shape(aligned, rows * units, tile_bytes), rows * units)


def _runs(source: Side, target: Side, units: I64, rows: I64, tile_bytes: int) -> Shape:
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
        # Entries have the address of the planes' words.
        self._ends = ends = [(planes(m.source.pool), planes(m.target.pool)) for m in moves]
        self._pattern = patterns.of(ends, moves)
        self.entries = len(self._pattern.words)
        self._ids = PageIds()
        self._places: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
        for (a, b), move, rows in zip(ends, moves, self._pattern.spans, strict=True):
            first = int(move.copy.source.row_start[0])
            for places, of, pages in ((self._places[0], a, move.source), (self._places[1], b, move.target)):
                places += self._ids.add(of, pages.tables, first, rows)
        self.words = self.entries * ENTRY + self._ids.words

    def write(self, into: I64, at: int) -> Shape:
        """See :meth:`.triton_tables.Call.write`."""
        end = self.entries * ENTRY
        table = into[:end].reshape(self.entries, ENTRY)
        table[:] = self._pattern.words
        for word, places, of in zip((4, 8), self._places, self._pattern.of, strict=True):
            begins = np.array([(row, at + end * 8 + place * 4) for row, place in places], np.int64)
            table[:, word : word + 2] += begins[of]
        self._ids.write(into[end:])
        return self._pattern.shape
