"""Checksums on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from ..moves.triton import pointers, side
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


@triton.jit(do_not_specialize=["tiles", "total"])
def checksum(
    entries: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Add ``pieces`` cells of one entry to the entry's sum; the arguments are those of :mod:`..moves.triton`.

    A piece is one cell. Word 6 of an entry is the address of its sum, word 7 the place of its first cell.
    """
    size: tl.constexpr = element.primitive_bitwidth // 8
    number = tl.program_id(0)
    entry = entries + (number // tiles).to(tl.int64) * 8
    units, rows = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    unit_bytes = tl.load(tl.load(entry + 2).to(tl.pointer_type(tl.int64)) + 5)
    length = tl.multiple_of((unit_bytes // size).to(tl.int32), aligned // size)

    piece = number % tiles * pieces + tl.arange(0, pieces)
    there = piece < rows * units
    row = piece // units
    unit = piece - row * units
    cell = side(entry + 2, row, unit, there)
    place = tl.load(entry + 7).to(tl.uint64) + row.to(tl.uint64) * ROW + unit.to(tl.uint64) * UNIT
    for begin in range(0, length, columns):
        col = begin + tl.arange(0, columns)
        x = tl.load(pointers(cell, col, element, aligned), mask=there[:, None] & (col < length)[None, :], other=0)
        place += tl.sum(weighed(x, col, size), axis=1)
    into = tl.load(entry + 6).to(tl.pointer_type(tl.uint64))
    tl.atomic_add(into, tl.sum(tl.where(there, mix(place), 0)), sem="relaxed")
