"""The negative control: errors on purpose, which the comparison must find."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ....geometry import PageTable
from ....kernels import CpuKernels, Move
from ....memory import Buffer, Event, MemoryPool, PagedPool
from .member import Member


class WrongGather(CpuKernels):
    """Gathers from a second pool in which KV heads 0 and 1 have changed places; all else, checksums too, is right."""

    name = "wrong"

    def __init__(self) -> None:
        self._other: PagedPool | None = None

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> None:
        """See :class:`~disagg_kv.kernels.Kernels`."""
        super().gather(pool if self._other is None else self._other, moves, staging, after)

    def swap_heads(self, member: Member, pool: PagedPool, table: PageTable, start: int, stop: int) -> None:
        """Prepare the rows ``[start, stop)``, in every layer, K and V; the pages of ``pool`` stay unchanged.

        Every rank of the group must call it before it reports the rows as final. Heads of two ranks are exchanged by
        broadcast.
        """
        if self._other is None:
            self._other = _like(pool)
        each = member.config.kv_heads // member.tp
        owners = (divmod(0, each), divmod(1, each))
        rows = np.arange(start, stop)
        size = pool.site.groups[0].rows_per_page
        where = (table.pages[rows // size], rows % size)
        for number in range(len(pool.site.planes)):
            right, other = pool.view(number), self._other.view(number)
            other[where] = right[where]
            heads = [_head(member, right, where, owner, local) for owner, local in owners]
            for (owner, local), head in zip(owners, reversed(heads), strict=True):
                if owner == member.tp_rank:
                    other[(*where, local)] = head.numpy()


def _like(pool: PagedPool) -> PagedPool:
    """A pool of the same geometry in memory of its own."""
    site = pool.site
    memories = [np.zeros(nbytes, np.uint8) for nbytes in site.buffers]
    buffers = [Buffer(memory.ctypes.data, memory.nbytes, owner=memory) for memory in memories]
    return PagedPool(site, buffers)


def _head(
    member: Member, view: np.ndarray, where: tuple[np.ndarray, np.ndarray], owner: int, local: int
) -> torch.Tensor:
    """One head's rows ``[rows, unit_bytes]`` of rank ``owner``, on every rank."""
    mine = view[(*where, local if owner == member.tp_rank else 0)]
    head = torch.from_numpy(np.ascontiguousarray(mine))
    if member.tp > 1:
        dist.broadcast(head, owner)
    return head


def negate_rows(pool: PagedPool, table: PageTable, start: int, stop: int) -> None:
    """Turn the sign of the rows ``[start, stop)``: of layers with a window if there are any, else of all.

    Nothing where there are states, which :func:`negate_states` is for. Values, not tokens: attention would not notice
    rows that changed places.
    """
    site = pool.site
    rows = np.arange(start, stop)
    size = site.token_groups[0].rows_per_page
    for number, plane in enumerate(site.planes):
        component = site.spec.component(plane.layer, plane.component)
        if not site.state_groups and (component.window is not None or not site.spec.slides()):
            cells = pool.view(number).view(np.float32)
            where = (table.pages[rows // size], rows % size)
            cells[where] = -cells[where]


def negate_states(pool: PagedPool, slot: PageTable) -> None:
    """Turn the sign of the states in a slot."""
    for number, plane in enumerate(pool.site.planes):
        if plane.group == slot.group:
            cells = pool.view(number).view(np.float32)
            cells[slot.pages] = -cells[slot.pages]
