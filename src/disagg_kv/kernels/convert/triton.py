"""Conversions on a GPU: gather, copy and checksum of a pool that is read as another cache.

Numbers are handled as integers, so that a GPU, Triton's interpreter and NumPy have the same bits. Few operations are on
floats: one multiplication, whose result is an integer before it is used again, so that no compiler joins it with
another; the division of a scale, rounded to nearest; and one sum, whose rounding is that of the format.

A *piece* is one cell. A tile is ``pieces`` cells by ``columns`` elements, of which a cell has ``elements``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..checksum.triton import mix, weighed
from ..copy.triton import side
from ..triton_tiles import cells_of

ROW = tl.constexpr(0xD1B54A32D192ED03)
UNIT = tl.constexpr(0x8CB92BA72F3D8DD7)
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


@triton.jit
def converted(
    plane: tl.tensor,
    pages: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    first_unit: tl.tensor,
    units: tl.tensor,
    piece: tl.tensor,
    aligned: tl.constexpr,
    columns: tl.constexpr,
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
) -> tl.tuple:
    """Codes of cells ``[pieces, columns]``, rows and units of the pieces, and which of them there are.

    Args:
        plane: int64, the plane's words; words 6 and 7 say where its factors or the plane of its scales are.
        pages: int32, page ids.
        first_row: counted from the first of those page ids.
        rows: of the entry.
        first_unit: counted within the plane.
        units: of the entry.
        piece: int32 ``[pieces]``, numbers of the entry's cells; those beyond its end are no pieces.
        aligned: twice the elements that addresses, strides and cells are multiples of, on both sides; 1: not even of
            one, so bytes are read and written one by one.
        columns: elements of a cell, rounded up to a power of two.
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
    col = tl.arange(0, columns)
    there = piece < rows * units
    row = piece // units
    own = piece - row * units
    unit = first_unit + own
    cell = cells_of(plane, pages, row + first_row, unit, there)
    mask = there[:, None] & (col < elements)[None, :]
    f = float32_of(loaded(cell, col, mask, source_bytes, aligned), source)
    if rule == "given":
        # One factor for all units, or one for each.
        place = plane + tl.load(plane + 6) + unit * tl.load(plane + 7)
        factor = tl.load(place, mask=there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        f = f * factor[:, None]
    elif rule == "read":
        scale = cells_of(plane + tl.load(plane + 6), pages, row + first_row, unit, there)
        factors = loaded(scale, tl.arange(0, 1), there[:, None], 4, min(aligned, 2))
        f = f * factors.to(tl.float32, bitcast=True)
    else:
        factor = scales_of(f, mask, largest)
        if rule == "computed":
            f = f * tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)[:, None]
    if rule == "scales":
        code = factor.to(tl.int32, bitcast=True)[:, None]
    else:
        code = code_of(f, nbytes, mantissa, bias, largest, infinity, nan)
    return code, row, own, there


@triton.jit
def put(
    cell: tl.tensor,
    code: tl.tensor,
    there: tl.tensor,
    aligned: tl.constexpr,
    columns: tl.constexpr,
    rule: tl.constexpr,
    elements: tl.constexpr,
    nbytes: tl.constexpr,
) -> None:
    """Store converted cells at addresses; of the rule ``"scales"`` a cell is one float32."""
    if rule == "scales":
        stored(cell, tl.arange(0, 1), code, there[:, None], 4, min(aligned, 2))
    else:
        col = tl.arange(0, columns)
        mask = there[:, None] & (col < elements)[None, :]
        stored(cell, col, code, mask, nbytes, aligned)


@triton.jit
def of_entry(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
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
) -> tl.tuple:
    """What :func:`converted` gives for this program's tile of ``pieces`` cells, and the address of its entry.

    Each entry of the call's table has ``tiles`` programs; ``planes`` is the pool's table.
    """
    number = tl.program_id(0)
    entry = entries + (number // tiles).to(tl.int64) * 8
    plane = planes + tl.load(entry) * 8
    first_unit, units = tl.load(entry + 1), tl.load(entry + 2).to(tl.int32)
    first_row, rows = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    pages = tl.load(entry + 5).to(tl.pointer_type(tl.int32))
    piece = number % tiles * pieces + tl.arange(0, pieces)
    code, row, unit, there = converted(
        plane, pages, first_row, rows, first_unit, units, piece, aligned, columns, source, source_bytes, rule,
        elements, nbytes, mantissa, bias, largest, infinity, nan,
    )  # fmt: skip
    return code, row, unit, there, entry


@triton.jit(do_not_specialize=["tiles"])
def gather_converted(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
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
    """Convert one tile of pages into staging; word 6 of an entry is its address there."""
    code, row, unit, there, entry = of_entry(
        planes, entries, tiles, aligned, pieces, columns, source, source_bytes, rule, elements,
        nbytes, mantissa, bias, largest, infinity, nan,
    )  # fmt: skip
    size: tl.constexpr = 4 if rule == "scales" else elements * nbytes
    cell = row.to(tl.int64) * tl.load(entry + 2) + unit
    put(tl.load(entry + 6) + cell * size, code, there, aligned, columns, rule, elements, nbytes)


@triton.jit(do_not_specialize=["tiles", "total"])
def copy_converted(
    entries: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
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
    """Convert tiles of pages into pages; the table is that of :func:`..copy.triton.copy`."""
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + number // tiles * 10
        units, rows = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
        plane = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
        first_unit, first_row = tl.load(entry + 3), tl.load(entry + 4).to(tl.int32)
        pages = tl.load(entry + 5).to(tl.pointer_type(tl.int32))
        piece = number % tiles * pieces + tl.arange(0, pieces)
        code, row, unit, there = converted(
            plane, pages, first_row, rows, first_unit, units, piece, aligned, columns, source, source_bytes, rule,
            elements, nbytes, mantissa, bias, largest, infinity, nan,
        )  # fmt: skip
        cell = side(entry + 6, row, unit, there)
        put(cell, code, there, aligned, columns, rule, elements, nbytes)


@triton.jit(do_not_specialize=["tiles"])
def checksum_converted(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
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
    """Add converted cells to the entry's sum, whose address is word 6; word 7 is the place of the first cell."""
    code, row, unit, there, entry = of_entry(
        planes, entries, tiles, aligned, pieces, columns, source, source_bytes, rule, elements,
        nbytes, mantissa, bias, largest, infinity, nan,
    )  # fmt: skip
    into = tl.load(entry + 6).to(tl.pointer_type(tl.uint64))
    place = tl.load(entry + 7).to(tl.uint64) + row.to(tl.uint64) * ROW + unit.to(tl.uint64) * UNIT
    if rule == "scales":
        place += tl.sum(weighed(code, tl.arange(0, 1), 4), axis=1)
    else:
        col = tl.arange(0, columns)
        words = tl.where(there[:, None] & (col < elements)[None, :], code, 0)
        place += tl.sum(weighed(words, col, nbytes), axis=1)
    tl.atomic_add(into, tl.sum(tl.where(there, mix(place), 0)), sem="relaxed")
