"""The elected parts of all writers are exactly what the target needs, each cell once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.geometry import CacheSpec, elect, shard, stages
from disagg_kv.geometry.election import rotations
from disagg_kv.planning import Segment
from tests.support import oracle
from tests.support.worlds import World, worlds

SIZES = (1, 2, 4, 8)


@given(worlds(), st.integers(-3, 50), st.integers(0, 9), st.integers(1, 9))
def test_each_needed_cell_has_exactly_one_writer_who_holds_it(
    world: World, rotation: int, start: int, rows: int
) -> None:
    """Any TP, PP, replication and uneven split on either side, for any run of rows."""
    whole = Segment(start, start + rows, 0, len(world.spec.layers))
    for target in world.targets:
        parts = elect(world.spec, world.writers, target, rotation)
        assert len(parts) == len(world.writers)
        assert sorted(itertools.chain(*(oracle.sent(p, whole) for p in parts))) == oracle.box(target, whole)
        for writer, mine in zip(world.writers, parts, strict=True):
            assert {(c, layer, u) for c, layer, _, u in oracle.sent(mine, whole)} <= oracle.cells(writer)


@given(worlds(), st.integers(0, 11))
def test_a_part_is_one_run_of_units_in_each_plane_of_both_sides(world: World, rotation: int) -> None:
    """A run that spans two holdings would not be one run of bytes."""
    for target in world.targets:
        for writer, mine in zip(world.writers, elect(world.spec, world.writers, target, rotation), strict=True):
            for part, side in itertools.product(mine, (writer, target)):
                for layer in part.layers:
                    runs = [set(h.units) for h in side.holdings if h.component == part.component and layer in h.layers]
                    assert sum(set(part.units) <= run for run in runs) == 1


@given(worlds(), st.integers(0, 30), st.integers(0, 30))
def test_rotations_repeat_with_their_period_and_never_change_the_union(world: World, one: int, other: int) -> None:
    """A room may take any rotation; callers may keep results by the remainder."""
    whole = Segment(0, 7, 0, len(world.spec.layers))
    for target in world.targets:
        period = rotations(world.spec, world.writers, target)
        a, b = (elect(world.spec, world.writers, target, r) for r in (one, other))
        assert sorted(itertools.chain(*(oracle.sent(p, whole) for p in a))) == sorted(
            itertools.chain(*(oracle.sent(p, whole) for p in b))
        )
        assert elect(world.spec, world.writers, target, one + period) == a
        if (one - other) % period == 0:
            assert a == b


@given(worlds(), st.integers(0, 7))
def test_the_order_of_parts_is_that_of_the_staged_bytes(world: World, rotation: int) -> None:
    """Components as the spec names them, then first unit, then layers."""
    names = list(dict.fromkeys(c.name for cs in world.spec.layers.values() for c in cs))
    for target in world.targets:
        for mine in elect(world.spec, world.writers, target, rotation):
            keys = [(names.index(p.component), p.units.start, p.layers) for p in mine]
            assert keys == sorted(keys)
            assert all(list(p.layers) == sorted(set(p.layers)) for p in mine)


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("decode", SIZES)
@pytest.mark.parametrize("prefill", SIZES)
def test_every_pairing_of_even_splits(prefill: int, decode: int, heads: int) -> None:
    """P, D and heads of 1, 2, 4, 8; replicas on either side or both; each of them sends its share."""
    spec = CacheSpec.kv(8, heads, 2, "int8", v_head_dim=3)
    whole = Segment(0, 1, 0, 8)
    writers = [shard(spec, tp=prefill, rank=r) for r in range(prefill)]
    for rank in range(decode):
        target = shard(spec, tp=decode, rank=rank)
        parts = elect(spec, writers, target, rotation=rank)
        assert sorted(itertools.chain(*(oracle.sent(p, whole) for p in parts))) == oracle.box(target, whole)
        load = [len(oracle.sent(p, whole)) for p in parts if p]
        assert len(set(load)) == 1, "every writer that shares a unit with the target sends as much as the others"
        assert len(load) == sum(not oracle.cells(w).isdisjoint(oracle.cells(target)) for w in writers)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 9), st.integers(1, 40))
def test_replicas_share_a_latent_evenly(layers: int, replicas: int, rotation: int, rows: int) -> None:
    """By layers where there are enough, else by rows; the room turns the shares."""
    spec = CacheSpec.mla(layers, 4, "float16")
    writers = [shard(spec, tp=replicas, rank=r) for r in range(replicas)]
    whole = Segment(0, rows, 0, layers)
    load = [len(oracle.sent(p, whole)) for p in elect(spec, writers, shard(spec), rotation)]
    assert sum(load) == layers * rows
    assert max(load) - min(load) <= (rows if layers >= replicas else layers)
    turned = [len(oracle.sent(p, whole)) for p in elect(spec, writers, shard(spec), rotation + 1)]
    assert turned == [load[-1], *load[:-1]]


@given(st.integers(1, 6), st.integers(1, 6))
def test_pipeline_stages_on_both_sides(ours: int, theirs: int) -> None:
    """A target's stage hears exactly from the writers' stages that it overlaps."""
    spec = CacheSpec.kv(6, 2, 2, "int8")
    writers = [shard(spec, layers=stage) for stage in stages(spec, ours)]
    for stage in stages(spec, theirs):
        parts = elect(spec, writers, shard(spec, layers=stage))
        for writer, mine in zip(writers, parts, strict=True):
            assert {layer for p in mine for layer in p.layers} == set(stage) & set(writer.layers())


@given(worlds())
def test_every_copy_of_a_cell_counts_only_once(world: World) -> None:
    """Engines that send each replica's copy send up to four times too much."""
    whole = Segment(0, 5, 0, len(world.spec.layers))
    for target in world.targets:
        sent = Counter(itertools.chain(*(oracle.sent(p, whole) for p in elect(world.spec, world.writers, target))))
        assert set(sent.values()) <= {1}
