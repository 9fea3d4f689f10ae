"""A plan is as large as its segments, not as its tokens."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np

from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId
from disagg_kv.planning import Limits, PartView, RankPlan, Segment, StagedLayout, plain_site

SPEC = CacheSpec.kv(64, 8, 128, "bfloat16")
WRITERS = [shard(SPEC, tp=8, rank=r) for r in range(8)]
TARGET = shard(SPEC, tp=4, rank=1)

Plan = list[tuple[Segment, StagedLayout]]


def _plan(tokens: int, slot_bytes: int) -> Plan:
    rank_plan = RankPlan.build(SPEC, WRITERS, TARGET)
    view = PartView(plain_site(SPEC, WRITERS[2], tokens, 64), rank_plan.parts[2])
    cut = rank_plan.cut(0, tokens, range(64), Limits(slot_bytes, 1 << 50, 64))
    return [(segment, view.layout(segment)) for segment in cut]


def _held(tokens: int, slot_bytes: int) -> tuple[int, int]:
    """Segments of a plan and the bytes that it keeps alive, with what Python keeps of the objects freed meanwhile.

    A collection empties Python's lists of free objects: one before each plan, and none meanwhile, makes plans alike.
    """
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        plan = _plan(tokens, slot_bytes)
        return len(plan), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


def test_a_plan_grows_with_segments_and_not_with_tokens() -> None:
    """Sixteen times the tokens in as many segments cost the same; twice the segments cost at most twice as much."""
    _held(8192, 4 << 20)
    few, small = _held(8192, 16 << 20)
    same, large = _held(131072, 256 << 20)
    twice, double = _held(131072, 128 << 20)
    assert (few, same, twice) == (17, 17, 33)
    assert abs(large - small) < 2048
    assert small < double < 2.1 * small


def test_page_ids_are_views() -> None:
    """A table keeps the engine's own array, however long."""
    pages = np.arange(2048, dtype=np.int32)
    assert np.shares_memory(PageTable(GroupId("kv"), pages).pages, pages)
