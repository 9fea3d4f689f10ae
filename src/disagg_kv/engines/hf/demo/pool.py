"""A rank's pages, and the order in which they are handed out."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import numpy as np

from ....geometry import CacheSpec, PageTable, Shard, shard
from ....ids import LayerId
from ....memory import PagedPool
from ....transports import SupportsAllocate, Transport
from .. import spec_from_config
from .check import POISON, PoolFile
from .config import DemoConfig
from .model import llama_config

AUX_BYTES = 64


def spec_of(config: DemoConfig) -> CacheSpec:
    """The model's whole cache."""
    return spec_from_config(llama_config(config), "float32", model=f"demo seed {config.seed}".encode())


def shards_of(config: DemoConfig, tp: int) -> list[Shard]:
    """What each of ``tp`` ranks holds."""
    spec = spec_of(config)
    return [shard(spec, tp=tp, rank=rank) for rank in range(tp)]


def make_pool(config: DemoConfig, tp: int, rank: int, page_size: int, transport: Transport) -> PagedPool:
    """Pages for all requests and a few more, every byte poisoned; peers can write to them where that is possible.

    In a conversation of several turns there are pages for two copies, one of which may be an earlier turn's.
    """
    pages = min(config.turns, 2) * sum(-(-rows // page_size) for rows in config.lengths(config.turns - 1)) + 4
    pool = PagedPool.allocate(
        spec_of(config),
        shards_of(config, tp)[rank],
        pages=pages,
        page_size=page_size,
        aux_slots=config.requests,
        aux_bytes=AUX_BYTES,
        allocator=transport.allocate if isinstance(transport, SupportsAllocate) else None,
    )
    for buffer in pool.buffers:
        ctypes.memset(buffer.addr, POISON, buffer.nbytes)
    return pool


def dump(pool: PagedPool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A copy of the memory itself ``[nbytes]``."""
    (buffer,) = pool.buffers
    return np.frombuffer(ctypes.string_at(buffer.addr, buffer.nbytes), np.uint8)


def laid_out(
    pool: PagedPool,
    tables: Sequence[PageTable],
    used: Sequence[int] = (),
    kept: Sequence[Sequence[tuple[int, int]]] = (),
) -> PoolFile:
    """How to read the pages of ``tables`` in what :func:`dump` gives; see :class:`PoolFile`."""
    site = pool.site
    planes = {(p.layer, p.component): (p.offset, p.page_stride, p.row_stride, p.unit_stride) for p in site.planes}
    strides = [[planes[layer, c.name] for c in components] for layer, components in site.spec.layers.items()]
    held = heads(pool)
    pages = [table.pages.tolist() for table in tables]
    return PoolFile((held[0], held[-1] + 1), site.groups[0].rows_per_page, strides, pages, used, kept)


def heads(pool: PagedPool) -> tuple[int, ...]:
    """The KV heads that a pool holds."""
    (run,) = pool.site.shard.units(LayerId(0), "k")
    return tuple(run)


def shuffled(pages: int, seed: int) -> list[int]:
    """The page ids in an order as after hours of use."""
    order = list(range(pages))
    random.Random(seed).shuffle(order)
    return order
