"""The negative control: what a check that never fails would not notice."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from ....geometry import PageTable
from ....memory import PagedPool
from .member import Member


def swap_heads(member: Member, pool: PagedPool, table: PageTable, start: int, stop: int) -> None:
    """Exchange the KV heads 0 and 1 in the pages of the rows ``[start, stop)``, in every layer, K and V.

    Every rank of the group must call it. Heads of two ranks cross by broadcast; the model's own cache is left as it
    is, so that only what is sent is wrong.
    """
    each = member.config.kv_heads // member.world
    owners = (divmod(0, each), divmod(1, each))
    rows = np.arange(start, stop)
    size = pool.site.groups[0].rows_per_page
    where = (table.pages[rows // size], rows % size)
    for number in range(len(pool.site.planes)):
        view = pool.view(number)
        heads = [_head(member, view, where, owner, local) for owner, local in owners]
        for (owner, local), other in zip(owners, reversed(heads), strict=True):
            if owner == member.rank:
                view[(*where, local)] = other.numpy()


def _head(
    member: Member, view: np.ndarray, where: tuple[np.ndarray, np.ndarray], owner: int, local: int
) -> torch.Tensor:
    """One head's rows ``[rows, unit_bytes]`` of rank ``owner``, on every rank."""
    mine = view[(*where, local if owner == member.rank else 0)]
    head = torch.from_numpy(np.ascontiguousarray(mine))
    if member.world > 1:
        dist.broadcast(head, owner)
    return head
