"""The tables that the Triton kernels read: a pool's planes, written once, and a call's entries and page ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ..errors import UnsupportedError
from ..geometry import I32, I64
from ..memory import MemoryPool
from ..planning import StagedLayout
from .base import Move

PLANE = 8
"""Words of a plane: base, page stride, row stride, unit stride, rows per page, unit bytes, two unused."""

ENTRY = 8
"""Words of an entry: plane, first unit, units, first row, rows, address of the page ids, address in staging, unused.

The first row is counted from the first of those page ids.
"""

MOST = 2**31 - 1
"""The kernels count pieces and programs in 32 bits; addresses have 64."""


PATTERNS = 256
"""A pool remembers this many patterns: more than it has peers, layer groups and sizes of segments in common use."""


@frozen
class Shape:
    """How one launch is cut.

    Args:
        aligned: bytes that divide every address, stride and length: 16, 8, 4, 2 or 1.
        pieces: pieces of a tile.
        columns: elements of a tile's piece.
        tiles: programs per entry.
    """

    aligned: int
    pieces: int
    columns: int
    tiles: int

    @property
    def element_bytes(self) -> int:
        """Bytes of one element: two make the widest access, which is how Triton comes to 16 bytes."""
        return min(self.aligned, 8)


class Pattern:
    """What calls have in common whose layouts differ only in where their rows begin.

    Args:
        planes: of the pool.
        layouts: of the call's moves, none of them empty.
    """

    def __init__(self, planes: Planes, layouts: Sequence[StagedLayout]) -> None:
        columns = [
            np.concatenate(column)
            for column in zip(
                *((x.plane, x.first_unit, x.units, x.row_start, x.row_stop, x.offset) for x in layouts), strict=True
            )
        ]
        move = np.repeat(np.arange(len(layouts)), [len(x.plane) for x in layouts])
        order = np.lexsort((columns[1], columns[0])) if planes.neighbours_together else slice(None)
        plane, first_unit, units, start, stop, offset = (column[order] for column in columns)
        move = move[order]
        first = np.array([x.row_start[0] for x in layouts])[move]
        rows = stop - start
        base, page_stride, row_stride, unit_stride, rows_per_page, unit_bytes = planes.words[plane].T[:6]
        side_by_side = unit_stride == unit_bytes
        run_bytes = np.where(side_by_side, units, 1) * unit_bytes
        bits = base | page_stride | first_unit * unit_stride | run_bytes | offset
        bits |= np.where(rows_per_page > 1, row_stride, 0) | np.where(side_by_side, 0, unit_stride)
        self._bits = int(np.bitwise_or.reduce(bits))
        self._run_bytes = run_bytes
        self._pieces = rows * np.where(side_by_side, 1, units)
        self._shapes: dict[tuple[int, int], Shape] = {}
        self.words = np.zeros((len(plane), ENTRY), np.int64)
        """The entries, as if every move's first row, page ids and part lay at 0."""
        for i, column in ((0, plane), (1, first_unit), (2, units), (3, start - first), (4, rows), (6, offset)):
            self.words[:, i] = column
        self.of = move * len(planes.groups) + planes.group[plane]
        """Which of the ``[moves, groups]`` an entry belongs to."""
        self.spans = [
            (int((x.row_start - x.row_start[0]).min()), int((x.row_stop - x.row_start[0]).max())) for x in layouts
        ]
        """Per move the lowest and the highest row, counted from its first entry's first."""

    def shape(self, bits: int, tile_bytes: int) -> Shape:
        """The widest access that the addresses, or'ed in ``bits``, allow, and tiles as wide as the longest run."""
        bits |= self._bits | 16
        key = bits & -bits, tile_bytes
        if key not in self._shapes:
            self._shapes[key] = self._cut(*key)
        return self._shapes[key]

    def _cut(self, aligned: int, tile_bytes: int) -> Shape:
        size, elements = min(aligned, 8), tile_bytes // 8
        columns = _columns(int(self._run_bytes.max()) // size, elements)
        height = elements // columns
        chunks = -(-self._run_bytes // (size * columns))
        tiles = int((-(-self._pieces // height) * chunks).max())
        most = int(self._pieces.max())
        if max(most, len(self.words) * tiles) > MOST:
            raise UnsupportedError(f"one call of {len(self.words)} entries, the largest of {most} pieces: too many")
        return Shape(aligned, height, columns, tiles)


class Planes:
    """A pool's planes, at the addresses that they had when this was made.

    Args:
        pool: the pool.
        neighbours_together: entries of neighbouring units are moved at about the same time, whichever move they belong
            to, so that memory sees long runs in the pages; else parts are moved one after another.
    """

    def __init__(self, pool: MemoryPool, neighbours_together: bool = False) -> None:
        self.neighbours_together = neighbours_together
        site = pool.site
        self.groups = {g.id: (i, g.rows_per_page) for i, g in enumerate(site.groups)}
        self.group = np.array([self.groups[p.group][0] for p in site.planes], np.int64)
        self.words = np.zeros((len(site.planes), PLANE), np.int64)
        for row, p in zip(self.words, site.planes, strict=True):
            unit_bytes = site.spec.component(p.layer, p.component).unit_bytes
            base = pool.buffers[p.buffer].addr + p.offset
            row[:6] = (base, p.page_stride, p.row_stride, p.unit_stride, self.groups[p.group][1], unit_bytes)
        self._patterns: dict[bytes, Pattern] = {}

    def pattern(self, layouts: Sequence[StagedLayout]) -> Pattern:
        """The pattern of these layouts, none of them empty; segments of one size share it."""
        parts = [np.array([len(x.plane) for x in layouts]).tobytes()]
        for x in layouts:
            first = x.row_start[0]
            columns = x.plane, x.first_unit, x.units, x.row_start - first, x.row_stop - first, x.offset
            parts += [column.tobytes() for column in columns]
        key = b"".join(parts)
        found = self._patterns.get(key)
        if found is None:
            found = Pattern(self, layouts)
            if len(self._patterns) >= PATTERNS:
                self._patterns.pop(next(iter(self._patterns)), None)
            self._patterns[key] = found
        return found


class Call:
    """One call's table, counted before memory is found for it and then written.

    Args:
        planes: of the pool.
        moves: of the call; those without entries are left out.
    """

    def __init__(self, planes: Planes, moves: Sequence[Move]) -> None:
        self._moves = [m for m in moves if len(m.layout.plane)]
        self.entries = 0
        if not self._moves:
            return
        self._pattern = planes.pattern([m.layout for m in self._moves])
        self.entries = len(self._pattern.words)
        self._tables: list[I32] = []
        self._places = self._find(planes)
        self.words = self.entries * ENTRY + (sum(map(len, self._tables)) + 1) // 2

    def _find(self, planes: Planes) -> list[list[int]]:
        """Per move and group: the first entry's first row, counted from the first page id in use, and its place.

        Each table's ids in use are taken once.
        """
        found = [[0, 0] for _ in range(len(self._moves) * len(planes.groups))]
        places: dict[tuple[int, int, int], int] = {}
        end = 0
        for number, (move, (low, high)) in enumerate(zip(self._moves, self._pattern.spans, strict=True)):
            first = int(move.layout.row_start[0])
            for group, table in move.tables.items():
                index, rows = planes.groups[group]
                row = first - table.first
                # Other groups' rows may lie outside this table.
                start = max(row + low, 0) // rows
                stop = min(-(-(row + high) // rows), len(table.pages))
                key = (id(table.pages), start, stop)
                if key not in places and start < stop:
                    places[key] = end
                    self._tables.append(table.pages[start:stop])
                    end += stop - start
                found[number * len(planes.groups) + index] = [row - start * rows, places.get(key, 0)]
        return found

    def write(self, into: I64, at: int, staging: int, tile_bytes: int) -> Shape:
        """Write the table.

        Args:
            into: at least ``words`` words.
            at: the address at which the kernels will find what ``into`` holds now.
            staging: address of the staging buffer.
            tile_bytes: what one program shall move, a power of two.

        Raises:
            UnsupportedError: more than the kernels can count.
        """
        end = self.entries * ENTRY
        bits = 0
        for move in self._moves:
            bits |= staging + move.base
        shape = self._pattern.shape(bits, tile_bytes)
        groups = len(self._places) // len(self._moves)
        begins = [
            (row, 0, at + end * 8 + place * 4, staging + self._moves[i // groups].base)
            for i, (row, place) in enumerate(self._places)
        ]
        table = into[:end].reshape(self.entries, ENTRY)
        table[:] = self._pattern.words
        table[:, 3:7] += np.array(begins)[self._pattern.of]
        ids = into[end:].view(np.int32)
        begin = 0
        for pages in self._tables:
            ids[begin : begin + len(pages)] = pages
            begin += len(pages)
        return shape


def _columns(length: int, elements: int) -> int:
    """The widest tile of which runs of ``length`` elements leave at most a quarter idle; 4, 8 ... 128."""
    columns = min(max(1 << (length - 1).bit_length(), 4), elements, 128)
    while columns > 4 and length * 4 < -(-length // columns) * columns * 3:
        columns //= 2
    return columns
