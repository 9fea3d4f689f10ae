"""What a decode rank takes in, by example, and what is refused."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError, GeometryError, OversizeError
from disagg_kv.geometry import CacheSpec, Shard, shard, stages
from disagg_kv.ids import LayerId, Rank
from disagg_kv.planning import Limits, RankPlan, Segment

SPEC = CacheSpec.kv(4, 2, 8, "int8")  # a row of a head is 16 bytes a layer
BOTH = [shard(SPEC, tp=2, rank=r) for r in range(2)]


def test_a_lease_is_writer_major_and_aligned() -> None:
    """Offsets and the whole are multiples of the alignment; sizes are not padded."""
    rank_plan = RankPlan.build(SPEC, BOTH, shard(SPEC))
    segment = Segment(0, 5, 0, 4)
    assert rank_plan.part_bytes(segment, Rank(1)) == 5 * 4 * 16
    assert rank_plan.lease(segment) == ({0: (0, 320), 1: (512, 320)}, 1024)
    assert rank_plan.lease(segment, 64) == ({0: (0, 320), 1: (320, 320)}, 640)


def test_rows_are_cut_at_pages_near_equally_but_for_short_ends() -> None:
    """At absolute multiples of the page, whatever row the cut begins at; the wire idles only at the ends."""
    rank_plan = RankPlan.build(SPEC, BOTH, shard(SPEC))
    cut = rank_plan.cut(5, 40, range(4), Limits(64 * 17, 1 << 20, 8))
    assert [(s.start, s.stop) for s in cut] == [(5, 8), (8, 24), (24, 32), (32, 40)]
    plain = rank_plan.cut(5, 40, range(4), Limits(64 * 17, 1 << 20, 32))
    assert [(s.start, s.stop) for s in plain] == [(5, 11), (11, 23), (23, 34), (34, 40)]
    assert rank_plan.cut(5, 5, range(4), Limits(1, 1)) == []


def test_the_lease_limits_rows_too() -> None:
    """Two writers' parts of 256 bytes fill a lease of 512: padding counts."""
    rank_plan = RankPlan.build(SPEC, BOTH, shard(SPEC))
    cut = rank_plan.cut(0, 8, range(4), Limits(1 << 20, 512))
    assert [s.rows for s in cut] == [2, 4, 2]


def test_layers_are_cut_only_where_no_row_fits() -> None:
    """As few runs as possible; each run's rows are cut on their own."""
    rank_plan = RankPlan.build(SPEC, BOTH, shard(SPEC))
    cut = rank_plan.cut(0, 2, range(4), Limits(48, 1 << 20))
    assert cut == [Segment(0, 1, 0, 3), Segment(1, 2, 0, 3), Segment(0, 2, 3, 4)]


@pytest.mark.parametrize(
    ("slot", "lease", "what", "asked"), [(15, 4096, "staging slot", 16), (4096, 511, "staging lease", 512)]
)
def test_one_row_of_one_layer_that_does_not_fit_is_refused(slot: int, lease: int, what: str, asked: int) -> None:
    """For good, with both sizes."""
    rank_plan = RankPlan.build(SPEC, BOTH, shard(SPEC))
    message = f"{what}, for one row of layer 0: {asked} bytes requested, but there are only {min(slot, lease)}"
    with pytest.raises(OversizeError, match=message):
        rank_plan.cut(0, 2, range(4), Limits(slot, lease))


def test_a_single_row_that_only_one_replica_sends_fits_where_two_would_not() -> None:
    """Replicas that share a layer by rows do not all have a share of one row."""
    spec = CacheSpec.mla(1, 16, "int8")
    rank_plan = RankPlan.build(spec, [shard(spec)] * 3, shard(spec))
    cut = rank_plan.cut(0, 3, range(1), Limits(16, 256))
    assert [s.rows for s in cut] == [1, 1, 1]
    assert [[*rank_plan.lease(s)[0]] for s in cut] == [[2]] * 3


def test_ranges_are_stages_split_where_layers_are_missing() -> None:
    """The target's layers 0, 1 and 3 from two stages of two layers."""
    ours = [shard(SPEC, layers=stage) for stage in stages(SPEC, 2)]
    target = shard(SPEC, layers=[LayerId(0), LayerId(1), LayerId(3)])
    rank_plan = RankPlan.build(SPEC, ours, target)
    assert rank_plan.ranges(Rank(0)) == (range(2),)
    assert rank_plan.ranges(Rank(1)) == (range(3, 4),)
    assert rank_plan.stages == (range(2), range(3, 4))
    assert rank_plan.part_bytes(Segment(0, 1, 0, 2), Rank(1)) == 0
    gap = RankPlan.build(SPEC, [shard(SPEC)], target)
    assert gap.ranges(Rank(0)) == (range(2), range(3, 4))


def test_stages_that_overlap_are_split_where_the_writers_change() -> None:
    """Every writer of a segment holds all of its layers, so that all of them cut it alike."""
    ours = [shard(SPEC, layers=map(LayerId, range(3))), shard(SPEC, layers=map(LayerId, range(1, 4)))]
    rank_plan = RankPlan.build(SPEC, ours, shard(SPEC))
    assert rank_plan.ranges(Rank(0)) == (range(1), range(1, 3))
    assert rank_plan.ranges(Rank(1)) == (range(1, 3), range(3, 4))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(0, 1, 1, 3), r"layers \[1, 3\) are not a run within one of \[0, 2\), \[2, 4\)"),
        (Segment(0, 1, 0, 5), r"layers \[0, 5\) are not"),
        (Segment(0, 1, 1, 1), r"layers \[1, 1\) are not"),
        (Segment(0, 1, -1, 1), r"layers \[-1, 1\) are not"),
        (Segment(3, 3, 0, 1), r"a segment of rows \[3, 3\)"),
        (Segment(-1, 3, 0, 1), r"a segment of rows \[-1, 3\)"),
    ],
)
def test_segments_from_the_wire_are_checked(segment: Segment, message: str) -> None:
    """Decode trusts no range."""
    rank_plan = RankPlan.build(SPEC, [shard(SPEC, layers=stage) for stage in stages(SPEC, 2)], shard(SPEC))
    with pytest.raises(GeometryError, match=message):
        rank_plan.validate(segment)
    rank_plan.validate(Segment(0, 1, 2, 4))


def test_cuts_that_make_no_sense_are_refused() -> None:
    """Before anything is computed."""
    rank_plan = RankPlan.build(SPEC, BOTH, shard(SPEC))
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ConfigurationError, match="cannot cut rows"):
            rank_plan.cut(start, stop, range(4), Limits(99, 999))
    for page, alignment in ((0, 1), (1, 0)):
        with pytest.raises(GeometryError, match=f"at pages of {page} rows, parts aligned to {alignment} "):
            Limits(99, 999, page, alignment)
    with pytest.raises(GeometryError, match=r"layers \[2, 6\) are not"):
        rank_plan.cut(0, 2, range(2, 6), Limits(99, 999))


def test_a_target_without_layers_is_refused() -> None:
    """There is nothing to plan."""
    with pytest.raises(GeometryError, match="the target holds no layers"):
        RankPlan.build(SPEC, BOTH, Shard([]))


def test_rows_that_fit_stay_one_segment_though_they_end_inside_a_page() -> None:
    """40 rows on pages of 16 are one write, not two."""
    spec = CacheSpec.kv(2, 4, 8, "float32")
    rank_plan = RankPlan.build(spec, [shard(spec)], shard(spec))
    assert rank_plan.cut(0, 40, range(2), Limits(1 << 20, 1 << 20, 16)) == [Segment(0, 40, 0, 2)]
