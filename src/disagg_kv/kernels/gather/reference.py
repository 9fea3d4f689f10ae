"""The specification of gather: for every entry, indexing of the plane ``[pages, rows_per_page, units, unit_bytes]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...memory import Buffer, MemoryPool
from ..base import Move
from ..tensors import plane_of, tensor_of


def gather(pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> None:
    """Copy the cells that ``moves`` name into ``staging``; any strides, CPU or GPU."""
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
            cells = plane[page.to(plane.device), slot.to(plane.device), first : first + int(entries.units[i])]
            at = move.base + int(entries.offset[i])
            staged[at : at + cells.numel()] = cells.reshape(-1)
