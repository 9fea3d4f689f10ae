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
    each = member.config.kv_heads // member.tp
    owners = (divmod(0, each), divmod(1, each))
    rows = np.arange(start, stop)
    size = pool.site.groups[0].rows_per_page
    where = (table.pages[rows // size], rows % size)
    for number in range(len(pool.site.planes)):
        view = pool.view(number)
        heads = [_head(member, view, where, owner, local) for owner, local in owners]
        for (owner, local), other in zip(owners, reversed(heads), strict=True):
            if owner == member.tp_rank:
                view[(*where, local)] = other.numpy()


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
