"""Checksums on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from . import mixing

GOLDEN = tl.constexpr(mixing.GOLDEN)
FIRST = tl.constexpr(mixing.FIRST)
SECOND = tl.constexpr(mixing.SECOND)
ROW = tl.constexpr(mixing.ROW)
UNIT = tl.constexpr(mixing.UNIT)


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """See :func:`.mixing.mix`."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def keys(words: tl.tensor) -> tl.tensor:
    """The keys of words, uint64."""
    return mix((words.to(tl.uint64) + 1) * GOLDEN) | 1


@triton.jit
def weighed(x: tl.tensor, col: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """What elements of ``size`` bytes, the ``col``-th of their cells, add to the cells' sums: words or parts."""
    x = x.to(tl.uint64)
    if size == 8:
        return (x & 0xFFFFFFFF) * keys(2 * col)[None, :] + (x >> 32) * keys(2 * col + 1)[None, :]
    within = (col * size % 4 * 8).to(tl.uint64)
    return ((x & ((1 << 8 * size) - 1)) << within[None, :]) * keys(col * size // 4)[None, :]


@triton.jit(do_not_specialize=["tiles"])
def checksum(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Add ``pieces`` cells of one entry to the entry's sum.

    Args:
        planes: int64, the pool's table.
        entries: int64, the call's table; word 6: the address of the entry's sum, word 7: the place of its first cell.
        tiles: programs per entry; those beyond an entry's end add nothing.
        element: the integer type that is read.
        aligned: bytes that divide every address, stride and length of every entry; promised to the compiler.
        pieces: cells of a program.
        columns: elements of each that are read at once.
    """
    size: tl.constexpr = element.primitive_bitwidth // 8
    number = tl.program_id(0)
    entry = entries + (number // tiles).to(tl.int64) * 8
    plane = planes + tl.load(entry) * 8
    first_unit, units = tl.load(entry + 1), tl.load(entry + 2).to(tl.int32)
    first_row, rows = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    pages = tl.load(entry + 5).to(tl.pointer_type(tl.int32))
    into = tl.load(entry + 6).to(tl.pointer_type(tl.uint64))
    base, page_stride = tl.load(plane), tl.load(plane + 1)
    row_stride, unit_stride = tl.load(plane + 2), tl.load(plane + 3)
    rows_per_page, unit_bytes = tl.load(plane + 4).to(tl.int32), tl.load(plane + 5)
    length = tl.multiple_of((unit_bytes // size).to(tl.int32), aligned // size)

    piece = number % tiles * pieces + tl.arange(0, pieces)
    there = piece < rows * units
    row = piece // units
    unit = piece - row * units
    place = tl.load(entry + 7).to(tl.uint64) + row.to(tl.uint64) * ROW + unit.to(tl.uint64) * UNIT
    row += first_row
    page = row // rows_per_page
    slot = row - page * rows_per_page
    held = tl.load(pages + page, mask=there, other=0).to(tl.int64)
    cell = base + held * page_stride + slot.to(tl.int64) * row_stride + (first_unit + unit) * unit_stride
    for begin in range(0, length, columns):
        col = begin + tl.arange(0, columns)
        read = tl.multiple_of(cell.to(tl.pointer_type(element))[:, None] + col[None, :], (aligned, aligned))
        x = tl.load(read, mask=there[:, None] & (col < length)[None, :], other=0)
        place += tl.sum(weighed(x, col, size), axis=1)
    tl.atomic_add(into, tl.sum(tl.where(there, mix(place), 0)), sem="relaxed")
