"""The order of bytes in a staged part, by example."""

from __future__ import annotations

import attrs
import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Holding, Shard, Share, elect, shard
from disagg_kv.ids import LayerId
from disagg_kv.planning import PartView, RankPlan, Segment, plain_site, rank_plan_of
from disagg_kv.planning.cache import KEPT
from disagg_kv.planning.staged import part_view

SPEC = CacheSpec.kv(3, 4, 2, "int8", v_head_dim=1)


def test_planes_come_component_by_component_then_layer_by_layer() -> None:
    """DESIGN section 5: K of its layers, then V of its layers; rows, units, bytes inside."""
    ours = [shard(SPEC, tp=2, rank=r) for r in range(2)]
    parts = elect(SPEC, ours, shard(SPEC))[1]
    here = PartView(plain_site(SPEC, ours[1], 64, 4), parts).layout(Segment(2, 7, 1, 3))
    site = plain_site(SPEC, shard(SPEC), 64, 4)
    there = PartView(site, parts).layout(Segment(2, 7, 1, 3))
    assert [(site.planes[p].component, site.planes[p].layer) for p in there.plane] == [
        ("k", 1), ("k", 2), ("v", 1), ("v", 2),
    ]  # fmt: skip
    assert here.first_unit.tolist() == [0] * 4
    assert there.first_unit.tolist() == [2] * 4
    assert here.offset.tolist() == there.offset.tolist() == [0, 20, 40, 50]
    assert here.nbytes == there.nbytes == 60
    assert (here.row_start.tolist(), here.row_stop.tolist()) == ([2] * 4, [7] * 4)


def test_units_in_two_runs_of_one_plane_come_by_unit_number() -> None:
    """The target keeps the units 2 and 3 before 0 and 1."""
    every = frozenset([LayerId(0)])
    spec = CacheSpec.mla(1, 2, "int8")
    spec = attrs.evolve(spec, layers={LayerId(0): [attrs.evolve(spec.layers[LayerId(0)][0], units=4)]})
    target = Shard([Holding("latent", every, range(2, 4)), Holding("latent", every, range(2))])
    (parts,) = elect(spec, [shard(spec)], target)
    layout = PartView(plain_site(spec, target, 4, 4), parts).layout(Segment(0, 1, 0, 1))
    assert layout.first_unit.tolist() == [2, 0]
    assert layout.offset.tolist() == [0, 4]


def test_planes_without_rows_are_left_out() -> None:
    """Four replicas share one row of a layer: one of them sends it."""
    spec = CacheSpec.mla(1, 2, "int8")
    site = plain_site(spec, shard(spec), 4, 4)
    parts = elect(spec, [shard(spec)] * 4, shard(spec))
    layouts = [PartView(site, mine).layout(Segment(3, 4, 0, 1)) for mine in parts]
    assert [(layout.nbytes, len(layout.plane)) for layout in layouts] == [(0, 0)] * 3 + [(2, 1)]
    assert PartView(site, ()).layout(Segment(0, 4, 0, 1)).nbytes == 0


def test_segments_of_one_size_are_known_to_be_alike_and_a_changed_copy_is_not() -> None:
    """What depends on all but the first row need not be worked out again; a wrong match would move wrong bytes."""
    parts = elect(SPEC, [shard(SPEC)], shard(SPEC))[0]
    view = PartView(plain_site(SPEC, shard(SPEC), 512, 4), parts)
    first, second = view.layout(Segment(0, 4, 0, 3)), view.layout(Segment(4, 8, 0, 3))
    assert first.alike == second.alike is not None
    assert attrs.evolve(second, row_start=first.row_start, row_stop=first.row_stop) == first
    others = [
        view.layout(Segment(0, 5, 0, 3)),
        view.layout(Segment(0, 4, 0, 2)),
        attrs.evolve(first, units=first.units),
    ]
    assert first.alike not in [other.alike for other in others]
    assert others[-1].alike is None
    for rows in range(1, 2 * KEPT):
        assert view.layout(Segment(0, rows, 0, 3)).nbytes == first.nbytes // 4 * rows


def test_a_pool_that_does_not_have_the_parts_is_refused() -> None:
    """A missing plane, and units that are not one run."""
    site = plain_site(SPEC, shard(SPEC, tp=2, rank=0, layers=[LayerId(0)]), 4, 4)
    with pytest.raises(GeometryError, match="the pool has no plane for layer 1, 'k'"):
        PartView(site, [Share("k", (LayerId(1),), range(1))])
    with pytest.raises(GeometryError, match=r"layer 0, 'k': units \[1, 3\) are not in one of .* \[\(0, 2\)\]"):
        PartView(site, [Share("k", (LayerId(0),), range(1, 3))])


def test_views_and_rank_plans_of_equal_values_are_built_once_and_others_are_not_mistaken_for_them() -> None:
    """What is kept goes by value: equal specs, shards and sites that were made apart find it, one that differs not."""
    one, same, other = (CacheSpec.kv(2, 4, 8, "float16", model=model) for model in (b"kept", b"kept", b"not that one"))
    parts = elect(one, [shard(one)], shard(one))[0]
    views = [part_view(plain_site(s, shard(s), 16, 4), parts) for s in (one, same, other)]
    assert views[0] is views[1] is not views[2]
    larger = part_view(plain_site(one, shard(one), 32, 4), parts)
    assert larger is not views[0]
    rank_plans = [rank_plan_of(s, (shard(s),), shard(s), 0) for s in (one, same, other)]
    assert rank_plans[0] is rank_plans[1] is not rank_plans[2]
    assert rank_plans[0] == RankPlan.build(one, [shard(one)], shard(one))
