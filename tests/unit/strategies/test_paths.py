"""What each path posts, gathers and scatters; bytes are checked where endpoints and grids use them."""

from __future__ import annotations

import numpy as np
import pytest

from disagg_kv.errors import LocalProtocolError
from disagg_kv.geometry import CacheSpec, Component, PageTable, shard
from disagg_kv.ids import GroupId, LayerId, Rank
from disagg_kv.memory import PagedPool
from disagg_kv.planning import PairPlan, RankPlan, RowRange, Segment, Writes
from disagg_kv.planning.descriptors import _pages, _slices
from disagg_kv.strategies import Job, SlicePlanner, TransferPlanner, exposes_pages
from disagg_kv.strategies.paths import DirectPlanner, StagedPlanner

SPEC = CacheSpec.kv(2, 4, 8, "float16")
KV = GroupId("kv")


def job(prefill_tp: int) -> Job:
    """The part of rank 0 of so many, for a decode rank that holds everything."""
    shards = [shard(SPEC, tp=prefill_tp, rank=r) for r in range(prefill_tp)]
    source = PagedPool.allocate(SPEC, shards[0], pages=8, page_size=4).site
    target = PagedPool.allocate(SPEC, shard(SPEC), pages=8, page_size=4).site
    parts = RankPlan.build(SPEC, shards, target.shard).parts[Rank(0)]
    tables = {KV: PageTable(KV, np.array([5, 2, 3], np.int32))}
    return Job(PairPlan(source, target, parts), Segment(0, 10, 0, 2), tables, tables)


@pytest.mark.parametrize("path", [DirectPlanner(), SlicePlanner()])
def test_exposed_pages_are_written_in_place(path: TransferPlanner) -> None:
    """Direct and slice plan writes, at most as many as they count beforehand, and scatter nothing."""
    one = job(1)
    assert exposes_pages(path)
    assert path.refuse(one.pair) is None
    writes = path.send(one)
    assert isinstance(writes, Writes)
    assert writes.total() == 10 * 2 * 2 * 4 * 16
    assert len(writes) <= path.count(one)
    with pytest.raises(LocalProtocolError, match=path.name):
        path.receive(one)


def test_direct_needs_equal_layouts() -> None:
    """A head slice is no whole page: direct says so, slice writes it row by row."""
    two = job(2)
    reason = DirectPlanner().refuse(two.pair)
    assert reason is not None
    assert "2 units" in reason
    assert SlicePlanner().refuse(two.pair) is None
    assert SlicePlanner().count(two) == 10 * 2 * 2


def test_layers_that_are_alike_count_as_each_of_them_does() -> None:
    """K and V of other sizes, layers with other heads, states and a window: the sum over every run, ragged ends too."""
    kv = CacheSpec.kv(3, 4, 8, "float16", v_head_dim=4).layers
    state = Component("state", "int8", 4, 6, tokens_per_row=0, rows=3)
    few = (Component("k", "int8", 2, 16), Component("v", "int8", 2, 16, window=5))
    spec = CacheSpec({**kv, LayerId(3): few, LayerId(4): (*kv[LayerId(0)], state)})
    held = shard(spec)
    pools = (
        PagedPool.allocate(spec, held, pages=8, page_size=4, state_slots=2, layout=layout) for layout in ("NHD", "HND")
    )
    (source, target), rows = (pool.site for pool in pools), RowRange(0, 13)
    parts = RankPlan.build(spec, [held], held).parts[Rank(0)]
    for segment in (Segment(3, 13, 0, 5), Segment(4, 12, 2, 4), Segment(0, 3, 0, 5, state=True)):
        for site in (source, target):
            pair = PairPlan(source, site, parts, rows)
            given, one = list(pair.runs(segment)), Job(pair, segment)
            for path, writes in ((SlicePlanner(), _slices), (DirectPlanner(), _pages)):
                assert path.count(one) == sum(writes(run, run.start, run.stop) for run in given) > 0


def test_staged_gathers_and_writes_once() -> None:
    """Staged takes any layouts, one write, and the same bytes in the same order on both sides."""
    path, two = StagedPlanner(), job(2)
    assert not exposes_pages(path)
    assert path.refuse(two.pair) is None
    assert path.count(two) == 1
    assert path.send(two).nbytes == path.receive(two).nbytes == 10 * 2 * 2 * 2 * 16
