"""What gather is: for every entry, indexing of the plane ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...memory import Buffer, MemoryPool, bytes_of, plane_view
from ..base import Move


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy the cells that ``moves`` name into ``staging``; any strides."""
    staged = torch.from_numpy(bytes_of(staging))
    for move in moves:
        entries = move.layout
        for i, number in enumerate(entries.plane.tolist()):
            table = move.tables[pool.site.planes[number].group]
            plane = torch.from_numpy(plane_view(pool.site, pool.buffers, number))
            row = torch.arange(int(entries.row_start[i]), int(entries.row_stop[i])) - table.first
            page = torch.from_numpy(table.pages)[row // plane.shape[1]].long()
            first = int(entries.first_unit[i])
            units = slice(first, first + int(entries.units[i]))
            cells = plane[page, row % plane.shape[1], units]
            at = move.base + int(entries.offset[i])
            staged[at : at + cells.numel()] = cells.reshape(-1)
