"""Gather, scatter and copy on a GPU.

A *piece* is a run of bytes that is contiguous on both sides: all wanted units of a row where the units of a row lie
side by side, else one unit. A tile is ``pieces`` pieces by ``columns`` elements. What differs from one request to the
next is read from memory, so that nothing is compiled again: an entry says what to move, a plane where it lies;
:mod:`..triton_tables` writes both and says which word is which. All kernels begin with the same arguments:

entries
    int64, the call's table.
tiles
    tiles of an entry; those beyond its end have an empty mask.
total
    tiles of all entries.
element
    the integer type that is moved.
aligned
    bytes that divide every address, stride and length of every entry; promised to the compiler.
pieces
    pieces of a tile.
columns
    elements of a piece that one tile takes.

A gather or scatter has a program for each tile. Of a copy each program takes every n-th tile, so that a launch of n
programs takes at most n multiprocessors from the kernels of a model, however much it copies.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cells_of(plane: tl.tensor, pages: tl.tensor, row: tl.tensor, unit: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Addresses of cells in a plane's pages, int64 ``[pieces]``.

    Args:
        plane: the plane's words.
        pages: int32, page ids.
        row: int32 ``[pieces]``, counted from the first of those page ids.
        unit: int64 ``[pieces]``, counted within the plane.
        there: which of the pieces there are; no page id is read for others.
    """
    base, page_stride = tl.load(plane), tl.load(plane + 1)
    row_stride, unit_stride = tl.load(plane + 2), tl.load(plane + 3)
    rows_per_page = tl.load(plane + 4).to(tl.int32)
    page = row // rows_per_page
    slot = row - page * rows_per_page
    held = tl.load(pages + page, mask=there, other=0).to(tl.int64)
    return base + held * page_stride + slot.to(tl.int64) * row_stride + unit * unit_stride


@triton.jit
def side(words: tl.tensor, row: tl.tensor, unit: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Addresses of an entry's cells in a pool: see :data:`..triton_tables.SIDE`; rows and units count within it."""
    plane = tl.load(words).to(tl.pointer_type(tl.int64))
    pages = tl.load(words + 3).to(tl.pointer_type(tl.int32))
    return cells_of(plane, pages, row + tl.load(words + 2).to(tl.int32), unit + tl.load(words + 1), there)


@triton.jit
def pointers(cell: tl.tensor, col: tl.tensor, element: tl.constexpr, aligned: tl.constexpr) -> tl.tensor:
    """Pointers ``[pieces, columns]`` to elements at addresses."""
    # The promise is made for the last pointers: the compiler forgets it where an integer becomes a pointer.
    return tl.multiple_of(cell.to(tl.pointer_type(element))[:, None] + col[None, :], (aligned, aligned))


@triton.jit
def tile(
    entry: tl.tensor,
    within: tl.tensor,
    side_by_side: tl.tensor,
    unit_bytes: tl.tensor,
    size: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tuple:
    """One tile of an entry: its pieces' numbers, rows, units and bytes, its columns, and which of them there are.

    Args:
        entry: the entry's words.
        within: number of the tile within the entry.
        side_by_side: whether the units of a row are, on all sides.
        unit_bytes: of a unit.
        size: bytes of an element.
        aligned: this and what follows: see above.
        pieces: of a tile.
        columns: of a tile.
    """
    units, rows = tl.load(entry), tl.load(entry + 1).to(tl.int32)
    runs = tl.where(side_by_side, 1, units).to(tl.int32)
    run_bytes = tl.where(side_by_side, units, 1) * unit_bytes
    length = tl.multiple_of((run_bytes // size).to(tl.int32), aligned // size)
    chunks = (length + columns - 1) // columns
    piece = within // chunks * pieces + tl.arange(0, pieces)
    col = within % chunks * columns + tl.arange(0, columns)
    there = piece < rows * runs
    row = piece // runs
    return piece, row, piece - row * runs, run_bytes, col, there, there[:, None] & (col < length)[None, :]


@triton.jit(do_not_specialize=["tiles", "total"])
def stage(
    entries: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
    into: tl.constexpr,
) -> None:
    """Copy one tile of pages into staging, a gather, or of staging into pages, a scatter: ``into`` says which."""
    size: tl.constexpr = element.primitive_bitwidth // 8
    number = tl.program_id(0)
    entry = entries + (number // tiles).to(tl.int64) * 8
    plane = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
    unit_stride, unit_bytes = tl.load(plane + 3), tl.load(plane + 5)
    piece, row, unit, run_bytes, col, there, mask = tile(
        entry, number % tiles, unit_stride == unit_bytes, unit_bytes, size, aligned, pieces, columns
    )
    place = tl.load(entry + 6) + piece.to(tl.int64) * run_bytes
    cells = pointers(side(entry + 2, row, unit, there), col, element, aligned)
    places = pointers(place, col, element, aligned)
    if into == "staging":
        tl.store(places, tl.load(cells, mask=mask), mask=mask)
    else:
        tl.store(cells, tl.load(places, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["tiles", "total"])
def copy(
    entries: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Copy tiles of pages into pages, of which either may be mapped memory of a peer."""
    size: tl.constexpr = element.primitive_bitwidth // 8
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (number // tiles).to(tl.int64) * 10
        plane = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
        other = tl.load(entry + 6).to(tl.pointer_type(tl.int64))
        unit_bytes = tl.load(plane + 5)
        side_by_side = (tl.load(plane + 3) == unit_bytes) & (tl.load(other + 3) == unit_bytes)
        _piece, row, unit, _run_bytes, col, there, mask = tile(
            entry, number % tiles, side_by_side, unit_bytes, size, aligned, pieces, columns
        )
        read = pointers(side(entry + 2, row, unit, there), col, element, aligned)
        written = pointers(side(entry + 6, row, unit, there), col, element, aligned)
        tl.store(written, tl.load(read, mask=mask), mask=mask)
