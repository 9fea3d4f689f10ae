"""Writes from pages to pages move exactly the elected cells, each byte once, and touch nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.geometry import Share, Site, elect
from disagg_kv.ids import GroupId
from disagg_kv.planning import PairPlan, Segment, Writes, coalesce, direct_writes, slice_writes
from tests.support import oracle
from tests.support.worlds import ORDERS, Order, World, build_site, build_table, worlds

PAGE_ROWS = st.sampled_from([1, 3, 16, 64])
ORDERINGS = st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS))


def _pool(world: World, rank: int, ours: bool, page_rows: int, order: Order, gap: int) -> Site:
    shard = (world.writers if ours else world.targets)[rank]
    return build_site(world.spec, shard, page_rows, 80 // page_rows + 3, order, gap)


def _check(source: Site, target: Site, parts: tuple[Share, ...], segment: Segment, seed: int) -> None:
    here = {GroupId("kv"): build_table(source, segment.start, segment.stop, seed)}
    there = {GroupId("kv"): build_table(target, segment.start, segment.stop, seed + 1)}
    memory, before = oracle.fresh(source, seed), oracle.fresh(target, seed + 2)
    cells = oracle.sent(parts, segment)
    expected = oracle.moved(source, memory, here, target, before, there, cells)

    def holds(writes: Writes) -> None:
        after, times = oracle.posted(writes, memory, before)
        assert oracle.equal(after, expected)
        assert max(times) <= 1
        assert sum(times) == writes.total()
        assert writes.total() == sum(oracle.unit_bytes(source, layer, component) for component, layer, _, _ in cells)

    pair = PairPlan(source, target, parts)
    sliced = slice_writes(pair, segment, here, there)
    holds(sliced)
    merged = coalesce(sliced)
    holds(merged)
    assert len(merged) <= len(sliced)
    if pair.direct_refusal is None:
        direct = direct_writes(pair, segment, here, there)
        holds(direct)
        assert len(direct) <= len(sliced)
        assert {*zip(direct.local_off.tolist(), direct.nbytes.tolist(), strict=True)} == {
            *zip(merged.local_off.tolist(), merged.nbytes.tolist(), strict=True)
        }, "built from pages or merged from slices: the same writes"


@given(worlds(), st.integers(0, 7), st.integers(0, 40), st.integers(1, 30), PAGE_ROWS, PAGE_ROWS, ORDERINGS, st.data())
def test_any_two_pools(
    world: World,
    seed: int,
    start: int,
    rows: int,
    ours: int,
    theirs: int,
    orders: tuple[Order, Order],
    data: st.DataObject,
) -> None:
    """Any TP and PP, page sizes, NHD, HND and fused K/V, K and V of other sizes."""
    number = data.draw(st.integers(0, len(world.targets) - 1))
    parts = elect(world.spec, world.writers, world.targets[number], seed)
    rank = data.draw(st.sampled_from([r for r, mine in enumerate(parts) if mine]))
    first = data.draw(st.integers(0, len(world.spec.layers) - 1))
    segment = Segment(start, start + rows, first, data.draw(st.integers(first + 1, len(world.spec.layers))))
    source = _pool(world, rank, True, ours, orders[0], seed % 3)
    target = _pool(world, number, False, theirs, orders[1], seed % 2)
    _check(source, target, parts[rank], segment, seed)


@given(worlds(), st.integers(0, 7), st.integers(0, 40), st.integers(1, 30), PAGE_ROWS, st.sampled_from(ORDERS))
def test_equal_pools_exchange_runs_of_pages(
    world: World, seed: int, start: int, rows: int, page_rows: int, order: Order
) -> None:
    """Equal layouts are never refused, and their writes move the same bytes."""
    segment = Segment(start, start + rows, 0, len(world.spec.layers))
    for rank, shard in enumerate(world.writers):
        source = _pool(world, rank, True, page_rows, order, seed % 2)
        (parts,) = elect(world.spec, [shard], shard, seed)
        if all(
            len([h for h in shard.holdings if h.component == p.component and layer in h.layers]) == 1
            for p in parts
            for layer in p.layers
        ):
            assert PairPlan(source, source, parts).direct_refusal is None
        _check(source, source, parts, segment, seed)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.booleans(), st.integers(1, 3)), max_size=30))
def test_coalesced_writes_are_the_same_bytes_and_as_few_as_can_be(pieces: list[tuple[int, int, bool, int]]) -> None:
    """No two writes that are left follow one another on both sides."""
    rows: list[tuple[int, int, int, int, int]] = []
    at, to = 0, 5
    for local, remote, jump, nbytes in pieces:
        at, to = at + (7 if jump else 0), to + (3 if jump else 0)
        rows.append((local, at, remote, to, nbytes))
        at, to = at + nbytes, to + nbytes
    given_writes = _writes(rows[::-1])
    merged = coalesce(given_writes)
    assert _bytes(merged) == _bytes(given_writes)
    left = list(zip(*(c.tolist() for c in _columns(merged)), strict=True))
    for a, b in itertools.permutations(left, 2):
        assert (a[0], a[1] + a[4], a[2], a[3] + a[4]) != b[:4]


def _writes(rows: list[tuple[int, int, int, int, int]]) -> Writes:
    table = np.array(rows, np.int64).reshape(len(rows), 5)
    return Writes(table[:, 0].astype(np.int32), table[:, 1], table[:, 2].astype(np.int32), table[:, 3], table[:, 4])


def _columns(writes: Writes) -> tuple[npt.NDArray[np.integer[Any]], ...]:
    return writes.local, writes.local_off, writes.remote, writes.remote_off, writes.nbytes


def _bytes(writes: Writes) -> list[tuple[int, int, int, int]]:
    return sorted(
        (local, at + i, remote, to + i)
        for local, at, remote, to, nbytes in zip(*(c.tolist() for c in _columns(writes)), strict=True)
        for i in range(nbytes)
    )
