"""What scatter is: for every entry, assignment to the plane ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...memory import Buffer, MemoryPool, bytes_of, plane_view
from ..base import Move


def scatter(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy ``staging`` into the cells that ``moves`` name; any strides."""
    staged = torch.from_numpy(bytes_of(staging))
    for move in moves:
        entries = move.layout
        for i, number in enumerate(entries.plane.tolist()):
            table = move.tables[pool.site.planes[number].group]
            plane = torch.from_numpy(plane_view(pool.site, pool.buffers, number))
            row = torch.arange(int(entries.row_start[i]), int(entries.row_stop[i])) - table.first
            page = torch.from_numpy(table.pages)[row // plane.shape[1]].long()
            first = int(entries.first_unit[i])
            shape = (len(row), int(entries.units[i]), plane.shape[3])
            at = move.base + int(entries.offset[i])
            cells = staged[at : at + shape[0] * shape[1] * shape[2]].view(shape)
            plane[page, row % plane.shape[1], first : first + shape[1]] = cells
