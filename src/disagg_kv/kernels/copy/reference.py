"""The specification of copy: for every entry, the cells of one pool's plane are assigned to those of another's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...planning import StagedLayout
from ..base import PageMove, Pages
from ..tensors import plane_of


def copy(moves: Sequence[PageMove]) -> None:
    """Copy the cells that ``moves`` name; any strides, CPU or GPU."""
    for move in moves:
        for i in range(len(move.copy.source.plane)):
            plane, where = _cells(move.source, move.copy.source, i)
            into, there = _cells(move.target, move.copy.target, i)
            into[there] = plane[where]


def _cells(pages: Pages, layout: StagedLayout, i: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, slice]]:
    """The plane ``[pages, rows per page, units, unit_bytes]`` of an entry, and the index of its cells."""
    number = int(layout.plane[i])
    plane = plane_of(pages.pool, number)
    table = pages.tables[pages.pool.site.planes[number].group]
    row = torch.arange(int(layout.row_start[i]), int(layout.row_stop[i])) - table.first
    page = torch.from_numpy(table.pages)[row // plane.shape[1]].long()
    first = int(layout.first_unit[i])
    units = slice(first, first + int(layout.units[i]))
    return plane, (page.to(plane.device), (row % plane.shape[1]).to(plane.device), units)
