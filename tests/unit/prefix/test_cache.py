"""Leases: what one request holds, awaits and leaves behind."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from attrs import define

from disagg_kv.core import Phase
from disagg_kv.endpoints.handle import RoomHandle
from disagg_kv.errors import AbortedError, CapacityError, ConfigurationError, GeometryError, LocalProtocolError
from disagg_kv.geometry import CacheSpec, Component, Group, shard
from disagg_kv.ids import GroupId, LayerId, RoomId
from disagg_kv.planning import plain_site
from disagg_kv.prefix import HashPrefixIndex, PageAllocator, PrefixCache, namespace_of
from tests.support.rig_parts import FiredEvent

SPEC = CacheSpec.kv(1, 1, 4, "float16")
SITE = plain_site(SPEC, shard(SPEC), 32, 4)
TOKENS = list(range(10))


def cache() -> PrefixCache:
    """Eight pages of four rows."""
    return PrefixCache(HashPrefixIndex(4, 8, namespace_of(SPEC)), PageAllocator(range(8)), SITE)


def ended(phase: Phase) -> RoomHandle:
    """A room that is over and whose pages nobody touches."""
    handle = RoomHandle(RoomId(b"r"))
    handle.publish((phase, True), None if phase is Phase.DONE else AbortedError("no"), 1.0)
    return handle


@define
class Counts:
    """Where all pages are."""

    of: PrefixCache

    def __call__(self) -> tuple[int, int]:
        return self.of.pages.free, len(self.of.index)


def test_a_success_leaves_whole_pages_to_the_next_request() -> None:
    """The second request holds what the first one got, and awaits the rest."""
    of = cache()
    first = of.lease(TOKENS)
    table = first.begin()
    assert (first.rows, table.first, len(table.pages)) == (0, 0, 3)
    assert first.settle(ended(Phase.DONE))
    assert first.rows == 8
    first.end()
    assert Counts(of)() == (6, 2)
    second = of.lease([*TOKENS, 10, 11, 12])
    rest = second.begin()
    assert (second.rows, rest.first, len(rest.pages)) == (8, 8, 2)
    assert second.table.pages.tolist() == [*table.pages[:2].tolist(), *rest.pages.tolist()]


def test_a_failure_leaves_nothing() -> None:
    """No half-filled page enters the index, every page is back, and the prefix is free to go."""
    of = cache()
    lease = of.lease(TOKENS)
    lease.begin()
    waiting = RoomHandle(RoomId(b"r"))
    assert not lease.settle(waiting)
    waiting.publish((Phase.FAILED, False), AbortedError("no"), 1.0)
    assert not lease.settle(waiting), "a peer may still write to the pages"
    assert lease.settle(ended(Phase.FAILED))
    assert Counts(of)() == (8, 0)
    with pytest.raises(LocalProtocolError, match="ended"):
        lease.end()
    assert of.lease(TOKENS).rows == 0


def test_generated_rows_are_kept_too() -> None:
    """The next turn of a conversation begins with what decode itself computed."""
    of = cache()
    lease = of.lease(TOKENS)
    lease.begin()
    lease.settle(ended(Phase.DONE))
    assert len(lease.grow(17).pages) == 5
    assert len(lease.grow(12).pages) == 5
    with pytest.raises(GeometryError, match="24 tokens, but 5 pages"):
        lease.end(list(range(24)))
    lease.end(list(range(17)))
    assert Counts(of)() == (4, 4)
    assert of.lease(list(range(20))).rows == 16


def test_pages_that_the_engine_still_writes_go_to_nobody() -> None:
    """A request that ended with an event gives its pages back, and lets them be evicted, once that happened."""
    of = cache()
    first = of.lease(TOKENS)
    first.begin()
    assert first.settle(ended(Phase.DONE))
    first.grow(29)
    written = FiredEvent()
    first.end([*range(17)], written)
    assert Counts(of)() == (0, 4)
    with pytest.raises(CapacityError):
        of.lease([100] * 10).begin()
    written.fired = True
    second = of.lease([100] * 30)
    assert len(second.begin().pages) == 8
    with pytest.raises(LocalProtocolError):
        first.end()


def test_two_requests_with_one_prompt_keep_one_copy() -> None:
    """Of pages that come twice, the later ones go back when their request ends."""
    of = cache()
    a, b = of.lease(TOKENS), of.lease(TOKENS)
    for lease in (a, b):
        lease.begin()
        lease.settle(ended(Phase.DONE))
    assert Counts(of)() == (2, 2)
    for lease in (a, b):
        lease.end()
    assert Counts(of)() == (6, 2)


def test_the_ranks_may_agree_on_less() -> None:
    """What is given up is awaited again, in pages of its own."""
    of = cache()
    first = of.lease(TOKENS)
    first.begin()
    first.settle(ended(Phase.DONE))
    first.end()
    second = of.lease(TOKENS)
    table = second.begin(held=4)
    assert (second.rows, table.first, len(table.pages)) == (4, 4, 2)
    second.settle(ended(Phase.DONE))
    assert second.rows == 8
    second.end()
    assert Counts(of)() == (6, 2)


def test_what_is_held_is_never_evicted_for_others() -> None:
    """Under adversarial eviction: a lease between match and arrival keeps its prefix; others get an error."""
    of = cache()
    first = of.lease(list(range(16)))
    first.begin()
    first.settle(ended(Phase.DONE))
    first.end()
    holder = of.lease(list(range(16)))
    assert holder.rows == 16
    with pytest.raises(CapacityError, match="6 pages requested, 4 are free or can be evicted"):
        of.lease(list(range(100, 124))).begin()
    holder.end()
    evicting = of.lease(list(range(100, 124)))
    assert len(evicting.begin().pages) == 6
    assert len(of.index) == 2
    assert of.lease(list(range(16))).rows == 8


def test_an_index_for_another_model_is_refused() -> None:
    """Bad input: model, page size and groups must be the pool's."""
    other = CacheSpec.kv(1, 1, 4, "float16", model=b"other")
    with pytest.raises(ConfigurationError, match="another model"):
        PrefixCache(HashPrefixIndex(4, 8, namespace_of(other)), PageAllocator(range(8)), SITE)
    with pytest.raises(ConfigurationError, match="2 rows per page, the pool 4"):
        PrefixCache(HashPrefixIndex(2, 8, namespace_of(SPEC)), PageAllocator(range(8)), SITE)
    two = attrs.evolve(SITE, groups=(*SITE.groups, Group(GroupId("other"), 4, 8)))
    with pytest.raises(ConfigurationError, match=r"one group of token pages, not \['kv', 'other'\]"):
        PrefixCache(HashPrefixIndex(4, 8, namespace_of(SPEC)), PageAllocator(range(8)), two)


def test_a_pool_with_windows_is_refused_and_one_with_states_is_not() -> None:
    """A window's rows are written afresh into pages that others may hold; states are no part of a prefix."""
    window = CacheSpec.uniform(1, [Component("k", "float16", 1, 8, window=8)])
    sliding = plain_site(window, shard(window), 32, 4)
    with pytest.raises(ConfigurationError, match="sliding window are written again"):
        PrefixCache(HashPrefixIndex(4, 8, namespace_of(window)), PageAllocator(range(8)), sliding)
    state = Component("ssm", "float16", 1, 6, tokens_per_row=0, rows=1)
    hybrid = CacheSpec({**SPEC.layers, LayerId(1): (state,)})
    site = plain_site(hybrid, shard(hybrid), 32, 4)
    lease = PrefixCache(HashPrefixIndex(4, 8, namespace_of(hybrid)), PageAllocator(range(8)), site).lease(TOKENS)
    assert lease.begin().group == "kv"


def test_calls_out_of_order_are_refused() -> None:
    """Bad input: begin, settle, end."""
    of = cache()
    lease = of.lease(np.arange(4))
    with pytest.raises(LocalProtocolError, match="matched"):
        lease.settle(ended(Phase.DONE))
    with pytest.raises(GeometryError):
        lease.begin(held=1)
    lease.begin()
    for call in (lease.begin, lease.end, lambda: lease.grow(1)):
        with pytest.raises(LocalProtocolError, match="awaited"):
            call()
    assert lease.settle(ended(Phase.DONE))
    lease.end()
    declined = of.lease(np.arange(4))
    declined.end()
    assert of.index.evictable == 1
