"""A prefill rank: chunked forward passes, each chunk's pages sent as soon as they are final."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache, DynamicLayer

from ....geometry import PageTable
from .. import PageAllocator, PagedHFCache
from . import wire
from .inject import swap_heads
from .lifetime import now
from .member import Member
from .model import Talks, forward, load_model
from .pool import heads, shuffled
from .results import PrefillResult


def run(member: Member, store: Store) -> None:
    """Prefill every prompt and send its cache, then wait until nobody reads the pages any more.

    What earlier turns left in the pages is offered before the forward pass.
    """
    config = member.config
    model = load_model(member.model, member.world)
    with wire.prefill(member, store) as (endpoint, pool):
        paged = PagedHFCache(pool)
        free = PageAllocator(shuffled(paged.group.pages, config.seed))
        member.tell("ready")
        ready = now()
        deliveries = []
        talks = Talks(config)
        pages = [free.take(paged.pages_for(rows)) for rows in config.lengths(config.turns - 1)]
        tables = [PageTable(paged.group.id, of) for of in pages]
        caches = [paged.recording(table) for table in tables]
        for turn in range(config.turns):
            for request, (table, cache) in enumerate(zip(tables, caches, strict=True)):
                if turn:
                    talks.answered(request, turn - 1, wire.answer(store, request, turn - 1))
                delivery = endpoint.open(wire.room(request, turn))
                deliveries.append(delivery)
                prompt = talks.prompts[request]
                cached = config.lengths(turn - 1)[request] if turn else 0
                if cached:
                    delivery.send_chunk(cached, [table])
                token = 0
                for start in range(cached, len(prompt), config.chunk_tokens):
                    stop = min(start + config.chunk_tokens, len(prompt))
                    step = endpoint.step({delivery.room: (stop, [table])})
                    token = forward(model, prompt[start:stop], cache)
                    if config.inject == "swap-heads":
                        swap_heads(member, pool, table, start, stop)
                    step.close()
                pool.write_aux(request, token.to_bytes(4, "little"))
                delivery.finish(len(prompt), aux=request)
                member.tell("prefilled")
        for request, cache in enumerate(caches):
            member.save(f"own-{request}", _own(cache))
        ended = now()
        rooms = wire.released(endpoint.poll, deliveries, member, "released")
        member.leave(PrefillResult(os.getpid(), heads(pool), ready, ended, rooms))


def _own(cache: Cache) -> npt.NDArray[np.float32]:
    """What the model itself keeps ``[layers, 2, heads, rows, dim]``."""
    layers: list[torch.Tensor] = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        layers.append(torch.cat((layer.keys, layer.values)))
    own: npt.NDArray[np.float32] = torch.stack(layers).numpy()
    return own
