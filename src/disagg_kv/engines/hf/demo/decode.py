"""A decode rank: takes the caches in, then generates from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache, DynamicLayer

from ....endpoints import DecodeEndpoint, Expectation
from ....geometry import PageTable
from ....memory import PagedPool
from ....prefix import HashPrefixIndex, PrefixCache, PrefixLease, namespace_of
from ....strategies import Incremental, strategy
from .. import PageAllocator, PagedHFCache
from ..events import computed
from . import wire
from .lifetime import now
from .member import Member
from .model import Conversations
from .pool import dump, heads, laid_out, shuffled
from .results import DecodeResult, Moved
from .stage import Stage

Own = npt.NDArray[np.float32]


@define
class _Conversation:
    """One conversation.

    Args:
        lease: its pages in this turn, if prefixes are cached.
        table: its pages in this turn.
        answers: tokens generated so far.
        kept: rows that this rank computed and still holds, with their bytes ``[layers, 2, heads, rows, dim]``.
    """

    lease: PrefixLease | None = None
    table: PageTable | None = None
    answers: tuple[int, ...] = ()
    kept: list[tuple[int, Own]] = field(factory=list)


class _Rank:
    """The work of a decode rank in each turn."""

    def __init__(self, member: Member, store: Store, endpoint: DecodeEndpoint, pool: PagedPool) -> None:
        self.config = member.config
        self.paged = PagedHFCache(pool, dtype="float32")
        free = PageAllocator(shuffled(self.paged.group.pages, self.config.seed + 1))
        group = self.paged.group
        index = HashPrefixIndex(group.rows_per_page, group.pages, namespace_of(pool.site.spec))
        self.free = free
        # A window's rows are sent afresh every time; such models have one turn.
        self.cache = None if pool.site.spec.slides() else PrefixCache(index, free, pool.site)
        self.conversations = Conversations(self.config)
        self.each = [_Conversation() for _ in range(self.config.requests)]
        self.rooms: list[Moved] = []
        self.held: list[int] = []
        self.used: set[int] = set()
        places = PageAllocator(shuffled(self.config.requests + 1, self.config.seed + 2))
        states = self.paged.state_group
        self.slots = [] if states is None else [PageTable(states.id, places.take(1)) for _ in self.each]
        self._member = member
        self._store = store
        self._endpoint = endpoint
        self._pool = pool
        self._keeps = isinstance(strategy(self.config.strategy).selection, Incremental)

    def receive(self, turn: int) -> None:
        """Await the rows of every prompt that this rank does not hold."""
        receptions = []
        for request, (conversation, prompt) in enumerate(zip(self.each, self.conversations.prompts, strict=True)):
            table, held = self._begin(conversation, prompt, f"{request} {turn}")
            receptions.append(self._endpoint.open(wire.room(request, turn), wire.SOURCE))
            state = self.slots[request : request + 1]
            receptions[-1].expect(Expectation(len(prompt), [table], held={table.group: held}, state=state, aux=request))
            self.held.append(held)
            conversation.kept = [
                (start, own[..., : max(held - start, 0), :]) for start, own in conversation.kept if start < held
            ]
        self.rooms += wire.released(self._endpoint.poll, receptions, self._member, "arrived")
        for conversation, reception in zip(self.each, receptions, strict=True):
            assert conversation.lease is None or conversation.lease.settle(reception)

    def _begin(self, conversation: _Conversation, prompt: Sequence[int], name: str) -> tuple[PageTable, int]:
        """Take pages for rows of a prompt that are not held; returns them, and the number of held rows."""
        if self.cache is None:
            pages = self.free.take(-(-len(prompt) // self.paged.group.rows_per_page))
            conversation.table = PageTable(self.paged.group.id, pages)
            return conversation.table, 0
        conversation.lease = lease = self.cache.lease(prompt)
        table = lease.begin(self._agreed(name, lease.rows if self._keeps else 0))
        conversation.table = lease.table
        return table, lease.rows

    def _agreed(self, question: str, rows: int) -> int:
        """The rows that all ranks of the group hold: each says how many it does, and waits for the others."""
        self._store.set(f"held {question} {self._member.rank}", str(rows))
        return min(int(self._store.get(f"held {question} {rank}")) for rank in range(self._member.world))

    def generate(self, stage: Stage, turn: int) -> None:
        """Answer every prompt; unless it was the last turn, the answers' rows stay in the pages too."""
        config = self.config
        for request, (conversation, prompt) in enumerate(zip(self.each, list(self.conversations.prompts), strict=True)):
            assert conversation.table is not None
            generated = [int.from_bytes(self._pool.read_aux(request)[:4], "little")]
            cache = self.paged.load(conversation.table, len(prompt), self.slots[request] if self.slots else None)
            while len(generated) < config.max_new_tokens:
                name = f"decode {request} {turn} {len(generated)}"
                generated.append(stage.learn(name, stage.forward(name, generated[-1:], cache)))
            conversation.answers += tuple(generated)
            if turn < config.turns - 1:
                assert conversation.lease is not None
                self._keep(conversation, conversation.lease, [*prompt, *generated[:-1]], len(prompt), cache)
                if self._member.rank == 0:
                    wire.publish_answer(self._store, request, turn, generated)
                self.conversations.answered(request, turn, generated)
            self._member.notify("decoded")

    def _keep(
        self, conversation: _Conversation, lease: PrefixLease, tokens: list[int], start: int, cache: Cache
    ) -> None:
        """Write the rows from ``start`` on, which ``cache`` has, into pages that the next turn may hold."""
        table = lease.grow(len(tokens))
        own = []
        for layer, of in enumerate(cache.layers):
            assert isinstance(of, DynamicLayer)
            assert of.keys is not None
            assert of.values is not None
            keys, values = of.keys[:, :, start:], of.values[:, :, start:]
            self.paged.write(layer, table, start, keys, values)
            own.append(torch.cat((keys, values)))
        conversation.kept.append((start, torch.stack(own).cpu().numpy()))
        self.used.update(table.pages.tolist())
        lease.end(tokens, computed(self._member.device))


def run(member: Member, store: Store) -> None:
    """For each turn: await every prompt's cache, then generate."""
    config = member.config
    stage = Stage(member, store)
    with wire.decode(member, store) as (endpoint, pool):
        rank = _Rank(member, store, endpoint, pool)
        member.notify("ready")
        ready = arrived = now()
        for turn in range(config.turns):
            rank.receive(turn)
            arrived = now()
            rank.generate(stage, turn)
        ended = now()
        member.save("pool", dump(pool))
        for request, conversation in enumerate(rank.each):
            if conversation.kept:
                member.save(f"kept-{request}", np.concatenate([own for _, own in conversation.kept], axis=3))
        tables = [conversation.table for conversation in rank.each if conversation.table is not None]
        kept = [_runs(conversation.kept) for conversation in rank.each]
        layout = laid_out(pool, tables, rank.slots, sorted(rank.used), kept)
        tokens = tuple(conversation.answers for conversation in rank.each)
        rooms, held = tuple(rank.rooms), tuple(rank.held)
        member.leave(DecodeResult(os.getpid(), heads(pool), ready, arrived, ended, tokens, rooms, held, layout))


def _runs(kept: Iterable[tuple[int, Own]]) -> list[tuple[int, int]]:
    return [(start, start + own.shape[3]) for start, own in kept]
