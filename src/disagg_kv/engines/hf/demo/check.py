"""The comparison of the received bytes with those of their origin, with files, NumPy and the specified conversion only.

Pages are read from a copy of a rank's memory, by the formula in ``Plane``'s docstring. The expected bytes come from the
caches of the prefill ranks' own models; in conversations of several turns, of the models that computed each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from ....kernels.convert import reference
from .config import Role

POISON = 0xA5
"""What every byte of a pool holds before anything arrives."""


@frozen
class PlaneFile:
    """The layout of one component of one layer in ``pool-<role>-<rank>.npy``.

    Args:
        name: its name in prefill's files.
        units: first unit (head, channel group) and one past the last.
        rows: rows of a state; 0: a row per token.
        window: only this number of last tokens had to arrive; None: all.
        dtype: of its elements; prefill's files have float32.
        strides: offset, bytes from page to page, from row to row, from unit to unit.
    """

    name: str
    units: tuple[int, int]
    rows: int
    window: int | None
    dtype: str
    strides: tuple[int, int, int, int]


@frozen
class PoolFile:
    """The layout of ``pool-<role>-<rank>.npy``.

    Args:
        planes: its planes.
        page_size: tokens of a page.
        tables: the pages of every request.
        slots: the slot of every request, if there are states.
        used: pages that had rows of earlier turns; bytes in them beside the rows of ``tables`` do not matter.
        expected: the rows of each request are those of ``rows-<role>-<request>-<rank>.npy`` ``[layers, 2, heads, rows,
            dim]``, and not of prefill's own caches: for pools with K and V in every layer.
    """

    planes: Sequence[PlaneFile]
    page_size: int
    tables: Sequence[Sequence[int]]
    slots: Sequence[Sequence[int]] = ()
    used: Sequence[int] = ()
    expected: bool = False


@frozen
class Checked:
    """The result of the comparison.

    Args:
        nbytes: bytes that had to be there, over all ranks of a role.
        wrong: number of them that differ from their origin's.
        stray: other bytes that changed.
    """

    nbytes: int
    wrong: int
    stray: int


def check(work: Path, role: Role, tokens: Sequence[int], prefills: int, pools: Sequence[PoolFile]) -> Checked:
    """Compare each rank's memory in ``pool-<role>-<rank>.npy`` with what prefill left in ``own-<request>-<rank>.npz``.

    Or with the expected rows; see :class:`PoolFile`.

    Args:
        work: the folder.
        role: of the ranks.
        tokens: of each request.
        prefills: how many prefill ranks there are.
        pools: one per rank.
    """
    nbytes = wrong = stray = 0
    memories = [np.load(work / f"pool-{role}-{rank}.npy") for rank in range(len(pools))]
    expected = [np.zeros(memory.shape, bool) for memory in memories]
    for request, count in enumerate(tokens):
        own = {} if pools[0].expected else own_cache(work, request, prefills)
        for rank, (pool, memory, seen) in enumerate(zip(pools, memories, expected, strict=True)):
            told = np.load(work / f"rows-{role}-{request}-{rank}.npy") if pool.expected else None
            for number, plane in enumerate(pool.planes):
                if told is None:
                    rows = np.stack([own[plane.name, unit] for unit in range(*plane.units)], axis=1)
                else:
                    rows = np.ascontiguousarray(told[divmod(number, 2)].swapaxes(0, 1))
                cells = rows.view(np.uint8) if plane.dtype == "float32" else _converted(rows, plane.dtype)
                first = 0 if plane.rows or pool.expected else count - len(cells)
                pages, size = (pool.slots, plane.rows) if plane.rows else (pool.tables, pool.page_size)
                where = _addresses(plane.strides, size, pages[request], first, cells.shape)
                nbytes += cells.size
                wrong += int(np.count_nonzero(memory[where] != cells))
                seen[where] = True
    for pool, memory, seen in zip(pools, memories, expected, strict=True):
        for plane in pool.planes if pool.used else ():
            shape = (len(pool.used) * pool.page_size, plane.units[1] - plane.units[0], plane.strides[3])
            seen[_addresses(plane.strides, pool.page_size, pool.used, 0, shape)] = True
        stray += int(np.count_nonzero(memory[~seen] != POISON))
    return Checked(nbytes, wrong, stray)


def _converted(rows: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes that the specification of conversions makes of rows."""
    cells: npt.NDArray[np.uint8] = reference.rounded(torch.from_numpy(rows), dtype).numpy()
    return cells


def own_cache(work: Path, request: int, prefills: int) -> dict[tuple[str, int], npt.NDArray[np.float32]]:
    """What prefill's own caches hold of a request: per component and unit ``[rows, elements]``.

    Args:
        work: the folder.
        request: its number.
        prefills: how many prefill ranks there are.
    """
    found: dict[tuple[str, int], npt.NDArray[np.float32]] = {}
    for rank in range(prefills):
        with np.load(work / f"own-{request}-{rank}.npz") as files:
            for key in files:  # <name>.<first unit>: [units, rows, elements]
                name, first = key.rsplit(".", 1)
                for unit, cells in enumerate(files[key], int(first)):
                    found[name, unit] = np.ascontiguousarray(cells)
    return found


def _addresses(
    strides: tuple[int, int, int, int], page_size: int, table: Sequence[int], first: int, shape: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Where each byte of the rows from ``first`` on lies ``[rows, units, bytes]``."""
    offset, page_stride, row_stride, unit_stride = strides
    rows, units, nbytes = (np.arange(n) for n in shape)
    rows = rows + first
    start = offset + np.array(table)[rows // page_size] * page_stride + rows % page_size * row_stride
    return start[:, None, None] + units[None, :, None] * unit_stride + nbytes
