"""Conversations over real endpoints: prefix caches that are too small, ranks that agree, rooms that fail half way."""

from __future__ import annotations

import numpy as np
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.core import Phase
from disagg_kv.endpoints import Expectation
from disagg_kv.geometry import CacheSpec, PageTable
from disagg_kv.ids import RoomId
from disagg_kv.prefix import HashPrefixIndex, PageAllocator, PrefixCache, namespace_of
from disagg_kv.rendezvous import Source
from disagg_kv.strategies import LayerPipelined, Schedule
from disagg_kv.strategies.schedules import PerChunk
from tests.support.rig import KV, Memory, Rig, Truth, put, tp_shards

SPEC = CacheSpec.kv(2, 2, 4, "float16")
PAGE, PAGES, MOST = 4, 24, 60
SYSTEM = 16
"""Rows that all conversations begin with."""


@define
class Conversation:
    """What is said in it, and the bytes that belong to it."""

    tokens: list[int]
    truth: Truth
    rows: int = 0


@define
class Decode:
    """A decode rank's own prefix cache."""

    cache: PrefixCache


def conversations(rig: Rig, count: int) -> list[Conversation]:
    """Equal at the beginning, in tokens and bytes, and different after it."""
    first = rig.truth(MOST)
    made = []
    for number in range(count):
        own = rig.truth(MOST)
        truth = {cell: np.concatenate([first[cell][:SYSTEM], own[cell][SYSTEM:]]) for cell in first}
        made.append(Conversation([*range(SYSTEM), *(1000 * (number + 1) + row for row in range(SYSTEM, MOST))], truth))
    return made


def right(rig: Rig, rank: int, table: PageTable, talk: Conversation) -> bool:
    """Whether the rows of a table in a decode rank's pool are the conversation's, by plain indexing."""
    pool, rows = rig.decodes[rank].pool, np.arange(talk.rows)
    return all(
        np.array_equal(
            pool.view(number)[table.pages[rows // PAGE], rows % PAGE],
            talk.truth[plane.layer, plane.component][rows, rank : rank + 1],
        )
        for number, plane in enumerate(pool.site.planes)
    )


@settings(max_examples=20)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 15), st.sampled_from([None, None, 0, 3, 9])),
        min_size=1,
        max_size=14,
    ),
    forget=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 1), st.integers(1, 20)), max_size=4),
    greedy=st.sets(st.integers(0, 13)),
    schedule=st.sampled_from([PerChunk(), LayerPipelined(fixed=1)]),
)
def test_conversations_whose_prefixes_are_evicted_and_whose_rooms_fail(
    turns: list[tuple[int, int, int | None]], forget: list[tuple[int, int, int]], greedy: set[int], schedule: Schedule
) -> None:
    """Ranks that evict unalike agree; after a failure nothing is held; what is held is always right.

    Each turn adds tokens to a conversation; some rooms are aborted after so many turns of the endpoints; one rank
    alone loses pages now and then; and while some rooms are under way others take, and overwrite, all that can be had.
    """
    rig = Rig(SPEC)
    strategy = f"staged+{schedule.name}+incremental"
    rig.prefill(tp_shards(SPEC, 1), memory=Memory(page_size=3, pages=40), strategy=strategy, schedule=schedule)
    rig.decode(tp_shards(SPEC, 2), memory=Memory(page_size=PAGE, pages=PAGES), strategy=strategy)
    ranks = [
        Decode(
            PrefixCache(
                HashPrefixIndex(PAGE, PAGES, namespace_of(SPEC)),
                PageAllocator(range(PAGES)),
                rig.decodes[rank].pool.site,
            ),
        )
        for rank in range(2)
    ]
    talks = conversations(rig, 4)
    for number, (who, more, abort) in enumerate(turns):
        for at, one, pages in forget:
            if at == number:
                ranks[one].cache.pages.give(ranks[one].cache.index.evict(pages))
        talk = talks[who]
        talk.rows = min(max(talk.rows, SYSTEM) + more, MOST)
        one_turn(rig, ranks, talk, number, abort, number in greedy)
        for decode in ranks:
            decode.cache.index.check_integrity()
            assert decode.cache.index.evictable == len(decode.cache.index)
            assert decode.cache.pages.free + len(decode.cache.index) == PAGES


def overwrite(rig: Rig, ranks: list[Decode]) -> None:
    """Another request takes every page that is free or can be evicted, writes to it, and gives it back."""
    for rank, member in zip(ranks, rig.decodes, strict=True):
        pages = rank.cache.take(rank.cache.pages.free + rank.cache.index.evictable)
        for number in range(len(member.pool.site.planes)):
            member.pool.view(number)[pages] ^= 0xFF
        rank.cache.pages.give(pages)


def one_turn(rig: Rig, ranks: list[Decode], talk: Conversation, number: int, abort: int | None, greedy: bool) -> None:
    """Match, agree, expect, send; then either every byte of the prompt is right on every rank, or nothing was kept."""
    prompt, room = talk.tokens[: talk.rows], RoomId(f"room {number}".encode())
    leases = [rank.cache.lease(prompt) for rank in ranks]
    agreed = min(lease.rows for lease in leases)
    known = [len(rank.cache.index) for rank in ranks]
    tables = [lease.begin(agreed) for lease in leases]
    receives = [m.endpoint.open(room, Source("P")) for m in rig.decodes]
    for receive, lease, table in zip(receives, leases, tables, strict=True):
        receive.expect(Expectation(talk.rows, [table], held={KV: lease.rows}))
    (prefill,) = rig.prefills
    send, pages = prefill.endpoint.open(room), prefill.take(talk.rows)
    for pool in (prefill.pool, prefill.want):
        put(pool, pages, 0, talk.rows, talk.truth)
    step = prefill.endpoint.step({room: (talk.rows, [pages])})
    for layer in prefill.pool.site.shard.layers():
        step.layer_ready(layer)
    step.close()
    send.finish(talk.rows)
    if greedy:
        overwrite(rig, ranks)
        for _ in range(3):
            rig.turn()
        overwrite(rig, ranks)
    if abort is not None:
        for _ in range(abort):
            rig.turn()
        receives[number % 2].abort("at random")
    rig.until(lambda: send.released and all(r.released for r in receives), "the room")
    prefill.give(pages)
    assert len({receive.phase for receive in receives}) == 1
    for number, (lease, receive) in enumerate(zip(leases, receives, strict=True)):
        assert lease.settle(receive)
        if receive.phase is Phase.DONE:
            assert lease.rows == talk.rows // PAGE * PAGE
            assert right(rig, number, lease.table, talk)
            lease.end()
        else:
            assert len(ranks[number].cache.index) <= known[number], "something entered the index after a failure"
