"""A decode rank: takes the caches in, then generates from them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from attrs import define
from torch.distributed.distributed_c10d import Store
from transformers.cache_utils import Cache

from ....endpoints import Expectation, PrefillEndpoint
from ....geometry import PageTable
from ....prefix import HashPrefixIndex, PrefixCache, PrefixLease, namespace_of
from ....strategies import Incremental, strategy
from .. import PageAllocator, PagedHFCache
from ..events import computed
from . import wire
from .expected import ExpectedRows, key_values
from .lifetime import now
from .member import Member
from .model import Conversations
from .pool import dump, heads, laid_out, shuffled
from .results import DecodeResult, Moved
from .stage import Stage


@define
class _Conversation:
    """One conversation.

    Args:
        lease: its pages in this turn, if prefixes are cached.
        table: its pages in this turn.
        answers: tokens generated so far.
    """

    lease: PrefixLease | None = None
    table: PageTable | None = None
    answers: tuple[int, ...] = ()


class _Rank:
    """The work of a decode rank in each turn."""

    def __init__(self, member: Member, store: Store, of: wire.Ends) -> None:
        self.config = member.config
        assert of.receiver is not None
        self._receiver = of.receiver
        self._pool = pool = of.pool
        self.paged = PagedHFCache(pool, dtype="float32")
        free = PageAllocator(shuffled(self.paged.group.pages, self.config.seed + 1))
        group = self.paged.group
        index = HashPrefixIndex(group.rows_per_page, group.pages, namespace_of(pool.site.spec))
        self.free = free
        # A window's rows are sent afresh every time; such models have one turn.
        self.cache = None if pool.site.spec.slides() else PrefixCache(index, free, pool.site)
        self.conversations = Conversations(self.config)
        self.each = [_Conversation() for _ in range(self.config.requests)]
        self.expected = ExpectedRows(member, heads(pool)) if self.config.turns > 1 else None
        self.rooms: list[Moved] = []
        self.returned: list[Moved] = []
        self.held: list[int] = []
        self.used: set[int] = set()
        places = PageAllocator(shuffled(self.config.requests + 1, self.config.seed + 2))
        states = self.paged.state_group
        self.slots = [] if states is None else [PageTable(states.id, places.take(1)) for _ in self.each]
        self._member = member
        self._store = store
        self._keeps = isinstance(strategy(self.config.selected).selection, Incremental)

    def give_back(self, turn: int, sender: PrefillEndpoint) -> None:
        """Send the next prefill rank what it lacks of each conversation; of one that was evicted, say so."""
        assert self.cache is not None
        assert self.expected is not None
        index, locks, deliveries = self.cache.index, [], []
        if self.config.evict == turn:
            self.free.give(index.evict(index.evictable))
        wanted = self.config.kept(turn)
        for request, (prompt, rows) in enumerate(zip(self.conversations.prompts, wanted, strict=True)):
            locks.append(index.match(prompt))
            deliveries.append(sender.open(wire.room(request, turn, back=True)))
            there = self._agreed(f"back {request} {turn}", locks[-1].rows)
            if there < rows:
                deliveries[-1].abort(f"{there} of {rows} rows are left, the others were evicted")
                continue
            self.expected.publish(request)
            if rows:
                deliveries[-1].send_chunk(rows, [PageTable(self.paged.group.id, locks[-1].pages)])
            deliveries[-1].finish(rows)
        for _ in wire.ended(sender.poll, deliveries):
            pass
        for lock in locks:
            index.unlock(lock)
        self.returned += map(wire.moved, deliveries)

    def receive(self, turn: int) -> None:
        """Await the rows of every prompt that this rank does not hold."""
        receptions = []
        for request, (conversation, prompt) in enumerate(zip(self.each, self.conversations.prompts, strict=True)):
            table, held = self._begin(conversation, prompt, f"{request} {turn}")
            receptions.append(self._receiver.open(wire.room(request, turn), wire.source(self.config, turn)))
            state = self.slots[request : request + 1]
            receptions[-1].expect(Expectation(len(prompt), [table], held={table.group: held}, state=state, aux=request))
            self.held.append(held)
        self.rooms += wire.released(self._receiver.poll, receptions, self._member, "arrived")
        for request, (conversation, reception) in enumerate(zip(self.each, receptions, strict=True)):
            assert conversation.lease is None or conversation.lease.settle(reception)
            if self.expected is not None:
                held, stop = self.held[request - self.config.requests], len(self.conversations.prompts[request])
                self.expected.received(request, held, stop, "prefill", self.config.ranks("prefill", turn))

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
                self._keep(conversation.lease, [*prompt, *generated[:-1]], len(prompt), cache)
                if self.expected is not None:
                    self.expected.computed(request, len(prompt), cache)
                if self._member.rank == 0:
                    answer = wire.Answer(tuple(generated), config.kept(turn + 1)[request])
                    wire.publish_answer(self._store, request, turn, answer)
                self.conversations.answered(request, turn, generated)
            self._member.notify("decoded")

    def _keep(self, lease: PrefixLease, tokens: list[int], start: int, cache: Cache) -> None:
        """Write the rows from ``start`` on, which ``cache`` has, into pages that the next turn may hold."""
        table = lease.grow(len(tokens))
        for layer, of in enumerate(cache.layers):
            keys, values = (one[:, :, start:] for one in key_values(of))
            self.paged.write(layer, table, start, keys, values)
        self.used.update(table.pages.tolist())
        lease.end(tokens, computed(self._member.device))


def run(member: Member, store: Store) -> None:
    """For each turn: await every prompt's cache, then generate."""
    config = member.config
    stage = Stage(member, store)
    with wire.ends(member, store) as of:
        rank = _Rank(member, store, of)
        member.notify("ready")
        ready = arrived = now()
        for turn in range(config.turns):
            if turn and of.sender is not None:
                rank.give_back(turn, of.sender)
            rank.receive(turn)
            arrived = now()
            rank.generate(stage, turn)
        ended = now()
        member.save("pool", dump(of.pool))
        if rank.expected is not None:
            rank.expected.publish_all()
        tables = [conversation.table for conversation in rank.each if conversation.table is not None]
        layout = laid_out(of.pool, tables, rank.slots, sorted(rank.used), expected=rank.expected is not None)
        tokens = tuple(conversation.answers for conversation in rank.each)
        rooms, returned, held = tuple(rank.rooms), tuple(rank.returned), tuple(rank.held)
        member.leave(
            DecodeResult(os.getpid(), heads(of.pool), ready, arrived, ended, tokens, rooms, returned, held, layout)
        )
