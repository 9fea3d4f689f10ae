"""Where a program's tile of bytes lies in the pages and in staging: the part that gather and scatter share.

:func:`cells_of` also serves copies, which have pages on both sides.

A *piece* is a run of bytes that is contiguous on both sides: all wanted units of a row where the units of a row lie
side by side, else one unit. A tile is ``pieces`` pieces by ``columns`` elements. What differs from one request to the
next is read from memory, so that nothing is compiled again: an entry says what to move, a plane where it lies;
:mod:`.triton_tables` writes both and says which word is which.
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
def tile(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tuple:
    """Pointers into pages and staging ``[pieces, columns]`` and their mask, for this program.

    Args:
        planes: int64, the pool's table.
        entries: int64, the call's table.
        tiles: programs per entry; those beyond an entry's end have an empty mask.
        element: the integer type that is moved.
        aligned: bytes that divide every address, stride and length of every entry; promised to the compiler.
        pieces: pieces of a tile.
        columns: elements of a piece that one tile takes.
    """
    size: tl.constexpr = element.primitive_bitwidth // 8
    number = tl.program_id(0)
    entry = entries + (number // tiles).to(tl.int64) * 8
    plane = planes + tl.load(entry) * 8
    first_unit, units = tl.load(entry + 1), tl.load(entry + 2)
    first_row, rows = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    pages, staged = tl.load(entry + 5).to(tl.pointer_type(tl.int32)), tl.load(entry + 6)
    unit_stride, unit_bytes = tl.load(plane + 3), tl.load(plane + 5)

    side_by_side = unit_stride == unit_bytes
    runs = tl.where(side_by_side, 1, units).to(tl.int32)
    run_bytes = tl.where(side_by_side, units, 1) * unit_bytes
    length = tl.multiple_of((run_bytes // size).to(tl.int32), aligned // size)
    chunks = (length + columns - 1) // columns
    within = number % tiles
    piece = within // chunks * pieces + tl.arange(0, pieces)
    col = within % chunks * columns + tl.arange(0, columns)
    there = piece < rows * runs

    row = piece // runs
    unit = first_unit + (piece - row * runs)
    cell = cells_of(plane, pages, row + first_row, unit, there)
    place = staged + piece.to(tl.int64) * run_bytes
    # The promise is made for the last pointers: the compiler forgets it where an integer becomes a pointer.
    cells = tl.multiple_of(cell.to(tl.pointer_type(element))[:, None] + col[None, :], (aligned, aligned))
    places = tl.multiple_of(place.to(tl.pointer_type(element))[:, None] + col[None, :], (aligned, aligned))
    return cells, places, there[:, None] & (col < length)[None, :]
