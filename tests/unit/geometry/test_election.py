"""Who is elected, by example, and what is refused."""

from __future__ import annotations

import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Component, Holding, Shard, Share, elect, shard
from disagg_kv.geometry.election import rotations
from disagg_kv.ids import LayerId


def test_four_prefill_ranks_send_a_quarter_each_to_one() -> None:
    """TP 4 to 1."""
    spec = CacheSpec.kv(2, 8, 2, "int8")
    parts = elect(spec, [shard(spec, tp=4, rank=r) for r in range(4)], shard(spec))
    assert parts[3] == (
        Share("k", (LayerId(0), LayerId(1)), range(6, 8)),
        Share("v", (LayerId(0), LayerId(1)), range(6, 8)),
    )
    assert rotations(spec, [shard(spec)], shard(spec)) == 1


def test_seven_heads_from_three_ranks_to_two() -> None:
    """Splits that do not divide work when the shards say who holds what."""
    spec = CacheSpec.uniform(1, [Component("k", "int8", 7, 1)])
    ours = [shard(spec, units={"k": units}) for units in (range(3), range(3, 5), range(5, 7))]
    parts = [elect(spec, ours, shard(spec, units={"k": units})) for units in (range(4), range(4, 7))]
    sent = [[[p.units for p in mine] for mine in of] for of in parts]
    assert sent == [[[range(3)], [range(3, 4)], []], [[], [range(4, 5)], [range(5, 7)]]]


def test_replicas_take_runs_of_layers_and_rotate() -> None:
    """With fewer layers than replicas they take rows."""
    spec = CacheSpec.mla(3, 2, "int8")
    ours = [shard(spec)] * 2
    assert [[p.layers for p in mine] for mine in elect(spec, ours, shard(spec))] == [[(0,)], [(1, 2)]]
    assert [[p.layers for p in mine] for mine in elect(spec, ours, shard(spec), 1)] == [[(1, 2)], [(0,)]]
    one = elect(spec, [shard(spec)] * 4, shard(spec), 3)
    assert [(p.row_index, p.row_ways, p.rows(10, 20)) for mine in one for p in mine] == [
        (1, 4, (12, 15)), (2, 4, (15, 17)), (3, 4, (17, 20)), (0, 4, (10, 12)),
    ]  # fmt: skip
    assert rotations(spec, ours, shard(spec)) == 2


def test_a_period_covers_every_set_of_replicas() -> None:
    """Two replicas of one layer and three of another repeat after six rooms."""
    spec = CacheSpec.mla(2, 2, "int8")
    ours = [shard(spec, layers=[LayerId(layer)]) for layer in (0, 0, 1, 1, 1)]
    assert rotations(spec, ours, shard(spec)) == 6


def test_a_cell_that_nobody_holds_is_named() -> None:
    """Before anything is sent."""
    spec = CacheSpec.kv(3, 4, 2, "int8")
    most = shard(spec, units={"k": range(4), "v": range(3)})
    with pytest.raises(GeometryError, match="no writer holds layer 0, 'v', unit 3"):
        elect(spec, [most], shard(spec))
    with pytest.raises(GeometryError, match="no writer holds layer 2, 'k', unit 0"):
        elect(spec, [shard(spec, layers=[LayerId(0), LayerId(1)])], shard(spec))
    with pytest.raises(GeometryError, match="no writer holds layer 0, 'k', unit 0"):
        elect(spec, [], shard(spec))


def test_shards_are_held_against_the_spec() -> None:
    """On either side."""
    spec = CacheSpec.mla(1, 2, "int8")
    other = Shard([Holding("index", frozenset([LayerId(0)]), range(1))])
    for writers, target in (([other], shard(spec)), ([shard(spec)], other)):
        with pytest.raises(GeometryError, match="layer 0 has no component 'index'"):
            elect(spec, writers, target)
