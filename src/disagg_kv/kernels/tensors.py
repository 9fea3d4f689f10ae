"""Raw memory as torch tensors, without a copy: on the CPU and on GPUs alike."""

from __future__ import annotations

import torch

from ..memory import Buffer, PagedMemory, bytes_of


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
    group = pool.site.group(plane.group)
    units = sum(len(held) for held in pool.site.shard.units(plane.layer, plane.component))
    unit_bytes = pool.site.spec.component(plane.layer, plane.component).unit_bytes
    return tensor_of(pool.buffers[plane.buffer]).as_strided(
        (group.pages, pool.site.page_rows(plane), units, unit_bytes),
        (plane.page_stride, plane.row_stride, plane.unit_stride, 1),
        plane.offset,
    )
