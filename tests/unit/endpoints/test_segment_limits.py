"""What cuts a chunk into segments."""

from __future__ import annotations

import pytest

from disagg_kv.endpoints.prefill.path_choice import PathRequest, segment_limits
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Rank
from disagg_kv.memory import PagedPool
from disagg_kv.planning import UNLIMITED, InstancePlans, Limits, PairPlan, RowRange

SPEC = CacheSpec.kv(2, 2, 8, "float16")
LIMITS = Limits(4096, 1 << 20, 4)


@pytest.mark.parametrize("uncut", [False, True])
def test_a_chunk_of_an_uncut_room_is_one_segment(uncut: bool) -> None:
    """Its ends are still those of pages. Writers cut alike, whatever their paths are: decode says what is uncut."""
    site = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4).site
    rows = RowRange(0, 1000)
    intake = InstancePlans((shard(SPEC),), site).intake(0).for_rows(rows)
    pair = PairPlan(site, site, intake.parts[0], rows)
    request = PathRequest(pair, intake, Rank(0), LIMITS, ("mapped", "staged"), True, 0, None, uncut)
    limits = segment_limits(request)
    assert limits.page_rows == 4
    assert (limits.slot_bytes == UNLIMITED.slot_bytes) is uncut
    assert (len(intake.segments(Rank(0), 0, 1000, limits)) == 1) is uncut
