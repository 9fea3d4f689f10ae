"""A rank's pages, and the order in which they are handed out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from ....geometry import CacheSpec, Component, PageTable, Shard, stages
from ....ids import LayerId
from ....kernels.tensors import tensor_of
from ....memory import PagedPool
from ....strategies import explain
from ....transports import Transports
from .. import shard_from_config, spec_from_config
from .check import POISON, PlaneFile, PoolFile
from .config import DemoConfig, Role
from .model import model_config

AUX_BYTES = 64
SIDES: tuple[Role, Role] = ("prefill", "decode")


def spec_of(config: DemoConfig, role: Role = "prefill") -> CacheSpec:
    """The model's whole cache, as a role keeps it."""
    dtype = config.kept_dtype
    spec = spec_from_config(model_config(config), dtype, model=f"demo {config.model} {config.seed}".encode())
    return spec if role != "decode" or config.decoded_dtype == dtype else spec.cast(config.decoded_dtype)


def shards_of(config: DemoConfig, role: Role) -> list[Shard]:
    """What each rank of a role holds."""
    spec, of = spec_of(config, role), model_config(config)
    tp, pp = config.grid(role)
    return [
        shard_from_config(of, spec, tp=tp, rank=rank, layers=stage) for stage in stages(spec, pp) for rank in range(tp)
    ]


def make_pool(
    config: DemoConfig, role: Role, rank: int, page_size: int, transports: Transports, device: str
) -> PagedPool:
    """Pages for all requests and a few more, every byte poisoned; peers can write to them if the transport allows.

    In a conversation of several turns there are pages for two copies, one of which may be an earlier turn's.
    """
    pages = min(config.turns, 2) * sum(-(-rows // page_size) for rows in config.lengths(config.turns - 1)) + 4
    pool = PagedPool.allocate(
        spec_of(config, role),
        shards_of(config, role)[rank],
        pages=pages,
        page_size=page_size,
        state_slots=config.requests + 1,
        aux_slots=config.requests,
        aux_bytes=AUX_BYTES,
        allocator=transports.allocator,
        device=device,
    )
    for buffer in pool.buffers:
        tensor_of(buffer).fill_(POISON)
    if device != "cpu":
        torch.cuda.synchronize()
    return pool


def dump(pool: PagedPool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A copy of the pool's memory ``[nbytes]``."""
    (buffer,) = pool.buffers
    copied: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor_of(buffer).cpu().numpy().copy()
    return copied


def laid_out(
    pool: PagedPool,
    tables: Sequence[PageTable],
    slots: Sequence[PageTable] = (),
    used: Sequence[int] = (),
    *,
    expected: bool = False,
) -> PoolFile:
    """The layout of the pages of ``tables`` and of the ``slots`` in a :func:`dump`; see :class:`PoolFile`."""
    site = pool.site
    planes = []
    for plane in site.planes:
        component = site.spec.component(plane.layer, plane.component)
        (units,) = site.shard.units(plane.layer, plane.component)
        strides = (plane.offset, plane.page_stride, plane.row_stride, plane.unit_stride)
        name = name_of(plane.layer, component)
        of = component.rows, component.window, component.dtype
        planes.append(PlaneFile(name, (units.start, units.stop), *of, strides))
    pages, places = ([table.pages.tolist() for table in of] for of in (tables, slots))
    return PoolFile(planes, site.token_groups[0].rows_per_page, pages, places, used, expected)


def name_of(layer: LayerId, component: Component) -> str:
    """The name of one layer's component in the files of the processes."""
    return f"{layer}.{component.name}"


def heads(pool: PagedPool) -> tuple[int, ...]:
    """The KV heads, or the latent, that a pool holds."""
    shard = pool.site.shard
    return tuple(next(holding.units for holding in shard if holding.component in ("k", "latent")))


def descriptors_slice(config: DemoConfig) -> int:
    """Writes of the path with one per token and slice, for what decode lacks of all prompts."""
    prefill, decode = (shards_of(config, role) for role in SIDES)
    sizes = (config.prefill_page_size, config.decode_page_size)
    spec = spec_of(config)
    return sum(
        explain(spec, prefill, decode, rows, sizes).descriptors["slice"]
        for turn in range(config.turns)
        for rows in config.lacking(turn)
    )


def shuffled(pages: int, seed: int) -> list[int]:
    """The page ids in an order as after hours of use."""
    order = list(range(pages))
    random.Random(seed).shuffle(order)
    return order
