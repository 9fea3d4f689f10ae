"""What cuts a chunk into segments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg_kv.endpoints.prefill.path_choice import PathRequest, segment_limits
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Rank
from disagg_kv.memory import PagedPool
from disagg_kv.planning import UNLIMITED, InstancePlans, Limits, PairPlan, RowRange
from disagg_kv.strategies import paths

SPEC = CacheSpec.kv(2, 2, 8, "float16")
LIMITS = Limits(4096, 1 << 20, 4)


@pytest.mark.parametrize("uncut", [False, True])
def test_a_chunk_of_an_uncut_room_is_one_segment(uncut: bool) -> None:
    """Its ends are still those of pages. Writers cut alike, whatever their paths are: decode says what is uncut."""
    site = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4).site
    rows = RowRange(0, 1000)
    intake = InstancePlans((shard(SPEC),), site).intake(0).for_rows(rows)
    usable, pair = [paths()[name] for name in ("mapped", "staged")], PairPlan(site, site, intake.parts[0], rows)
    request = PathRequest(pair, intake, Rank(0), LIMITS, ("mapped", "staged"), True, 0, None, uncut)
    limits = segment_limits(request, usable, 1 << 18)
    assert limits.page_rows == 4
    assert (limits.slot_bytes == UNLIMITED.slot_bytes) is uncut
    assert (len(intake.segments(Rank(0), 0, 1000, limits)) == 1) is uncut


@pytest.mark.parametrize("uncut", [False, True])
@pytest.mark.parametrize("allowed", [["mapped_pull"], ["staged", "mapped_pull"]])
def test_where_decode_may_pull_a_frame_carries_the_page_ids_of_a_segment(allowed: Sequence[str], uncut: bool) -> None:
    """Four groups of pages of one row fit, whatever the pages of a writer are."""
    site = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4).site
    intake = InstancePlans((shard(SPEC),), site).intake(0).for_rows(RowRange(0, 1 << 20))
    usable = [paths()[name] for name in ("staged", "mapped_pull")]
    rows, most = RowRange(0, 1 << 20), Limits(1 << 30, 1 << 30, 4)
    request = PathRequest(
        PairPlan(site, site, intake.parts[0], rows), intake, Rank(0), most, tuple(allowed), True, 0, None, uncut
    )
    limits = segment_limits(request, usable, 1 << 18)
    assert limits.rows == 1 << 14
    cut = intake.segments(Rank(0), 0, 1 << 20, limits)
    assert max(segment.rows for segment in cut) <= 1 << 14
