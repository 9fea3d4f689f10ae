"""The bytes that a benchmark moves, and the check that they arrived; by plain indexing, without planner or kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..memory import U8, PagedPool
from .shape import Role, TransferShape

POISON = 0xA5
"""What is in a page before anything arrived, and must stay where nothing belongs."""

SPARE = 2
"""Pages of a pool that no request uses."""

Ids = npt.NDArray[np.int32]


def page_ids(shape: TransferShape, role: Role, rank: int) -> Ids:
    """The request's pages on that rank, in no order, as in a pool that has been in use for a while."""
    count = -(-shape.tokens // shape.pages(role)[0])
    drawn = np.random.default_rng([role == "decode", rank]).permutation(count + SPARE)
    return drawn[:count].astype(np.int32)


def fill(pool: PagedPool, shape: TransferShape, pages: Ids) -> None:
    """Write a rank's part of the request into its pages, and poison everywhere else."""
    for view, want in _planes(pool, shape, pages):
        view[...] = want


def poison(pool: PagedPool) -> None:
    """Let nothing of an earlier transfer be taken for one that arrived."""
    for number in range(len(pool.site.planes)):
        pool.view(number)[...] = POISON


def wrong(pool: PagedPool, shape: TransferShape, pages: Ids) -> int:
    """Bytes of the pool that are not what :func:`fill` would have written."""
    return sum(int(np.count_nonzero(view != want)) for view, want in _planes(pool, shape, pages))


def _planes(pool: PagedPool, shape: TransferShape, pages: Ids) -> Iterator[tuple[U8, U8]]:
    """Every plane as it is and as it must be."""
    row = np.arange(shape.tokens)
    size = pool.site.groups[0].rows_per_page
    for number, plane in enumerate(pool.site.planes):
        view = pool.view(number)
        want: U8 = np.full(view.shape, POISON, np.uint8)
        units = [unit for run in pool.site.shard.units(plane.layer, plane.component) for unit in run]
        for place, unit in enumerate(units):
            draw = np.random.default_rng([plane.layer, *plane.component.encode(), unit])
            cells = np.frombuffer(draw.bytes(shape.tokens * view.shape[3]), np.uint8).reshape(shape.tokens, -1)
            want[pages[row // size], row % size, place] = cells
        yield view, want
