"""What a rank holds, and splits that cannot be."""

from __future__ import annotations

import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Holding, Shard, even_units, shard, stages
from disagg_kv.ids import LayerId

SPEC = CacheSpec.kv(4, 7, 2, "int8")


def test_heads_divide_evenly_or_are_replicated() -> None:
    """As engines do it."""
    assert [even_units(8, 4, r) for r in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [even_units(2, 4, r) for r in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]


def test_a_split_that_leaves_a_remainder_is_refused_with_the_numbers() -> None:
    """7 heads over 3 ranks silently became 6 in one engine."""
    with pytest.raises(GeometryError, match="7 units do not divide over 3 ranks"):
        shard(SPEC, tp=3, rank=0)
    with pytest.raises(GeometryError, match="tensor-parallel rank 3 of 3"):
        even_units(6, 3, 3)


def test_a_rank_may_say_which_heads_it_holds() -> None:
    """7 heads over 3 ranks, as 3, 2 and 2."""
    held = shard(SPEC, layers=[LayerId(1)], units={"k": range(3, 5), "v": range(3, 5)})
    assert held.layers() == (1,)
    assert held.units(LayerId(1), "k") == (range(3, 5),)
    assert held.units(LayerId(0), "k") == ()


def test_stages_are_near_equal_and_cover_every_layer() -> None:
    """The first stages take one more."""
    assert stages(CacheSpec.mla(5, 2, "int8"), 2) == [(0, 1, 2), (3, 4)]
    with pytest.raises(GeometryError, match="5 pipeline stages of 4 layers"):
        stages(SPEC, 5)


def test_shards_that_cannot_be() -> None:
    """Each has its own message."""
    every = frozenset([LayerId(0)])
    with pytest.raises(GeometryError, match=r"layer 0, 'k': units held twice: \[\(0, 2\), \(1, 3\)\]"):
        Shard([Holding("k", every, range(2)), Holding("k", every, range(1, 3))])
    with pytest.raises(GeometryError, match="non-empty run of units"):
        Holding("k", every, range(2, 2))
    with pytest.raises(GeometryError, match="non-empty run of units"):
        Holding("k", every, range(0, 4, 2))
    with pytest.raises(GeometryError, match="layer 0, 'k': unit 8 of 7 units"):
        shard(SPEC, units={"k": range(5, 9), "v": range(1)})
    with pytest.raises(GeometryError, match="layer 9 is not in the spec, which has 4 layers"):
        shard(SPEC, layers=[LayerId(9)])
