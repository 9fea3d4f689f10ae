"""Memory as a flat array of equal pieces: what makes gather one ``take`` and scatter one assignment for many planes.

A piece is as long as the plane's strides allow: normally all units of a row that are wanted, if the units of a row lie
side by side, else one unit. NumPy copies each with one ``memcpy``; nothing depends on alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ...geometry import I64, PageTable, places
from ...ids import GroupId
from ...memory import MemoryPool, PagedMemory, bytes_of
from ..base import Move

Pieces = npt.NDArray[np.void]
"""Elements of ``nbytes`` opaque bytes each."""


@frozen
class _Shape:
    """How the rows of a plane break into pieces; equal shapes under one page table have equal indices.

    The strides count in pieces of ``nbytes``; ``runs`` runs of ``length`` pieces make the units of a row.
    """

    group: GroupId
    rows_per_page: int
    page_stride: int
    row_stride: int
    run_stride: int
    runs: int
    length: int
    nbytes: int

    def index(self, table: PageTable, start: int, stop: int) -> I64:
        """The place of every piece, in staging order, counted from the first unit's first piece of page 0."""
        page, slot = places(table, self.rows_per_page, start, stop)
        of_row = page * self.page_stride + slot * self.row_stride
        index: I64 = (of_row[:, None] + self.of_run).reshape(-1)
        return index

    @cached_property
    def of_run(self) -> I64:
        """The places of the pieces of one row, counted from the first unit's first piece."""
        return (np.arange(self.runs)[:, None] * self.run_stride + np.arange(self.length)).reshape(-1)


class _Known:
    """Cached facts about a pool's planes: a segment has an entry per plane, each of only a few rows."""

    def __init__(self, pool: PagedMemory) -> None:
        self._site = pool.site
        self._memory = [bytes_of(buffer) for buffer in pool.buffers]
        self._entries: dict[tuple[int, int, int], tuple[Pieces, _Shape, int]] = {}
        self._shapes: dict[_Shape, _Shape] = {}
        self._flats: dict[tuple[int, int, int], Pieces] = {}

    def entry(self, number: int, first: int, units: int) -> tuple[Pieces, _Shape, int]:
        """A buffer as pieces, the plane's shape, and which piece is its unit ``first``'s; equal ones are one object."""
        key = (number, first, units)
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = self._look(number, first, units)
        return found

    def _look(self, number: int, first: int, units: int) -> tuple[Pieces, _Shape, int]:
        plane = self._site.planes[number]
        group = self._site.group(plane.group)
        unit_bytes = self._site.spec.component(plane.layer, plane.component).unit_bytes
        side_by_side = plane.unit_stride == unit_bytes
        runs, run = (1, units * unit_bytes) if side_by_side else (units, unit_bytes)
        run_stride = 0 if side_by_side else plane.unit_stride
        row_stride = plane.row_stride if group.rows_per_page > 1 else 0
        nbytes = math.gcd(plane.page_stride, row_stride, run_stride, run)
        strides = (plane.page_stride // nbytes, row_stride // nbytes, run_stride // nbytes)
        shape = _Shape(plane.group, group.rows_per_page, *strides, runs, run // nbytes, nbytes)
        place, phase = divmod(plane.offset + first * plane.unit_stride, nbytes)
        memory = self._memory[plane.buffer]
        flat: Pieces = np.ndarray(((len(memory) - phase) // nbytes,), np.dtype((np.void, nbytes)), memory, phase)
        flat = self._flats.setdefault((plane.buffer, phase, nbytes), flat)
        return flat, self._shapes.setdefault(shape, shape), place


_known: WeakKeyDictionary[PagedMemory, _Known] = WeakKeyDictionary()


@frozen
class Run:
    """Consecutive entries of a move whose pieces have one index and are adjacent in staging.

    Args:
        flat: memory as pieces.
        index: an entry's pieces, in staging order, relative to the first piece of its first unit in page 0.
        places: position of that first piece, for each entry.
        first: number of the first entry.
        offset: byte in the part at which the run begins.
    """

    flat: Pieces
    index: I64
    places: I64
    first: int
    offset: int


def runs(pool: PagedMemory, move: Move) -> Iterator[Run]:
    """A move's entries, as many at once as there can be.

    The layers of a model nearly always share one shape and one table, and follow each other in staging: then a run is
    as long as the move, and what each NumPy call costs is paid once.
    """
    known = _known.get(pool)
    if known is None:
        known = _known[pool] = _Known(pool)
    indices: dict[tuple[int, int, int], I64] = {}
    places: list[int] = []
    last: tuple[Pieces, I64, int, int] | None = None
    end = 0
    layout = move.layout
    columns = layout.plane, layout.first_unit, layout.units, layout.row_start, layout.row_stop, layout.offset
    for i, (number, first, units, start, stop, offset) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        flat, shape, place = known.entry(number, first, units)
        key = (id(shape), start, stop)
        index = indices.get(key)
        if index is None:
            index = indices[key] = shape.index(move.tables[shape.group], start, stop)
        if last is None or last[0] is not flat or last[1] is not index or offset != end:
            if last is not None:
                yield Run(last[0], last[1], np.array(places, np.int64), last[2], last[3])
            last, places, end = (flat, index, i, offset), [], offset
        places.append(place)
        end += len(index) * shape.nbytes
    if last is not None:
        yield Run(last[0], last[1], np.array(places, np.int64), last[2], last[3])


def pieces(pool: MemoryPool, moves: Sequence[Move]) -> Iterator[tuple[Pieces, I64, slice]]:
    """For every run of every move: memory as pieces, the index of those wanted, and their bytes in staging."""
    for move in moves:
        for run in runs(pool, move):
            wanted: I64 = (run.places[:, None] + run.index).reshape(-1)
            at = move.base + run.offset
            yield run.flat, wanted, slice(at, at + len(wanted) * run.flat.itemsize)
