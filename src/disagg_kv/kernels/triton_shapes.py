"""All shapes that calls for a pool can have: what is compiled before the first of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..memory import PagedMemory
from .triton_tables import WIDEST, Cells, Planes, Shape


def shapes(
    planes: Planes,
    pool: PagedMemory,
    tile_bytes: int,
    cells: Cells | None = None,
    other: int | None = None,
    *,
    numbers: Sequence[int] | None = None,
    single: bool = False,
) -> set[Shape]:
    """How calls for some planes are cut, whichever of these, and whichever units, rows and pages they name.

    What they name on the other side matters only where that is aligned worse than the pool is.

    Args:
        planes: of the pool.
        pool: it.
        tile_bytes: what one program moves, a power of two.
        cells: what changes on the way; None: bytes are copied, or summed, as they are.
        other: addresses and strides on the other side, or'ed; None: those of parts in staging.
        numbers: of the planes; None: all.
        single: a piece is one cell, as in checksums.
    """
    site = pool.site
    numbers = range(len(site.planes)) if numbers is None else numbers
    if other is None:
        other = WIDEST
        for plane in site.planes:
            other |= site.spec.component(plane.layer, plane.component).unit_bytes
    base, page_stride, row_stride, unit_stride, rows_per_page, unit_bytes = planes.words[list(numbers)].T[:6]
    first = base | page_stride | np.where(rows_per_page > 1, row_stride, 0)
    worst = int(np.bitwise_or.reduce(first | row_stride | unit_stride))
    if cells is not None:
        least = cells.aligned(worst, other, planes.beside(numbers))
        most = max(cells.aligned(bits, 0, 0) for bits in first.tolist())
        return {cells.shape(one, np.ones(1, np.int64), tile_bytes) for one in _powers(least, most)}
    least = _lowest(worst | other | int(np.bitwise_or.reduce(unit_bytes)) | 16)
    beside = unit_stride == unit_bytes
    bits = (first | np.where(beside, 0, unit_stride) | 16).tolist()
    named = [(site.planes[number].layer, site.planes[number].component) for number in numbers]
    counts = [sum(map(len, site.shard.units(*one))) for one in named]
    most_units = np.where(beside & (not single), counts, 1).tolist()
    return {
        Shape.of_runs(aligned, run, tile_bytes)
        for low, size, units in {*zip(map(_lowest, bits), unit_bytes.tolist(), most_units, strict=True)}
        for run in range(size, units * size + 1, size)
        for aligned in _powers(least, _lowest(low | run))
    }


def _lowest(bits: int) -> int:
    return bits & -bits


def _powers(least: int, most: int) -> list[int]:
    """Powers of two, both ends included."""
    return [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
