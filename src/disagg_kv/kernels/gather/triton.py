"""Gather on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_tiles import tile


@triton.jit(do_not_specialize=["tiles"])
def gather(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Copy one tile of pages into staging."""
    cells, places, there = tile(planes, entries, tiles, element, aligned, pieces, columns)
    tl.store(places, tl.load(cells, mask=there), mask=there)
