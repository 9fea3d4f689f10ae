"""Raw memory as torch tensors, without a copy: on the CPU and on GPUs alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..geometry import PageTable, Plane
from ..ids import GroupId
from ..memory import Buffer, PagedMemory, bytes_of
from ..planning import StagedLayout
from .convert import reference


class _Exported:
    """Memory described by the CUDA array interface; tensors made from it keep the buffer's owner alive."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (buffer.addr, False),
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
        }


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """The memory of ``buffer`` as uint8 ``[nbytes]``, writable."""
    if buffer.device == "cpu":
        return torch.from_numpy(bytes_of(buffer))
    return torch.as_tensor(_Exported(buffer), device=buffer.device)


def plane_of(pool: PagedMemory, number: int) -> torch.Tensor:
    """All cells of a plane as uint8 ``[pages, rows per page, units, unit_bytes]``, strided over the memory itself."""
    plane = pool.site.planes[number]
    units = sum(len(held) for held in pool.site.shard.units(plane.layer, plane.component))
    shape = pool.site.group(plane.group).pages, pool.site.page_rows(plane), units, pool.site.stored_bytes[number]
    return _strided(pool, plane, shape)


def _strided(pool: PagedMemory, plane: Plane, shape: tuple[int, ...]) -> torch.Tensor:
    strides = plane.page_stride, plane.row_stride, plane.unit_stride, 1
    return tensor_of(pool.buffers[plane.buffer]).as_strided(shape, strides, plane.offset)


def cells_of(
    pool: PagedMemory, layout: StagedLayout, tables: Mapping[GroupId, PageTable], i: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, slice]]:
    """The plane of an entry of a layout, as :func:`plane_of`, and the index of the entry's cells."""
    number = int(layout.plane[i])
    plane = plane_of(pool, number)
    table = tables[pool.site.planes[number].group]
    row = torch.arange(int(layout.row_start[i]), int(layout.row_stop[i])) - table.first
    page = torch.from_numpy(table.pages)[row // plane.shape[1]].long()
    first = int(layout.first_unit[i])
    units = slice(first, first + int(layout.units[i]))
    return plane, (page.to(plane.device), (row % plane.shape[1]).to(plane.device), units)


def read_cells(pool: PagedMemory, layout: StagedLayout, tables: Mapping[GroupId, PageTable], i: int) -> torch.Tensor:
    """The cells of an entry, uint8 ``[rows, units, unit_bytes]``, converted where the pool is read as another cache."""
    plane, where = cells_of(pool, layout, tables, i)
    site, number = pool.site, int(layout.plane[i])
    how = site.conversions[number] if site.conversions else None
    if how is None:
        return plane[where]
    scales = None if how.scales is None else _strided(pool, how.scales, (*plane.shape[:3], 4))[where]
    return reference.convert_cells(plane[where], how, where[2].start, scales)
