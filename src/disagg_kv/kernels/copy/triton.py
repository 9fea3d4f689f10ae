"""Copy on a GPU: from pages into pages, of which either may be mapped memory of a peer.

A *piece* is a run of bytes that is contiguous in both pools. Each program takes every n-th tile, so that a launch of n
programs takes at most n multiprocessors from the kernels of a model, however much it copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_tiles import cells_of


@triton.jit
def side(words: tl.tensor, row: tl.tensor, unit: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Addresses of pieces in one of the two pools: see :data:`..triton_copies.SIDE`."""
    plane = tl.load(words).to(tl.pointer_type(tl.int64))
    pages = tl.load(words + 3).to(tl.pointer_type(tl.int32))
    return cells_of(plane, pages, row + tl.load(words + 2).to(tl.int32), unit + tl.load(words + 1), there)


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
    """Copy tiles of pages into pages.

    Args:
        entries: int64, the call's table: see :mod:`..triton_copies`.
        tiles: tiles of an entry; those beyond its end have an empty mask.
        total: tiles of all entries.
        element: the integer type that is moved.
        aligned: bytes that divide every address, stride and length of every entry; promised to the compiler.
        pieces: pieces of a tile.
        columns: elements of a piece that one tile takes.
    """
    size: tl.constexpr = element.primitive_bitwidth // 8
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + number // tiles * 10
        units, rows = tl.load(entry), tl.load(entry + 1).to(tl.int32)
        plane = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
        other = tl.load(entry + 6).to(tl.pointer_type(tl.int64))
        unit_bytes = tl.load(plane + 5)
        side_by_side = (tl.load(plane + 3) == unit_bytes) & (tl.load(other + 3) == unit_bytes)
        runs = tl.where(side_by_side, 1, units).to(tl.int32)
        run_bytes = tl.where(side_by_side, units, 1) * unit_bytes
        length = tl.multiple_of((run_bytes // size).to(tl.int32), aligned // size)
        chunks = (length + columns - 1) // columns
        within = number % tiles
        piece = within // chunks * pieces + tl.arange(0, pieces)
        col = within % chunks * columns + tl.arange(0, columns)
        there = piece < rows * runs

        row = piece // runs
        unit = piece - row * runs
        source = side(entry + 2, row, unit, there).to(tl.pointer_type(element))
        target = side(entry + 6, row, unit, there).to(tl.pointer_type(element))
        # The promise is made for the last pointers: the compiler forgets it where an integer becomes a pointer.
        read = tl.multiple_of(source[:, None] + col[None, :], (aligned, aligned))
        written = tl.multiple_of(target[:, None] + col[None, :], (aligned, aligned))
        mask = there[:, None] & (col < length)[None, :]
        tl.store(written, tl.load(read, mask=mask), mask=mask)
