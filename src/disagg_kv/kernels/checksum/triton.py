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


@triton.jit
def cells_of_tile(entry: tl.tensor, within: tl.tensor, pieces: tl.constexpr) -> tl.tuple:
    """The cells of the ``within``-th tile of an entry: their numbers, rows, units, and which of them there are."""
    units, rows = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    piece = within * pieces + tl.arange(0, pieces)
    there = piece < rows * units
    row = piece // units
    return piece, row, piece - row * units, there


@triton.jit
def place_of(entry: tl.tensor, row: tl.tensor, unit: tl.tensor) -> tl.tensor:
    """The places of cells of an entry; see :mod:`.mixing`."""
    return tl.load(entry + 7).to(tl.uint64) + row.to(tl.uint64) * ROW + unit.to(tl.uint64) * UNIT


@triton.jit
def add(entry: tl.tensor, found: tl.tensor, there: tl.tensor) -> None:
    """Add the cells that there are, of which ``place + sum of word[j] * key[j]`` was found, to the entry's sum."""
    into = tl.load(entry + 6).to(tl.pointer_type(tl.uint64))
    tl.atomic_add(into, tl.sum(tl.where(there, mix(found), 0)), sem="relaxed")


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
    _piece, row, unit, there = cells_of_tile(entry, number % tiles, pieces)
    unit_bytes = tl.load(tl.load(entry + 2).to(tl.pointer_type(tl.int64)) + 5)
    length = tl.multiple_of((unit_bytes // size).to(tl.int32), aligned // size)
    cell, found = side(entry + 2, row, unit, there), place_of(entry, row, unit)
    for begin in range(0, length, columns):
        col = begin + tl.arange(0, columns)
        x = tl.load(pointers(cell, col, element, aligned), mask=there[:, None] & (col < length)[None, :], other=0)
        found += tl.sum(weighed(x, col, size), axis=1)
    add(entry, found, there)
