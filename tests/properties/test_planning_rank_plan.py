"""Segments tile what is sent, fit their limits, and have the same bytes on both sides."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.errors import OversizeError
from disagg_kv.ids import GroupId, Rank
from disagg_kv.planning import Limits, PartView, RankPlan, Segment
from tests.support import oracle
from tests.support.worlds import ORDERS, Order, World, build_site, build_table, worlds

LIMITS = st.integers(0, 9).map(lambda n: 16 << n)
ORDERINGS = st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS))


def _fits(rank_plan: RankPlan, segment: Segment, slot: int, lease: int) -> bool:
    places, total = rank_plan.lease(segment, 16)
    return total <= lease and all(nbytes <= slot for _, nbytes in places.values())


@given(worlds(), st.integers(0, 5), st.integers(0, 70), st.integers(0, 60), LIMITS, LIMITS, st.integers(1, 20))
def test_a_cut_tiles_its_rectangle_within_its_limits(
    world: World, rotation: int, start: int, rows: int, slot: int, lease: int, page: int
) -> None:
    """Each cell in one segment; no part above the slot, no lease above its limit; cuts at pages where one fits."""
    stop = start + rows
    for target in world.targets:
        rank_plan = RankPlan.build(world.spec, world.writers, target, rotation)
        for stage in rank_plan.stages:
            try:
                cut = rank_plan.cut(start, stop, stage, Limits(slot, lease, page, 16))
            except OversizeError:
                assert not all(_fits(rank_plan, Segment(0, 1, layer, layer + 1), slot, lease) for layer in stage)
                continue
            cells = [(row, layer) for s in cut for row in range(s.start, s.stop) for layer in s.layers]
            assert sorted(cells) == sorted(itertools.product(range(start, stop), stage))
            for segment in cut:
                rank_plan.validate(segment)
                assert _fits(rank_plan, segment, slot, lease)
                if segment.start != start and segment.start % page:
                    assert not all(
                        _fits(rank_plan, Segment(0, n, *_ends(segment)), slot, lease) for n in range(page + 9)
                    )
            if _fits(rank_plan, Segment(0, 1, stage.start, stage.stop), slot, lease):
                assert all(segment.layers == stage for segment in cut), "layers stay together where one row fits"


def _ends(segment: Segment) -> tuple[int, int]:
    return segment.first, segment.last


@given(worlds(), st.integers(0, 5), st.integers(0, 9), st.integers(1, 30), st.data())
def test_sizes_are_those_of_the_elected_cells(
    world: World, rotation: int, start: int, rows: int, data: st.DataObject
) -> None:
    """Both sides recompute sizes from ranges alone, so they had better be the bytes of the box."""
    sizes = {(int(layer), c.name): c.unit_bytes for layer, cs in world.spec.layers.items() for c in cs}
    for target in world.targets:
        rank_plan = RankPlan.build(world.spec, world.writers, target, rotation)
        stage = data.draw(st.sampled_from(rank_plan.stages))
        first = data.draw(st.sampled_from(stage))
        segment = Segment(start, start + rows, first, data.draw(st.integers(first + 1, stage.stop)))
        expected = {
            rank: sum(sizes[layer, component] for component, layer, _, _ in oracle.sent(parts, segment))
            for rank, parts in enumerate(rank_plan.parts)
        }
        assert {rank: rank_plan.part_bytes(segment, Rank(rank)) for rank in expected} == expected
        places, total = rank_plan.lease(segment)
        assert {rank: nbytes for rank, (_, nbytes) in places.items()} == {r: n for r, n in expected.items() if n}
        ends = [0, *(-(-(offset + nbytes) // 256) * 256 for offset, nbytes in places.values())]
        assert [offset for offset, _ in places.values()] == ends[:-1]
        assert total == ends[-1]


@given(worlds())
def test_stages_are_runs_of_layers_with_the_same_writers(world: World) -> None:
    """No segment crosses a pipeline stage, and every layer is in exactly one run."""
    for target in world.targets:
        rank_plan = RankPlan.build(world.spec, world.writers, target)
        assert [layer for run in rank_plan.stages for layer in run] == sorted(
            {layer for _, layer, _ in oracle.cells(target)}
        )
        for rank, writer in enumerate(world.writers):
            held = {layer for _, layer, _ in oracle.cells(writer)}
            for run in rank_plan.stages:
                assert (run in rank_plan.ranges(Rank(rank))) == bool(held & set(run)) == (held >= set(run))


@given(worlds(), st.integers(0, 5), st.integers(0, 9), st.integers(1, 9), ORDERINGS)
def test_a_staged_part_gathers_and_scatters_to_the_same_place(
    world: World, rotation: int, start: int, rows: int, orders: tuple[Order, Order]
) -> None:
    """The two sides lay out a part alike whatever their pools look like, each byte once."""
    names = list(dict.fromkeys(c.name for cs in world.spec.layers.values() for c in cs))
    for target in world.targets:
        rank_plan = RankPlan.build(world.spec, world.writers, target, rotation)
        there = build_site(world.spec, target, 4, 8, orders[1])
        for stage, (rank, parts) in itertools.product(rank_plan.stages, enumerate(rank_plan.parts)):
            segment = Segment(start, start + rows, stage.start, stage.stop)
            here = build_site(world.spec, world.writers[rank], 2, 16, orders[0])
            ours, theirs = (PartView(site, parts).layout(segment) for site in (here, there))
            assert ours.offset.tolist() == theirs.offset.tolist()
            assert ours.nbytes == theirs.nbytes == rank_plan.part_bytes(segment, Rank(rank))
            cells = list(oracle.laid_out(here, ours))
            assert cells == list(oracle.laid_out(there, theirs))
            assert sorted(cell for cell, _, _ in cells) == oracle.sent(parts, segment)
            order = [(names.index(c), layer) for (c, layer, _, _), _, _ in cells]
            assert order == sorted(order)
            memory = oracle.fresh(here, 1)
            table = {GroupId("kv"): build_table(here, start, start + rows, rotation)}
            assert len(oracle.staged_bytes(here, memory, table, ours)) == ours.nbytes
