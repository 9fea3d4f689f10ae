"""Whether the bytes that arrived are the bytes that prefill had: files, NumPy and nothing else.

Decode's pages are read out of a copy of its memory by the formula in ``Plane``'s docstring; what they should hold is
put together from the caches that the prefill ranks' own models kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

POISON = 0xA5
"""What every byte of a decode pool holds before anything arrives."""


@frozen
class PoolFile:
    """How ``pool-<rank>.npy`` is laid out.

    Args:
        heads: first head and one past the last.
        page_size: rows of a page.
        strides: per layer, for K and V: offset, bytes from page to page, from row to row, from head to head.
        tables: the pages of every request.
        used: pages that had rows of earlier turns: what lies in them beside the rows of ``tables`` does not matter.
        kept: for every request, runs of rows that decode computed itself in an earlier turn and holds since. Their
            bytes are in ``kept-<request>-<rank>.npy``, run after run.
    """

    heads: tuple[int, int]
    page_size: int
    strides: Sequence[Sequence[tuple[int, int, int, int]]]
    tables: Sequence[Sequence[int]]
    used: Sequence[int] = ()
    kept: Sequence[Sequence[tuple[int, int]]] = ()


@frozen
class Checked:
    """What the comparison found.

    Args:
        nbytes: bytes that had to be there, over all decode ranks.
        wrong: how many of them are not what prefill had.
        stray: bytes outside of them that are no longer what they were.
    """

    nbytes: int
    wrong: int
    stray: int


def check(work: Path, rows: Sequence[int], prefill_tp: int, pools: Sequence[PoolFile]) -> Checked:
    """Compare every decode rank's memory in ``pool-<rank>.npy`` with what prefill left in ``own-<request>-<rank>.npy``.

    Args:
        work: the folder.
        rows: tokens of each request.
        prefill_tp: prefill ranks; each has the same number of heads, in order.
        pools: one per decode rank.
    """
    nbytes = wrong = stray = 0
    memories = [np.load(work / f"pool-{rank}.npy") for rank in range(len(pools))]
    expected = [np.zeros(memory.shape, bool) for memory in memories]
    for request, count in enumerate(rows):
        parts = [np.load(work / f"own-{request}-{rank}.npy") for rank in range(prefill_tp)]
        whole = np.concatenate(parts, axis=2)  # [layers, 2, heads, rows, dim]
        for rank, (pool, memory, seen) in enumerate(zip(pools, memories, expected, strict=True)):
            own = whole[:, :, pool.heads[0] : pool.heads[1], :count].copy()
            if pool.kept and pool.kept[request]:
                own[:, :, :, _rows(pool.kept[request])] = np.load(work / f"kept-{request}-{rank}.npy")
            for layer in range(own.shape[0]):
                for kind in range(2):
                    should = own[layer, kind].transpose(1, 0, 2)
                    cells = np.ascontiguousarray(should).view(np.uint8)  # [rows, heads, bytes]
                    where = _addresses(pool, pool.strides[layer][kind], pool.tables[request], cells.shape)
                    nbytes += cells.size
                    wrong += int(np.count_nonzero(memory[where] != cells))
                    seen[where] = True
    for pool, memory, seen in zip(pools, memories, expected, strict=True):
        for strides in (of for layer in pool.strides for of in layer) if pool.used else ():
            cells_of = (len(pool.used) * pool.page_size, pool.heads[1] - pool.heads[0], strides[3])
            seen[_addresses(pool, strides, pool.used, cells_of)] = True
        stray += int(np.count_nonzero(memory[~seen] != POISON))
    return Checked(nbytes, wrong, stray)


def _rows(runs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(start, stop) for start, stop in runs])


def _addresses(
    pool: PoolFile, strides: tuple[int, int, int, int], table: Sequence[int], shape: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Where each byte lies ``[rows, heads, bytes]``."""
    offset, page_stride, row_stride, head_stride = strides
    rows, heads, nbytes = (np.arange(n) for n in shape)
    start = offset + np.array(table)[rows // pool.page_size] * page_stride + rows % pool.page_size * row_stride
    return start[:, None, None] + heads[None, :, None] * head_stride + nbytes
