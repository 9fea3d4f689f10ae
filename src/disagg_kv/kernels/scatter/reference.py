"""The specification of scatter: per entry, assignment to the plane ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...memory import Buffer, MemoryPool
from ..base import Move
from ..tensors import plane_of, tensor_of


def scatter(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy ``staging`` into the cells that ``moves`` name; any strides, CPU or GPU."""
    staged = tensor_of(staging)
    for move in moves:
        entries = move.layout
        for i, number in enumerate(entries.plane.tolist()):
            table = move.tables[pool.site.planes[number].group]
            plane = plane_of(pool, number)
            row = torch.arange(int(entries.row_start[i]), int(entries.row_stop[i])) - table.first
            page = torch.from_numpy(table.pages)[row // plane.shape[1]].long()
            slot = row % plane.shape[1]
            first = int(entries.first_unit[i])
            shape = (len(row), int(entries.units[i]), plane.shape[3])
            at = move.base + int(entries.offset[i])
            cells = staged[at : at + shape[0] * shape[1] * shape[2]].view(shape)
            plane[page.to(plane.device), slot.to(plane.device), first : first + shape[1]] = cells
