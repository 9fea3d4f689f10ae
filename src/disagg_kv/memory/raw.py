"""Bytes at an address as NumPy arrays, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import RegistrationError
from ..geometry import Site
from .base import Buffer

U8 = npt.NDArray[np.uint8]


class _Exported:
    """Memory described by NumPy's array interface; arrays made from it keep the buffer's owner alive."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.__array_interface__ = {
            "version": 3,
            "data": (buffer.addr, False),
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
        }


def bytes_of(buffer: Buffer) -> U8:
    """The memory of ``buffer`` as ``[nbytes]``, writable; a :class:`RegistrationError` if it is not on the CPU."""
    if buffer.device != "cpu":
        raise RegistrationError(f"the CPU cannot read the {buffer.nbytes} bytes of a buffer on {buffer.device!r}")
    return np.asarray(_Exported(buffer))


def plane_view(site: Site, buffers: Sequence[Buffer], plane: int) -> U8:
    """All cells of one plane as ``[pages, rows of a page, units, unit_bytes]`` uint8, strided over the memory."""
    where = site.planes[plane]
    group = site.group(where.group)
    units = sum(len(held) for held in site.shard.units(where.layer, where.component))
    return np.ndarray(
        (group.pages, site.page_rows(where), units, site.stored_bytes[plane]),
        np.uint8,
        bytes_of(buffers[where.buffer]),
        where.offset,
        (where.page_stride, where.row_stride, where.unit_stride, 1),
    )
