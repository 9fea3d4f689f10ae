"""A decode rank: takes the caches in, then generates from them."""

from __future__ import annotations

import os

from torch.distributed.distributed_c10d import Store

from ....geometry import PageTable
from .. import PageAllocator, PagedHFCache
from . import wire
from .lifetime import now
from .member import Member
from .model import forward, load_model
from .pool import dump, heads, laid_out, shuffled
from .results import DecodeResult


def run(member: Member, store: Store) -> None:
    """Expect every prompt's cache and wait for all of them, then generate."""
    config = member.config
    model = load_model(member.model, member.world)
    with wire.decode(member, store) as (endpoint, pool):
        paged = PagedHFCache(pool)
        free = PageAllocator(shuffled(paged.group.pages, config.seed + 1))
        tables = [PageTable(paged.group.id, free.take(paged.pages_for(rows))) for rows in config.prompt_lengths]
        member.tell("ready")
        ready = now()
        receptions = []
        for request, rows in enumerate(config.prompt_lengths):
            receptions.append(endpoint.open(wire.room(request), wire.SOURCE))
            receptions[-1].expect(rows, [tables[request]], aux=request)
        rooms = wire.released(endpoint.poll, receptions, member, "arrived")
        arrived = now()
        tokens = []
        for request, rows in enumerate(config.prompt_lengths):
            generated = [int.from_bytes(pool.read_aux(request)[:4], "little")]
            cache = paged.load(tables[request], rows)
            while len(generated) < config.max_new_tokens:
                generated.append(forward(model, generated[-1:], cache))
            tokens.append(tuple(generated))
            member.tell("decoded")
        ended = now()
        member.save("pool", dump(pool))
        layout = laid_out(pool, tables)
        member.leave(DecodeResult(os.getpid(), heads(pool), ready, arrived, ended, tuple(tokens), rooms, layout))
