"""Conversions on a GPU, for gather, copy and checksum of a pool that is read as another cache: one kernel.

Numbers are handled as integers, so that a GPU, Triton's interpreter and NumPy have the same bits. Few operations are on
floats: one multiplication, whose result is an integer before it is used again, so that no compiler joins it with
another; the division of a scale, rounded to nearest; and one sum, whose rounding is that of the format.

A *piece* is one cell. A tile is ``pieces`` cells by ``columns`` elements, of which a cell has ``elements``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..checksum.triton import add, cells_of_tile, place_of, weighed
from ..moves.triton import cells_of, side

INFINITY = tl.constexpr(0x7F800000)
SIZE = tl.constexpr(0x7FFFFFFF)
LEAST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def places(cell: tl.tensor, col: tl.tensor, element: tl.constexpr, aligned: tl.constexpr) -> tl.tensor:
    """Pointers ``[pieces, columns]`` to elements of cells at addresses, with the promise of their alignment."""
    size: tl.constexpr = element.primitive_bitwidth // 8
    found = cell.to(tl.pointer_type(element))[:, None] + col[None, :]
    wide: tl.constexpr = min(16, aligned // 2 * size) if aligned > 1 else 1
    return tl.multiple_of(found, (wide, wide))


@triton.jit
def loaded(cell: tl.tensor, col: tl.tensor, mask: tl.tensor, nbytes: tl.constexpr, aligned: tl.constexpr) -> tl.tensor:
    """Integers of ``nbytes`` bytes, int32 ``[pieces, columns]``; byte by byte where ``aligned`` is 1."""
    if nbytes == 1:
        x = tl.load(places(cell, col, tl.uint8, aligned), mask=mask, other=0).to(tl.int32)
    elif aligned == 1:
        x = tl.load(places(cell, col * nbytes, tl.uint8, 1), mask=mask, other=0).to(tl.int32)
        for byte in tl.static_range(1, nbytes):
            x |= tl.load(places(cell, col * nbytes + byte, tl.uint8, 1), mask=mask, other=0).to(tl.int32) << (8 * byte)
    elif nbytes == 2:
        x = tl.load(places(cell, col, tl.uint16, aligned), mask=mask, other=0).to(tl.int32)
    else:
        x = tl.load(places(cell, col, tl.int32, aligned), mask=mask, other=0)
    return x


@triton.jit
def stored(
    cell: tl.tensor, col: tl.tensor, x: tl.tensor, mask: tl.tensor, nbytes: tl.constexpr, aligned: tl.constexpr
) -> None:
    """Store the low ``nbytes`` bytes of int32 ``[pieces, columns]``; byte by byte where ``aligned`` is 1."""
    if nbytes == 1:
        tl.store(places(cell, col, tl.int8, aligned), x.to(tl.int8), mask=mask)
    elif aligned == 1:
        for byte in tl.static_range(nbytes):
            tl.store(places(cell, col * nbytes + byte, tl.int8, 1), (x >> (8 * byte)).to(tl.int8), mask=mask)
    elif nbytes == 2:
        tl.store(places(cell, col, tl.int16, aligned), x.to(tl.int16), mask=mask)
    else:
        tl.store(places(cell, col, tl.int32, aligned), x, mask=mask)


@triton.jit
def float32_of(x: tl.tensor, source: tl.constexpr) -> tl.tensor:
    """The numbers of codes, int32: exact."""
    if source == "float32":
        f = x.to(tl.float32, bitcast=True)
    elif source == "bfloat16":
        f = (x << 16).to(tl.float32, bitcast=True)
    elif source == "float16":
        f = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif source == "float8_e5m2":
        f = (x << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = ((x & 0x7F) << 7) | ((x & 0x80) << 8)
        f = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        f = tl.where((x & 0x7F) == 0x7F, float("nan"), f)
    return f


@triton.jit
def scales_of(f: tl.tensor, there: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """The scale of every piece; see :func:`.reference.scales_of`."""
    bits = f.to(tl.int32, bitcast=True) & SIZE
    top = tl.max(tl.where(there & (bits < INFINITY), bits, 0), axis=1)
    size = top.to(tl.float32, bitcast=True)
    scale = tl.div_rn(size, tl.full(size.shape, largest, tl.int32).to(tl.float32, bitcast=True))
    scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
    return tl.where(top == 0, 1.0, scale)


@triton.jit
def code_of(
    f: tl.tensor,
    nbytes: tl.constexpr,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    largest: tl.constexpr,
    infinity: tl.constexpr,
    nan: tl.constexpr,
) -> tl.tensor:
    """The codes of the nearest numbers of a format, int32; see :func:`.cpu.rounded`."""
    bits = f.to(tl.int32, bitcast=True)
    size = bits & SIZE
    if nbytes == 4:
        code = bits
    else:
        cut: tl.constexpr = 23 - mantissa
        half: tl.constexpr = (1 << (22 - mantissa)) - 1
        clipped = tl.minimum(size, largest)
        code = (clipped + half + ((clipped >> cut) & 1) - ((127 - bias) << 23)) >> cut
        if bias < 127:
            magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
            magic_bits: tl.constexpr = (24 - bias - mantissa + 127) << 23
            small = (clipped.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - magic_bits
            code = tl.where(clipped < ((128 - bias) << 23), small, code)
        if infinity:
            code = tl.where(size == INFINITY, ((largest - ((127 - bias) << 23)) >> cut) + 1, code)
        code |= (bits >> (32 - 8 * nbytes)) & (1 << (8 * nbytes - 1))
    return tl.where(size > INFINITY, nan, code)


@triton.jit(do_not_specialize=["tiles", "total"])
def convert(
    entries: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
    into: tl.constexpr,
    source: tl.constexpr,
    source_bytes: tl.constexpr,
    rule: tl.constexpr,
    elements: tl.constexpr,
    nbytes: tl.constexpr,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    largest: tl.constexpr,
    infinity: tl.constexpr,
    nan: tl.constexpr,
) -> None:
    """Convert tiles of cells; each program takes every n-th tile.

    Args:
        entries: this and the other arguments before the constants: see :mod:`..moves.triton`.
        tiles: see there.
        total: see there.
        element: unused.
        pieces: cells of a tile.
        aligned: twice the elements that addresses, strides and cells are multiples of, on both sides; 1: not even of
            one, so bytes are read and written one by one.
        columns: elements of a cell, rounded up to a power of two.
        into: what becomes of the cells: ``"gather"`` stores them in staging, ``"copy"`` in the target's pages, and
            ``"checksum"`` adds them to the entry's sum.
        source: dtype in the pages.
        source_bytes: bytes of one of its numbers.
        rule: see :class:`~disagg_kv.geometry.PlaneConversion`.
        elements: of a cell.
        nbytes: bytes of a number of the wanted format; this and what follows: :class:`~..geometry.formats.Format`.
        mantissa: bits of its mantissa.
        bias: of its exponent.
        largest: its largest number, as a float32's bits.
        infinity: whether infinity stays infinity.
        nan: its code of NaN.
    """
    words: tl.constexpr = 10 if into == "copy" else 8
    # Of the rule "scales" a cell becomes one float32, which is aligned to four bytes or to none.
    numbers: tl.constexpr = 1 if rule == "scales" else elements
    size: tl.constexpr = 4 if rule == "scales" else nbytes
    width: tl.constexpr = 1 if rule == "scales" else columns
    wide: tl.constexpr = min(aligned, 2) if rule == "scales" else aligned
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (number // tiles).to(tl.int64) * words
        piece, row, unit, there = cells_of_tile(entry, number % tiles, pieces)
        col = tl.arange(0, columns)
        read = there[:, None] & (col < elements)[None, :]
        f = float32_of(loaded(side(entry + 2, row, unit, there), col, read, source_bytes, aligned), source)
        # Words 6 and 7 of a plane say where its factors or the plane of its scales are.
        plane = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
        first_unit = tl.load(entry + 3)
        if rule == "given":
            # One factor for all units, or one for each.
            factors = plane + tl.load(plane + 6) + (first_unit + unit) * tl.load(plane + 7)
            factor = tl.load(factors, mask=there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
            f = f * factor[:, None]
        elif rule == "read":
            pages, first_row = tl.load(entry + 5).to(tl.pointer_type(tl.int32)), tl.load(entry + 4).to(tl.int32)
            scale = cells_of(plane + tl.load(plane + 6), pages, first_row + row, first_unit + unit, there)
            factors = loaded(scale, tl.arange(0, 1), there[:, None], 4, min(aligned, 2))
            f = f * factors.to(tl.float32, bitcast=True)
        else:
            factor = scales_of(f, read, largest)
            if rule == "computed":
                f = f * tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)[:, None]

        if rule == "scales":
            code = factor.to(tl.int32, bitcast=True)[:, None]
        else:
            code = code_of(f, nbytes, mantissa, bias, largest, infinity, nan)
        where = tl.arange(0, width)
        mask = there[:, None] & (where < numbers)[None, :]
        if into == "checksum":
            found = tl.sum(weighed(tl.where(mask, code, 0), where, size), axis=1)
            add(entry, place_of(entry, row, unit) + found, there)
        else:
            if into == "copy":
                cell = side(entry + 6, row, unit, there)
            else:
                cell = tl.load(entry + 6) + piece.to(tl.int64) * (numbers * size)
            stored(cell, where, code, mask, size, wide)
