"""The tables that the Triton kernels read: a pool's planes, written once, and a call's entries and page ids.

:mod:`.triton_copies` writes the entries of copies, which have a second side in place of the last two words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from ..errors import UnsupportedError
from ..geometry import I32, I64, PageTable, Plane
from ..ids import GroupId
from ..memory import PagedMemory
from ..planning import StagedLayout
from .base import Move

PLANE = 8
"""Words of a plane: base, page stride, row stride, unit stride, rows per page, unit bytes; then those of conversions.

Word 6, counted in words from the plane's first: by given factors, where they begin, as bits of float32; by scales that
are read, where their plane's words are. Word 7: 1 if each unit has a factor of its own, 0 if all have the same.
"""

SIDE = 4
"""Words of a side: address of the plane's words, first unit, first row, address of the page ids.

The first row is counted from the first of those page ids.
"""

ENTRY = 4 + SIDE
"""Words of an entry: units, rows, the pool's side, then what the kernel needs: address in staging, unused; or address
of the sum, place of the first cell."""

WIDEST = 64
"""The largest alignment in bytes that makes a difference to a kernel: 16 numbers of four bytes."""

MOST = 2**30 - 1
"""The kernels count pieces and tiles in 32 bits, and add two such numbers; addresses have 64."""

Key = TypeVar("Key", bound=Hashable)
Known = TypeVar("Known")

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

    @classmethod
    def of_runs(cls, bits: int, longest: int, tile_bytes: int) -> Shape:
        """The widest access that addresses, strides and lengths allow, or'ed in ``bits``; tiles are not counted yet.

        A tile is as wide as a run of ``longest`` bytes needs.
        """
        aligned, elements = (bits | 16) & -(bits | 16), tile_bytes // 8
        columns = columns_of(longest // min(aligned, 8), elements)
        return cls(aligned, elements // columns, columns, 0)

    @property
    def constants(self) -> tuple[int, int, int]:
        """What a kernel is compiled for."""
        return self.aligned, self.pieces, self.columns

    @property
    def element_bytes(self) -> int:
        """Bytes of one element: two make the widest access, which is how Triton comes to 16 bytes."""
        return min(self.aligned, 8)


@frozen
class Cells:
    """Cells whose numbers change on the way, so that a piece is a whole cell.

    Args:
        elements: numbers of a cell.
        source: bytes of one of them in memory.
        target: and afterwards.
        alone: whether only one number of four bytes is written for a cell.
    """

    elements: int
    source: int
    target: int
    alone: bool = False

    def aligned(self, source: int, target: int, beside: int) -> int:
        """Twice the elements whose access both sides allow, at most 16; 1: not even of one.

        Args:
            source: addresses and strides of the cells in memory, or'ed.
            target: of those that are written.
            beside: of the numbers of four bytes that are read beside them, or 0.
        """
        found = min(self.elements & -self.elements, 16)
        for size, bits in ((self.source, source), (self.target, 0 if self.alone else target)):
            found = min(found, (bits & -bits) // size if bits else found)
        return 1 if (beside | (target if self.alone else 0)) % 4 else 2 * found or 1

    def shape(self, aligned: int, cells: I64, tile_bytes: int) -> Shape:
        """Tiles of whole cells; ``cells``: how many each entry has, ``[entries]``."""
        columns = 1 << (self.elements - 1).bit_length()
        height = max(1, tile_bytes // (columns * self.source))
        return Shape(aligned, height, columns, int((-(-cells // height)).max()))


def counted(shape: Shape, pieces: I64) -> Shape:
    """The shape of a call whose entries have that many pieces.

    Raises:
        UnsupportedError: more than the kernels can count.
    """
    most = int(pieces.max())
    if max(most, len(pieces) * shape.tiles) > MOST:
        raise UnsupportedError(f"one call of {len(pieces)} entries, the largest of {most} pieces: too many")
    return shape


class Side:
    """Entries of one or many moves in their pools, whatever their rows.

    Args:
        pools: of each move.
        layouts: of each move, none of them empty.
    """

    def __init__(self, pools: Sequence[Planes], layouts: Sequence[StagedLayout]) -> None:
        each = list(zip(pools, layouts, strict=True))
        columns = np.concatenate([p.words[x.plane] for p, x in each]).T
        self.base, self.page_stride, self.row_stride, self.unit_stride, self.rows_per_page, self.unit_bytes = columns[
            :6
        ]
        self.first_unit = np.concatenate([x.first_unit for x in layouts]).astype(np.int64)
        self.words = np.zeros((len(self.base), SIDE), np.int64)
        """As if the first row and the page ids lay at 0."""
        self.words[:, 0], self.words[:, 1] = np.concatenate([p.at(x.plane) for p, x in each]), self.first_unit
        begins = np.cumsum([0, *(len(p.groups) for p in pools)])[:-1]
        groups = np.concatenate([p.group[x.plane] for p, x in each])
        self.of = np.repeat(begins, [len(x.plane) for x in layouts]) + groups
        """Which of the groups of all moves, counted through, an entry belongs to."""
        self.beside = 0
        """Of what is read beside the cells, addresses and strides, or'ed."""
        for p, x in each:
            self.beside |= p.beside(np.unique(x.plane).tolist())

    def bits(self, side_by_side: npt.NDArray[np.bool_]) -> I64:
        """Of each entry addresses and strides, or'ed; where units are side by side, not that of a unit."""
        bits: I64 = self.base | self.page_stride | self.first_unit * self.unit_stride
        bits |= np.where(self.rows_per_page > 1, self.row_stride, 0) | np.where(side_by_side, 0, self.unit_stride)
        return bits

    def cell_bits(self, units: I64) -> int:
        """The same of cells one by one, in all entries."""
        return int(np.bitwise_or.reduce(self.bits(units == 1)))


def first_rows(layouts: Sequence[StagedLayout]) -> I64:
    """The first row of each entry, counted from that of its move's first."""
    rows: I64 = np.concatenate([x.row_start - x.row_start[0] for x in layouts])
    return rows


def span(layout: StagedLayout) -> tuple[int, int]:
    """The lowest and the highest row, counted from the first entry's first."""
    first = layout.row_start[0]
    return int((layout.row_start - first).min()), int((layout.row_stop - first).max())


class Entries:
    """What calls for the same planes and units have in common, whatever their rows.

    Args:
        planes: of the pool.
        layouts: of the call's moves, none of them empty.
    """

    def __init__(self, planes: Planes, layouts: Sequence[StagedLayout]) -> None:
        self.side = side = Side([planes] * len(layouts), layouts)
        units = np.concatenate([x.units for x in layouts]).astype(np.int64)
        self.order = np.lexsort((side.first_unit, side.words[:, 0])) if planes.neighbours_together else slice(None)
        side_by_side = side.unit_stride == side.unit_bytes
        run_bytes = np.where(side_by_side, units, 1) * side.unit_bytes
        self.longest = int(run_bytes.max())
        self.bits = int(np.bitwise_or.reduce(side.bits(side_by_side) | run_bytes))
        self.cell_bits = side.cell_bits(units)
        self.run_bytes, self.runs = run_bytes[self.order], np.where(side_by_side, 1, units)[self.order]
        self.words = np.zeros((len(units), ENTRY), np.int64)
        self.words[:, 0], self.words[:, 2 : 2 + SIDE] = units[self.order], side.words[self.order]
        self.of = side.of[self.order]


class Pattern:
    """What calls have in common whose layouts differ only in where their rows begin.

    Args:
        entries: what the layouts share with others.
        layouts: of the call's moves, none of them empty.
    """

    def __init__(self, entries: Entries, layouts: Sequence[StagedLayout]) -> None:
        rows = np.concatenate([x.row_stop - x.row_start for x in layouts])[entries.order]
        offset = np.concatenate([x.offset for x in layouts])
        self.entries = entries
        self.words = entries.words.copy()
        """The entries, as if every move's first row, page ids and part lay at 0."""
        self.words[:, 1], self.words[:, 6] = rows, offset[entries.order]
        self.words[:, 4] = first_rows(layouts)[entries.order]
        self.spans = [span(x) for x in layouts]
        self._offsets = int(np.bitwise_or.reduce(offset))
        self._bits = entries.bits | self._offsets
        self._pieces, self._cells = rows * entries.runs, rows * self.words[:, 0]
        self._shapes: dict[tuple[int, int], Shape] = {}

    def shape(self, bits: int, tile_bytes: int) -> Shape:
        """The widest access that the addresses, or'ed in ``bits``, allow, and tiles as wide as the longest run."""
        bits |= self._bits | 16
        key = bits & -bits, tile_bytes
        if key not in self._shapes:
            self._shapes[key] = self._cut(*key)
        return self._shapes[key]

    def shape_of_sums(self, tile_bytes: int) -> Shape:
        """The widest access that pages allow; a piece is one cell, however wide, and a program takes whole cells."""
        unit_bytes = self.entries.side.unit_bytes
        bits = self.entries.bits | int(np.bitwise_or.reduce(unit_bytes))
        shape = Shape.of_runs(bits, int(unit_bytes.max()), tile_bytes)
        return counted(evolve(shape, tiles=int((-(-self._cells // shape.pieces)).max())), self._cells)

    def shape_of_cells(self, cells: Cells, bits: int, tile_bytes: int) -> Shape:
        """Tiles of whole cells, which change; ``bits``: of addresses in staging, or'ed, or 0."""
        aligned = cells.aligned(self.entries.cell_bits, bits | self._offsets, self.entries.side.beside)
        return counted(cells.shape(aligned, self._cells, tile_bytes), self._cells)

    def _cut(self, aligned: int, tile_bytes: int) -> Shape:
        shape = Shape.of_runs(aligned, self.entries.longest, tile_bytes)
        chunks = -(-self.entries.run_bytes // (shape.element_bytes * shape.columns))
        tiles = int((-(-self._pieces // shape.pieces) * chunks).max())
        return counted(evolve(shape, tiles=tiles), self._pieces)


class Planes:
    """A pool's planes, at the addresses that they had when this was made. Any thread.

    Args:
        pool: the pool.
        neighbours_together: entries of neighbouring units are moved at about the same time, whichever move they belong
            to, so that memory sees long runs in the pages; else parts are moved one after another.
    """

    def __init__(self, pool: PagedMemory, neighbours_together: bool = False) -> None:
        self.neighbours_together = neighbours_together
        site = pool.site
        self.groups = {g.id: (i, g.rows_per_page) for i, g in enumerate(site.groups)}
        self.group = np.array([self.groups[p.group][0] for p in site.planes], np.int64)
        self.conversions = site.conversions
        rows = [self._words(pool, p, site.stored_bytes[i]) for i, p in enumerate(site.planes)]
        factors: list[int] = []
        for i, how in enumerate(site.conversions):
            if how is not None and how.scales is not None:
                rows[i][6] = (len(rows) - i) * PLANE
                rows.append(self._words(pool, how.scales, 4))
        for i, how in enumerate(site.conversions):
            if how is not None and how.rule == "given":
                rows[i][6:] = (len(rows) - i) * PLANE + len(factors), int(len(how.factors) > 1)
                factors += np.array(how.factors or (1.0,), np.float32).view(np.int32).tolist()
        behind = np.zeros(-(-len(factors) // PLANE) * PLANE, np.int64)
        behind[: len(factors)] = factors
        self.words = np.concatenate([np.array(rows, np.int64).reshape(-1, PLANE), behind.reshape(-1, PLANE)])
        self.addr: int = self.words.ctypes.data
        """Where kernels find the words: here, or on a GPU."""
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entries] = {}
        self._patterns: dict[bytes, Pattern] = {}
        self._seen: dict[tuple[Hashable, ...], Pattern] = {}

    def _words(self, pool: PagedMemory, plane: Plane, unit_bytes: int) -> list[int]:
        base, rows = pool.buffers[plane.buffer].addr + plane.offset, self.groups[plane.group][1]
        return [base, plane.page_stride, plane.row_stride, plane.unit_stride, rows, unit_bytes, 0, 0]

    def at(self, numbers: npt.NDArray[np.int32 | np.int64]) -> I64:
        """Addresses of the words of planes."""
        return self.addr + numbers.astype(np.int64) * (PLANE * 8)

    def beside(self, numbers: Iterable[int]) -> int:
        """Addresses and strides of the scales that planes' conversions read, or'ed; 0: they read none."""
        bits = 0
        for number in numbers if self.conversions else ():
            how = self.conversions[number]
            if how is not None and how.scales is not None:
                scales = self.words[number + self.words[number, 6] // PLANE]
                bits |= int(np.bitwise_or.reduce(scales[:4]))
        return bits

    def pattern(self, layouts: Sequence[StagedLayout]) -> Pattern:
        """The pattern of these layouts, none of them empty; segments of one size share it."""
        alike = tuple([x.alike for x in layouts])
        with self._lock:
            if None in alike:
                return self._equal(layouts)
            return known_or_made(self._seen, alike, lambda: self._equal(layouts))

    def _equal(self, layouts: Sequence[StagedLayout]) -> Pattern:
        """The pattern of what is equal to these layouts."""
        parts = [np.array([len(x.plane) for x in layouts]).tobytes()]
        for x in layouts:
            parts += [column.tobytes() for column in (x.plane, x.first_unit, x.units)]
        what = b"".join(parts)
        for x in layouts:
            first = x.row_start[0]
            parts += [column.tobytes() for column in (x.row_start - first, x.row_stop - first, x.offset)]
        return known_or_made(self._patterns, b"".join(parts), lambda: Pattern(self._of(what, layouts), layouts))

    def _of(self, key: bytes, layouts: Sequence[StagedLayout]) -> Entries:
        return known_or_made(self._entries, key, lambda: Entries(self, layouts))


def known_or_made(known: dict[Key, Known], key: Key, make: Callable[[], Known]) -> Known:
    """What is remembered under ``key``, or made now; the oldest is forgotten for it."""
    found = known.get(key)
    if found is None:
        if len(known) >= PATTERNS:
            known.pop(next(iter(known)), None)
        found = known[key] = make()
    return found


class PageIds:
    """The page ids that a call uses: of each table those in use, once."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, int], int] = {}
        self._tables: list[I32] = []
        self._count = 0

    @property
    def words(self) -> int:
        """Words that they take."""
        return (self._count + 1) // 2

    def add(
        self, planes: Planes, tables: Mapping[GroupId, PageTable], first: int, span: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Add those of one room. Of each group of the pool: the row ``first``, and the place of the page id of row 0.

        Args:
            planes: of the pool.
            tables: the room's pages.
            first: a row of the room.
            span: the rows in use, counted from there.
        """
        found = [(0, 0)] * len(planes.groups)
        low, high = span
        for group, table in tables.items():
            index, rows = planes.groups[group]
            row = first - table.first
            # Other groups' rows may lie outside this table.
            start = max(row + low, 0) // rows
            stop = min(-(-(row + high) // rows), len(table.pages))
            key = (id(table.pages), start, stop)
            if key not in self._places and start < stop:
                self._places[key] = self._count
                self._tables.append(table.pages[start:stop])
                self._count += stop - start
            found[index] = row - start * rows, self._places.get(key, 0)
        return found

    def write(self, into: I64) -> None:
        """Write them; a place counts ids from the beginning."""
        ids = into.view(np.int32)
        begin = 0
        for pages in self._tables:
            ids[begin : begin + len(pages)] = pages
            begin += len(pages)


class Call:
    """The table of a gather or scatter, counted before memory is found for it and then written.

    Args:
        planes: of the pool.
        moves: of the call; those without entries are left out.
        tile_bytes: what one program shall move at once, a power of two.
        cells: what changes on the way; None: bytes are copied, or summed, as they are.
        staging: address of the staging buffer.
    """

    def __init__(
        self, planes: Planes, moves: Sequence[Move], tile_bytes: int, cells: Cells | None = None, staging: int = 0
    ) -> None:
        self._planes = planes  # entries have the address of their words
        self._moves = [m for m in moves if len(m.layout.plane)]
        self._tile_bytes, self._cells, self._staging = tile_bytes, cells, staging
        self.entries = self.words = 0
        if not self._moves:
            return
        self._pattern = planes.pattern([m.layout for m in self._moves])
        self.entries = len(self._pattern.words)
        self._ids = PageIds()
        self._places = [
            place
            for move, span in zip(self._moves, self._pattern.spans, strict=True)
            for place in self._ids.add(planes, move.tables, int(move.layout.row_start[0]), span)
        ]
        """Per move and group: its first entry's first row, and the place of its page ids."""
        self.words = self.entries * ENTRY + self._ids.words

    def write(self, into: I64, at: int) -> Shape:
        """Write the table.

        Args:
            into: at least ``words`` words.
            at: the address at which the kernels will find what ``into`` holds now.

        Raises:
            UnsupportedError: more than the kernels can count.
        """
        staged = [self._staging + move.base for move in self._moves]
        self._fill(into, at, staged)
        bits = reduce(or_, staged)
        if self._cells is not None:
            return self._pattern.shape_of_cells(self._cells, bits, self._tile_bytes)
        return self._pattern.shape(bits, self._tile_bytes)

    def _fill(self, into: I64, at: int, staged: Sequence[int]) -> None:
        """Write the entries and the page ids, for parts that begin at these addresses."""
        end = self.entries * ENTRY
        groups = len(self._places) // len(self._moves)
        begins = np.array(
            [(row, at + end * 8 + place * 4, staged[i // groups]) for i, (row, place) in enumerate(self._places)]
        )
        table = into[:end].reshape(self.entries, ENTRY)
        table[:] = self._pattern.words
        table[:, 4:7] += begins if len(begins) == 1 else begins[self._pattern.entries.of]
        self._ids.write(into[end:])


class SumCall(Call):
    """The table of a checksum, and a sum of 0 for every entry behind it.

    Args:
        planes, moves, tile_bytes, cells: see :class:`Call`.
        places: of the first cell of every entry of every move, ``[entries]``.
    """

    def __init__(
        self, planes: Planes, moves: Sequence[Move], tile_bytes: int, cells: Cells | None, places: I64
    ) -> None:
        super().__init__(planes, moves, tile_bytes, cells)
        self._first = places
        self.sums = slice(self.words, self.words + self.entries)
        """The words of the sums."""
        self.words += self.entries

    def write(self, into: I64, at: int) -> Shape:
        """See :meth:`Call.write`."""
        self._fill(into, at, [0 for _ in self._moves])
        into[self.sums] = 0
        table = into[: self.entries * ENTRY].reshape(self.entries, ENTRY)
        table[:, 6] = at + (self.sums.start + np.arange(self.entries)) * 8
        table[:, 7] = self._first
        if self._cells is not None:
            return self._pattern.shape_of_cells(self._cells, 0, self._tile_bytes)
        return self._pattern.shape_of_sums(self._tile_bytes)


def columns_of(length: int, elements: int) -> int:
    """The widest tile of which runs of ``length`` elements leave at most a quarter idle; 4, 8 ... 128."""
    columns = min(max(1 << (length - 1).bit_length(), 4), elements, 128)
    while columns > 4 and length * 4 < -(-length // columns) * columns * 3:
        columns //= 2
    return columns
