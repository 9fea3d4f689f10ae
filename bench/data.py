"""The bytes that a benchmark moves, and the check that they arrived; by plain indexing, without planner or kernels."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from disagg_kv.geometry import item_bytes
from disagg_kv.ids import Role
from disagg_kv.kernels.convert.reference import rounded, to_float32
from disagg_kv.kernels.tensors import plane_of, tensor_of
from disagg_kv.memory import Buffer, PagedPool

from .shape import TransferShape

POISON = 0xA5
"""Content of a page before a transfer; it must remain wherever no bytes belong."""

SPARE = 2
"""Pages of a pool that no request uses."""

Ids = npt.NDArray[np.int32]


def page_ids(shape: TransferShape, role: Role, rank: int) -> Ids:
    """The request's pages on that rank, in no order, as in a pool that has been in use for a while."""
    count = -(-shape.tokens // shape.pages(role)[0])
    drawn = np.random.default_rng([role == "decode", rank]).permutation(count + SPARE)
    return drawn[:count].astype(np.int32)


def fill(pool: PagedPool, shape: TransferShape, pages: Ids) -> None:
    """Write a rank's part of the request into its pages, and poison everywhere else."""
    for view, want in _planes(pool, shape, pages):
        view.copy_(want)
    settle(pool)


def poison(pool: PagedPool) -> None:
    """Clear the memory, so that bytes of an earlier transfer are not taken for received ones."""
    for number in range(len(pool.site.planes)):
        plane_of(pool, number).fill_(POISON)
    settle(pool)


def blank(memory: Buffer) -> None:
    """The same for staging memory, while no write reads or writes it."""
    tensor_of(memory).fill_(POISON)
    _synchronize(memory.device)


def wrong(pool: PagedPool, shape: TransferShape, pages: Ids) -> int:
    """Bytes of the pool that are not what :func:`fill` would have written."""
    return sum(int((view != want).sum()) for view, want in _planes(pool, shape, pages))


def settle(pool: PagedPool) -> None:
    """Wait until the GPU has finished its queued work."""
    _synchronize(pool.buffers[0].device)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _planes(pool: PagedPool, shape: TransferShape, pages: Ids) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The actual and the expected bytes of every plane; what is drawn is what prefill has."""
    into = None if pool.site.spec == shape.spec() else shape.decode_dtype
    nbytes = shape.head_dim * item_bytes(shape.dtype)
    device = pool.buffers[0].device
    row = torch.arange(shape.tokens)
    size = pool.site.groups[0].rows_per_page
    page, slot = torch.from_numpy(pages).long()[row // size].to(device), (row % size).to(device)
    for number, plane in enumerate(pool.site.planes):
        view = plane_of(pool, number)
        want = torch.full(view.shape, POISON, dtype=torch.uint8, device=device)
        units = [unit for run in pool.site.shard.units(plane.layer, plane.component) for unit in run]
        for place, unit in enumerate(units):
            seed = zlib.crc32(f"{plane.layer} {plane.component} {unit}".encode())
            draw = torch.Generator(device).manual_seed(seed)
            size_of = (shape.tokens, nbytes)
            cells = torch.randint(256, size_of, dtype=torch.uint8, device=device, generator=draw)
            want[page, slot, place] = cells if into is None else rounded(to_float32(cells, shape.dtype), into)
        yield view, want
