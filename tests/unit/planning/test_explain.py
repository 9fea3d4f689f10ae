"""What each path would post: counted, and equal to what the planners make."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from disagg_kv.errors import ConfigurationError, GeometryError
from disagg_kv.geometry import CacheSpec, PageTable, Shard, Site, elect, shard, stages
from disagg_kv.planning import PairPlan, Segment, direct_writes, plain_site, slice_writes
from disagg_kv.planning.descriptors import Tables
from disagg_kv.strategies import explain
from disagg_kv.strategies.explain import choose

SPECS = {"kv": CacheSpec.kv(3, 4, 2, "int8", v_head_dim=3), "mla": CacheSpec.mla(3, 4, "float16")}


def _tables(site: Site, step: int) -> Tables:
    """Every ``step``-th page, then the others: pages that are neighbours in one pool are none in another."""
    group = site.groups[0]
    return {group.id: PageTable(group.id, np.concatenate([np.arange(i, group.pages, step) for i in range(step)]))}


@pytest.mark.parametrize("orders", list(itertools.product(("NHD", "HND"), repeat=2)))
@pytest.mark.parametrize("pages", [(4, 4), (4, 8), (1, 1)])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (4, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("kind", SPECS)
def test_counts_are_those_of_the_planners(
    kind: str, prefill: int, decode: int, pages: tuple[int, int], orders: tuple[str, str]
) -> None:
    """Counting instead of listing changes no number."""
    spec, tokens = SPECS[kind], 38
    ours = [shard(spec, tp=prefill, rank=r) for r in range(prefill)]
    theirs = [shard(spec, tp=decode, rank=r) for r in range(decode)]
    plan = explain(spec, ours, theirs, tokens, pages, order=orders, slot_bytes=300, lease_bytes=4096)
    expected = {"slice": 0, "direct": 0}
    for pair in plan.pairs:
        here = plain_site(spec, ours[pair.writer], tokens, pages[0], orders[0])
        there = plain_site(spec, theirs[pair.target], tokens, pages[1], orders[1])
        parts = elect(spec, ours, theirs[pair.target])[pair.writer]
        tables = _tables(here, 1), _tables(there, 2)
        sliced = slice_writes(PairPlan(here, there, parts), Segment(0, tokens, 0, 3), *tables)
        assert (pair.descriptors["slice"], pair.nbytes) == (len(sliced), sliced.total())
        expected["slice"] += len(sliced)
        assert pair.descriptors["staged"] == pair.segments
        assert ("direct" in pair.refused) != ("direct" in pair.descriptors)
        if "direct" not in pair.refused:
            direct = direct_writes(PairPlan(here, there, parts), Segment(0, tokens, 0, 3), *tables)
            assert pair.descriptors["direct"] == len(direct)
            expected["direct"] += len(direct)
    assert plan.nbytes == sum(pair.nbytes for pair in plan.pairs)
    for path, total in plan.descriptors.items():
        assert total == expected.get(path, sum(pair.segments for pair in plan.pairs))
    assert set(plan.descriptors) | set(plan.refused) == {"staged", "slice", "direct", "mapped"}


def test_staging_needs_a_thousand_times_fewer_writes() -> None:
    """8,192 tokens, 64 layers, TP 4 to 1: one write per segment, writer and destination."""
    spec = CacheSpec.kv(64, 8, 128, "bfloat16")
    plan = explain(spec, [shard(spec, tp=4, rank=r) for r in range(4)], [shard(spec)], 8192, (64, 64))
    assert plan.nbytes == 8192 * 64 * 8 * 128 * 2 * 2
    assert plan.descriptors == {"staged": 4 * 5, "slice": 4 * 8192 * 64 * 2, "mapped": 4 * 5}
    assert plan.descriptors["slice"] >= 1000 * plan.descriptors["staged"]
    assert "prefill rank 0 to decode rank 0: layer 0, 'k': 2 units to send" in plan.refused["direct"]


def test_replicated_heads_are_planned_once() -> None:
    """TP 8 to 1 with 2 KV heads; engines send them four times."""
    spec = CacheSpec.kv(4, 2, 8, "bfloat16")
    plan = explain(spec, [shard(spec, tp=8, rank=r) for r in range(8)], [shard(spec)], 64, (16, 16))
    assert plan.nbytes == 64 * 4 * 2 * 8 * 2 * 2
    assert [pair.writer for pair in plan.pairs] == list(range(8))


def test_pipelines_on_both_sides() -> None:
    """Pairs whose stages do not meet send nothing and are left out."""
    spec = CacheSpec.kv(6, 2, 8, "int8")
    ours = [shard(spec, layers=stage) for stage in stages(spec, 3)]
    theirs = [shard(spec, layers=stage) for stage in stages(spec, 2)]
    plan = explain(spec, ours, theirs, 32, (16, 16))
    assert [(pair.writer, pair.target) for pair in plan.pairs] == [(0, 0), (1, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("tokens", "pages", "order"),
    [(0, (4, 4), "NHD"), (4, (0, 1), "NHD"), (4, (1, 0), "NHD"), (4, (4, 4), "DNH")],
)
def test_numbers_that_cannot_be_are_refused(tokens: int, pages: tuple[int, int], order: str) -> None:
    """With the numbers."""
    spec = SPECS["kv"]
    with pytest.raises(ConfigurationError, match=f"a pool of {tokens} tokens in pages of"):
        explain(spec, [shard(spec)], [shard(spec)], tokens, pages, order=("NHD", order))


def test_a_split_that_leaves_a_cell_without_writer_is_refused() -> None:
    """As in a real transfer."""
    spec = SPECS["kv"]
    none: list[Shard] = []
    with pytest.raises(GeometryError, match="no writer holds layer 0"):
        explain(spec, none, [shard(spec)], 4, (4, 4))
    with pytest.raises(ConfigurationError, match="needs at least one decode rank"):
        explain(spec, [shard(spec)], none, 4, (4, 4))


def test_a_plain_pool_has_units_of_several_holdings_in_one_plane() -> None:
    """A shard may name the units of a layer in several runs."""
    spec = SPECS["kv"]
    held = shard(spec, units={"k": range(1), "v": range(1)}).holdings
    more = shard(spec, units={"k": range(2, 4), "v": range(2, 4)}).holdings
    site = plain_site(spec, Shard([*held, *more]), 8, 4)
    site.check()
    assert site.planes[0].row_stride == 3 * 2


def test_no_path_at_all_is_an_error_with_the_reasons() -> None:
    """Nothing is chosen silently."""
    with pytest.raises(ConfigurationError, match="no path is left: staged cannot: no memory; slice cannot: no pages"):
        choose({}, 8, {"staged": "no memory", "slice": "no pages"})
    with pytest.raises(ConfigurationError, match="none was offered"):
        choose({}, 8, {})
