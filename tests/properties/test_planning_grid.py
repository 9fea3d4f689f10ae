"""Every small pairing, exhaustively: all three paths leave the same bytes in the target and nothing else anywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from disagg_kv.geometry import CacheSpec, elect, shard
from disagg_kv.ids import GroupId
from disagg_kv.planning import PairPlan, Segment, direct_writes, slice_writes
from tests.support import oracle
from tests.support.worlds import Order, build_site, build_table

SIZES = (1, 2, 4, 8)
PAGES = (1, 16, 64)
ORDERS: tuple[Order, ...] = ("NHD", "HND")
ROWS = Segment(15, 18, 0, 2)
PAIRINGS = list(itertools.product(PAGES, PAGES, ORDERS, ORDERS))


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("decode", SIZES)
@pytest.mark.parametrize("prefill", SIZES)
def test_all_paths_leave_the_same_pool(prefill: int, decode: int, heads: int) -> None:
    """P, D, heads x page sizes on either side x NHD, HND on either side; K and V of other sizes."""
    spec = CacheSpec.kv(2, heads, 1, "int8", v_head_dim=1, v_dtype="float16")
    ours = [shard(spec, tp=prefill, rank=r) for r in range(prefill)]
    for seed, (here_rows, there_rows, here_order, there_order) in enumerate(PAIRINGS):
        target = shard(spec, tp=decode, rank=seed % decode)
        there = build_site(spec, target, there_rows, 24 // there_rows + 2, there_order, seed % 2)
        tables = {GroupId("kv"): build_table(there, ROWS.start, ROWS.stop, seed)}
        before = oracle.fresh(there, seed)
        expected, staged, sliced, direct = before, before, before, before
        refused = False
        for rank, parts in enumerate(elect(spec, ours, target, seed)):
            here = build_site(spec, ours[rank], here_rows, 24 // here_rows + 2, here_order)
            memory = oracle.fresh(here, 100 + rank)
            from_ = {GroupId("kv"): build_table(here, ROWS.start, ROWS.stop, seed + rank)}
            expected = oracle.moved(here, memory, from_, there, expected, tables, oracle.sent(parts, ROWS))
            pair = PairPlan(here, there, parts)
            sliced, _ = oracle.posted(slice_writes(pair, ROWS, from_, tables), memory, sliced)
            layouts = [view.layout(ROWS) for view in (pair.source_view, pair.target_view)]
            part = np.frombuffer(oracle.staged_bytes(here, memory, from_, layouts[0]), np.uint8)
            staged = [buffer.copy() for buffer in staged]
            for cell, offset, nbytes in oracle.laid_out(there, layouts[1]):
                buffer, at = oracle.where(there, tables, cell)
                staged[buffer][at : at + nbytes] = part[offset : offset + nbytes]
            if pair.direct_refusal is None:
                direct, _ = oracle.posted(direct_writes(pair, ROWS, from_, tables), memory, direct)
            else:
                refused = True
        assert oracle.equal(sliced, expected)
        assert oracle.equal(staged, expected)
        assert refused or oracle.equal(direct, expected)
        alike = (here_rows, here_order) == (there_rows, there_order)
        assert not (refused and alike and min(prefill, heads) == min(decode, heads)), "equal layouts are never refused"
