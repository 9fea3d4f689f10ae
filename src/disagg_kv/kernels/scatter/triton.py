"""Scatter on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_tiles import tile


@triton.jit(do_not_specialize=["tiles"])
def scatter(
    planes: tl.tensor,
    entries: tl.tensor,
    tiles: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
    pieces: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Copy one tile of staging into pages."""
    cells, places, there = tile(planes, entries, tiles, element, aligned, pieces, columns)
    tl.store(cells, tl.load(places, mask=there), mask=there)
