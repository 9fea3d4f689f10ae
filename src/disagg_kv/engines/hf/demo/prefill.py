"""A prefill rank: chunked forward passes, each chunk's pages sent as soon as they are final."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ....geometry import PageTable
from ....memory import PagedPool
from .. import PageAllocator, PagedHFCache
from ..events import computed
from . import wire
from .inject import WrongGather, negate_rows, negate_states
from .lifetime import now
from .member import Member
from .model import Conversations
from .pool import heads, name_of, shuffled
from .results import PrefillResult
from .stage import Stage


def run(member: Member, store: Store) -> None:
    """Prefill every prompt and send its cache, then wait until all pages are released.

    The rows of earlier turns in the pages are sent before the forward pass.
    """
    config = member.config
    stage = Stage(member, store)
    wrong = WrongGather() if config.inject == "swap-heads" else None
    with wire.prefill(member, store, wrong) as (endpoint, pool):
        paged = PagedHFCache(pool, dtype="float32")
        free = PageAllocator(shuffled(paged.group.pages, config.seed))
        slots = PageAllocator(shuffled(config.requests + 1, config.seed))
        member.notify("ready")
        ready = now()
        deliveries = []
        conversations = Conversations(config)
        pages = [free.take(paged.pages_for(rows)) for rows in config.lengths(config.turns - 1)]
        tables = [PageTable(paged.group.id, of) for of in pages]
        group = paged.state_group
        places = [[] if group is None else [PageTable(group.id, slots.take(1))] for _ in tables]
        caches = [paged.recording(table) for table in tables]
        for turn in range(config.turns):
            for request, (table, cache) in enumerate(zip(tables, caches, strict=True)):
                if turn:
                    conversations.answered(request, turn - 1, wire.answer(store, request, turn - 1))
                delivery = endpoint.open(wire.room(request, turn))
                deliveries.append(delivery)
                wire.awaited(delivery)
                prompt = conversations.prompts[request]
                cached = config.lengths(turn - 1)[request] if turn else 0
                if cached:
                    delivery.send_chunk(cached, [table], computed(member.device))
                token: int | None = None
                for start in range(cached, len(prompt), config.chunk_tokens):
                    stop = min(start + config.chunk_tokens, len(prompt))
                    step = endpoint.step({delivery.room: (stop, [table])})
                    # What is made wrong on purpose is made so after the pass: no layer may have left by then.
                    cache.layer_ready = step.layer_ready if config.inject is None else None
                    token = stage.forward(f"prefill {request} {start}", prompt[start:stop], cache)
                    if wrong is not None:
                        wrong.swap_heads(member, pool, table, start, stop)
                    elif config.inject == "negate":
                        negate_rows(pool, table, start, stop)
                    step.close(computed(member.device))
                for slot in places[request]:
                    paged.write_states(cache, slot)
                    if config.inject == "negate":
                        negate_states(pool, slot)
                if token is not None:  # the last stage has it
                    pool.write_aux(request, token.to_bytes(4, "little"))
                delivery.finish(
                    len(prompt),
                    state=places[request],
                    aux=None if token is None else request,
                    ready=computed(member.device),
                )
                member.notify("prefilled")
        for request, cache in enumerate(caches):
            np.savez(member.work / f"own-{request}-{member.rank}.npz", **_own(pool, cache))  # type: ignore[arg-type]
        wire.publish_own(store, member.rank)
        ended = now()
        rooms = wire.released(endpoint.poll, deliveries, member, "released")
        member.leave(PrefillResult(os.getpid(), heads(pool), ready, ended, rooms))


def _own(pool: PagedPool, cache: Cache) -> dict[str, npt.NDArray[np.float32]]:
    """The model's own cache: by component and first unit ``[units, rows, elements]``."""
    site = pool.site
    found: dict[str, npt.NDArray[np.float32]] = {}
    for layer, own in zip(site.shard.layers(), cache.layers, strict=True):
        kept: dict[str, npt.NDArray[np.float32]] = {}
        components = site.spec.layers[layer]
        if isinstance(own, LinearAttentionLayer):
            states = [c for c in components if c.rows]
            conv, recurrent = own.conv_states[0], own.recurrent_states[0]
            assert conv is not None
            assert recurrent is not None
            at = 0
            for c in states[:-1]:
                channels = c.units * c.unit_bytes // conv.element_size()
                block = conv[0, at : at + channels].cpu().numpy()  # [channels, kernel]
                kept[c.name] = block.reshape(c.units, -1, c.rows).transpose(0, 2, 1)
                at += channels
            kept[states[-1].name] = recurrent[0].cpu().numpy()
        if isinstance(own, DynamicLayer):
            names = [c.name for c in components if not c.rows]
            assert own.keys is not None
            assert own.values is not None
            kept |= {name: tensor[0].cpu().numpy() for name, tensor in zip(names, (own.keys, own.values), strict=True)}
        for c in components:
            (units,) = site.shard.units(layer, c.name)
            found[f"{name_of(layer, c)}.{units.start}"] = kept[c.name]
    return found
