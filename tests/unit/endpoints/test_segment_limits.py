"""What cuts a chunk into segments, by the paths that decode allows and what prefill's kernels are."""

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


@pytest.mark.parametrize(
    ("allowed", "how", "cut"),
    [
        (["mapped"], "queued", False),
        (["mapped"], "", True),
        (["mapped", "staged"], "queued", True),
        (["direct"], "queued", True),
        (["mapped", "of-a-third-party"], "queued", True),
        (["mapped_pull"], "queued", False),
        (["mapped_pull"], "", True),
        (["mapped", "mapped_pull"], "queued", False),
        (["mapped_pull", "staged"], "queued", True),
        ([], "queued", True),
        (["mapped", "staged", "mapped_pull"], "queued, uncut", False),
        (["mapped", "staged", "mapped_pull"], "uncut", True),
    ],
)
def test_only_where_all_writers_copy_into_mapped_pages_on_a_device_a_chunk_is_one_segment(
    allowed: Sequence[str], how: str, cut: bool
) -> None:
    """Writers of other paths cut alike: a segment is the same for all. Its ends are still those of pages."""
    site = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4).site
    intake = InstancePlans((shard(SPEC),), site).intake(0).for_rows(RowRange(0, 1000))
    usable = [paths()[name] for name in ("mapped", "mapped_pull", "staged", "direct")]
    pair, uncut = PairPlan(site, site, intake.parts[0], RowRange(0, 1000)), "uncut" in how
    request = PathRequest(pair, intake, Rank(0), LIMITS, tuple(allowed), True, 0, None, uncut)
    limits = segment_limits(request, usable, "queued" in how, 1 << 18)
    assert limits.page_rows == 4
    assert (limits.slot_bytes == UNLIMITED.slot_bytes) is not cut
    assert (len(intake.segments(Rank(0), 0, 1000, limits)) == 1) is not cut


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("allowed", [["mapped_pull"], ["staged", "mapped_pull"]])
def test_where_decode_may_pull_a_frame_carries_the_page_ids_of_a_segment(allowed: Sequence[str], queued: bool) -> None:
    """Four groups of pages of one row fit, whatever the pages of a writer are."""
    site = PagedPool.allocate(SPEC, shard(SPEC), pages=4, page_size=4).site
    intake = InstancePlans((shard(SPEC),), site).intake(0).for_rows(RowRange(0, 1 << 20))
    usable = [paths()[name] for name in ("staged", "mapped_pull")]
    rows, most = RowRange(0, 1 << 20), Limits(1 << 30, 1 << 30, 4)
    request = PathRequest(PairPlan(site, site, intake.parts[0], rows), intake, Rank(0), most, tuple(allowed), True, 0)
    limits = segment_limits(request, usable, queued, 1 << 18)
    assert limits.rows == 1 << 14
    cut = intake.segments(Rank(0), 0, 1 << 20, limits)
    assert max(segment.rows for segment in cut) <= 1 << 14
