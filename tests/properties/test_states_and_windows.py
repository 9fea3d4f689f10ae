"""Recurrent states and sliding windows: what crosses is exactly what a decode rank needs, each cell once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.errors import OversizeError
from disagg_kv.geometry import CacheSpec, Component, PageTable, Shard, shard, stages
from disagg_kv.ids import GroupId, LayerId, Rank
from disagg_kv.planning import (
    Limits,
    PairPlan,
    PartView,
    RankPlan,
    RowRange,
    Segment,
    direct_writes,
    slice_writes,
)
from tests.support import oracle
from tests.support.worlds import ORDERS, Order, World, build_site, build_table, hybrid_specs, worlds

pytestmark = pytest.mark.slow

HYBRID = worlds(of=hybrid_specs())
KV, STATE = GroupId("kv"), GroupId("state")
ORDERINGS = st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS))
EDGES = st.lists(st.integers(1, 39), max_size=3).map(lambda edges: sorted({0, *edges, 40}))
LIMITS = st.sampled_from([(96, 4096), (200, 4096), (1 << 20, 512), (1 << 20, 1 << 20)])


def _cuts(rank_plan: RankPlan, edges: list[int], limits: tuple[int, int], page_rows: int = 4) -> list[Segment]:
    """All segments of a room whose chunks end at ``edges``."""
    slot, lease = limits
    return [
        segment
        for stage in rank_plan.stages
        for segment in (
            *(
                one
                for a, b in itertools.pairwise(edges)
                for one in rank_plan.cut(a, b, stage, Limits(slot, lease, page_rows, 1))
            ),
            *rank_plan.cut_states(stage, Limits(slot, lease, alignment=1)),
        )
    ]


@given(HYBRID, st.integers(0, 7), st.integers(0, 39), st.booleans(), EDGES, LIMITS, ORDERINGS)
def test_the_union_is_the_box_each_cell_once(
    world: World,
    rotation: int,
    held: int,
    known: bool,
    edges: list[int],
    limits: tuple[int, int],
    orders: tuple[Order, Order],
) -> None:
    """Any split, chunks and limits: states whole, windows' tails, other tokens after the held."""
    rows = RowRange(held, edges[-1] if known else None)
    for target in world.targets:
        rank_plan = RankPlan.build(world.spec, world.writers, target, rotation).for_rows(rows)
        there = build_site(world.spec, target, 4, 16, orders[1])
        found: Counter[oracle.RowCell] = Counter()
        for segment in _cuts(
            rank_plan, [rank_plan.floor(held), *(e for e in edges if e > rank_plan.floor(held))], limits
        ):
            rank_plan.validate(segment)
            for rank, parts in enumerate(rank_plan.parts):
                here = build_site(world.spec, world.writers[rank], 2, 32, orders[0])
                ours, theirs = (PartView(s, parts).for_rows(rows).layout(segment) for s in (here, there))
                cells = list(oracle.laid_out(here, ours))
                assert cells == list(oracle.laid_out(there, theirs))
                assert ours.nbytes == theirs.nbytes == sum(n for _, _, n in cells)
                assert ours.nbytes == rank_plan.part_bytes(segment, Rank(rank)) <= limits[0]
                assert (Rank(rank) in rank_plan.lease(segment)[0]) == bool(cells)
                found.update(cell for cell, _, _ in cells)
        assert found == Counter(oracle.needed(world.spec, target, held, edges[-1], known=known))


@given(HYBRID, st.integers(0, 7), st.integers(0, 39), st.booleans())
def test_what_must_land_holds_every_needed_cell_and_no_layer_without_one(
    world: World, rotation: int, held: int, known: bool
) -> None:
    """The boxes that decode waits for: without one of them a room must not succeed."""
    rows = RowRange(held, 40 if known else None)
    for target in world.targets:
        rank_plan = RankPlan.build(world.spec, world.writers, target, rotation).for_rows(rows)
        boxes = rank_plan.needed(RowRange(held, 40))
        cells = oracle.needed(world.spec, target, held, 40, known=known)
        for component, layer, row, _ in cells:
            state = oracle.component(world.spec, layer, component).rows > 0
            assert sum(b.state == state and b.start <= row < b.stop and b.first <= layer < b.last for b in boxes) == 1
        for box in boxes:
            for layer, row in itertools.product(box.layers, (box.start, box.stop - 1)):
                assert any(
                    (at, where) == (layer, row) and (oracle.component(world.spec, at, name).rows > 0) == box.state
                    for name, at, where, _ in cells
                )


@given(HYBRID, st.integers(0, 7), st.integers(0, 39), ORDERINGS, st.sampled_from([1, 3, 16]), st.integers(1, 2))
def test_slices_and_runs_of_pages_move_the_same_cells(
    world: World, seed: int, held: int, orders: tuple[Order, Order], page: int, stride: int
) -> None:
    """Direct and slice write states and windows into exposed pages, each byte once, and nothing else."""
    rows, stop = RowRange(held, 40), 40
    (target, number), writer = (world.targets[0], 0), world.writers[0]
    if stride == 2:  # an equal layout, so that runs of pages are possible
        target, orders = writer, (orders[0], orders[0])
    rank_plan = RankPlan.build(world.spec, [writer] if stride == 2 else world.writers, target, seed).for_rows(rows)
    source = build_site(world.spec, writer, page, 80 // page + 3, orders[0], number)
    there = build_site(world.spec, target, page, 80 // page + 3, orders[1], number)
    tables, others = (
        {KV: build_table(site, 0, stop, seed + i), STATE: PageTable(STATE, [i + 1])}
        if KV in {g.id for g in site.groups}
        else {STATE: PageTable(STATE, [i + 1])}
        for i, site in enumerate((source, there))
    )
    memory, before = oracle.fresh(source, seed), oracle.fresh(there, seed + 2)
    pair = PairPlan(source, there, rank_plan.parts[0], rows)
    wanted = oracle.needed(world.spec, target, held, stop, known=True)
    for segment in _cuts(rank_plan, [rank_plan.floor(held), stop], (1 << 20, 1 << 20)):
        layout = pair.source_view.layout(segment)
        cells = [cell for cell, _, _ in oracle.laid_out(source, layout)]
        assert set(cells) <= set(wanted)
        expected = oracle.moved(source, memory, tables, there, before, others, cells)
        direct = pair.direct_refusal is None
        assert direct or stride == 1 or _reordered(writer)
        for plan in (slice_writes, direct_writes)[: 1 + direct]:
            after, times = oracle.posted(plan(pair, segment, tables, others), memory, before)
            assert oracle.equal(after, expected)
            assert max(times) <= 1


def _reordered(one: Shard) -> bool:
    """True where the units of some plane are in two runs."""
    pairs = [(h.component, layer) for h in one.holdings for layer in h.layers]
    return len(set(pairs)) < len(pairs)


STATES = CacheSpec.uniform(2, [Component("ssm", "int8", 4, 16, tokens_per_row=0, rows=1)])


def test_a_replicated_state_has_one_sender_per_layer() -> None:
    """Replicas divide states by layers, as they do KV."""
    writers = [shard(STATES)] * 2
    rank_plan = RankPlan.build(STATES, writers, shard(STATES))
    (segment,) = rank_plan.cut_states(range(2), Limits(1 << 20, 1 << 20))
    assert segment == Segment(0, 1, 0, 2, state=True)
    assert [rank_plan.part_bytes(segment, Rank(r)) for r in range(2)] == [64, 64]
    assert [[part.layers for part in parts] for parts in rank_plan.parts] == [[(0,)], [(1,)]]


def test_states_are_cut_by_layers_where_they_do_not_fit_a_slot() -> None:
    """And what one layer's states of one row need is refused for good, with both sizes."""
    rank_plan = RankPlan.build(STATES, [shard(STATES)], shard(STATES))
    cut = rank_plan.cut_states(range(2), Limits(64, 1 << 20))
    assert cut == [Segment(0, 1, 0, 1, True), Segment(0, 1, 1, 2, True)]
    with pytest.raises(OversizeError, match="staging slot, for one row of layer 0: 64 bytes requested"):
        rank_plan.cut_states(range(2), Limits(63, 1 << 20))


def test_a_pipeline_stage_sends_the_states_of_its_own_layers() -> None:
    """Decode without a pipeline gets them from all stages."""
    writers = [shard(STATES, layers=stage) for stage in stages(STATES, 2)]
    rank_plan = RankPlan.build(STATES, writers, shard(STATES))
    assert [s for stage in rank_plan.stages for s in rank_plan.cut_states(stage, Limits(99, 999))] == [
        Segment(0, 1, 0, 1, True),
        Segment(0, 1, 1, 2, True),
    ]
    assert rank_plan.cut(0, 9, range(1), Limits(99, 999)) == []


def test_rows_before_the_window_are_in_no_segment_where_all_layers_slide() -> None:
    """A held prefix does not shorten the window's tail; an unknown end means that everything is sent."""
    spec = CacheSpec({LayerId(i): [Component("k", "int8", 1, 4, window=window)] for i, window in enumerate((8, 16))})
    rank_plan = RankPlan.build(spec, [shard(spec)], shard(spec))
    room = rank_plan.for_rows(RowRange(96, 100))
    assert room.floor(96) == 84
    assert room.cut(0, 100, range(2), Limits(1 << 20, 1 << 20)) == [Segment(84, 100, 0, 2)]
    assert room.part_bytes(Segment(84, 100, 0, 2), Rank(0)) == 4 * (8 + 16)
    assert room.needed(RowRange(96, 100)) == (Segment(92, 100, 0, 1), Segment(84, 100, 1, 2))
    open_end = rank_plan.for_rows(RowRange(96, None))
    assert open_end.cut(0, 100, range(2), Limits(1 << 20, 1 << 20)) == [Segment(0, 100, 0, 2)]


def test_where_not_all_rows_fit_they_are_cut_where_a_window_begins() -> None:
    """Rows before the window are small, so that more of them fit a slot."""
    spec = CacheSpec(
        {LayerId(0): [Component("k", "int8", 1, 1)], LayerId(1): [Component("k", "int8", 1, 9, window=10)]}
    )
    rank_plan = RankPlan.build(spec, [shard(spec)], shard(spec)).for_rows(RowRange(0, 100))
    cut = rank_plan.cut(0, 100, range(2), Limits(100, 1 << 20))
    assert cut == [Segment(0, 90, 0, 2), Segment(90, 100, 0, 2)]


def test_an_index_is_rows_like_any_others() -> None:
    """A sparse-attention index has a row per token, held whole by every rank."""
    kv = CacheSpec.kv(1, 2, 4, "bfloat16").layers[LayerId(0)]
    spec = CacheSpec.uniform(4, [*kv, Component("index", "float8_e4m3fn", 1, 132)])
    writers = [shard(spec, tp=2, rank=rank) for rank in range(2)]
    rank_plan = RankPlan.build(spec, writers, shard(spec))
    segment = Segment(0, 10, 0, 4)
    sent = [set(oracle.sent(parts, segment)) for parts in rank_plan.parts]
    assert not sent[0] & sent[1]
    assert sorted(sent[0] | sent[1]) == oracle.box(shard(spec), segment)
    assert [sum(c == "index" for c, *_ in cells) for cells in sent] == [20, 20]
