"""How many writes pages take, and when whole pages cannot be exchanged."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, PageTable, Shard, Site, elect, shard
from disagg_kv.ids import GroupId
from disagg_kv.planning import PairPlan, Segment, Writes, coalesce, direct_writes, plain_site, slice_writes
from disagg_kv.planning.descriptors import Tables, _byte_runs

KV = GroupId("kv")
Planner = Callable[[PairPlan, Segment, Tables, Tables], Writes]
SPEC = CacheSpec.kv(2, 4, 8, "int8")
WHOLE = Segment(0, 32, 0, 2)


def _tables(*pages: int, first: int = 0) -> Tables:
    return {KV: PageTable(KV, pages, first)}


def _pair(spec: CacheSpec, ours: Shard, theirs: Shard) -> tuple[Site, Site]:
    return plain_site(spec, ours, 64, 8), plain_site(spec, theirs, 64, 8)


def test_slices_are_one_write_per_row_and_plane() -> None:
    """Units that follow one another on both sides go together; in HND every unit is on its own."""
    ours = shard(SPEC, tp=2, rank=1)
    (parts,) = elect(SPEC, [ours], ours)
    nhd, hnd = (plain_site(SPEC, ours, 64, 8, order) for order in ("NHD", "HND"))
    tables = _tables(4, 1, 7, 2)
    writes = slice_writes(PairPlan(nhd, nhd, parts), WHOLE, tables, tables)
    assert len(writes) == 32 * 4
    assert set(writes.nbytes.tolist()) == {16}
    writes = slice_writes(PairPlan(nhd, hnd, parts), WHOLE, tables, tables)
    assert len(writes) == 32 * 4 * 2
    assert set(writes.nbytes.tolist()) == {8}


def test_pages_that_follow_one_another_on_both_sides_are_one_write() -> None:
    """3, 4, 5 to 1, 2, 6 is two runs in each of the four planes, and 7 is a third one."""
    (parts,) = elect(SPEC, [shard(SPEC)], shard(SPEC))
    here, there = _pair(SPEC, shard(SPEC), shard(SPEC))
    writes = direct_writes(PairPlan(here, there, parts), WHOLE, _tables(3, 4, 5, 7), _tables(1, 2, 6, 0))
    assert sorted(writes.nbytes.tolist()) == [256] * 8 + [512] * 4
    half = direct_writes(
        PairPlan(here, there, parts), Segment(13, 30, 1, 2), _tables(3, 4, 5, first=8), _tables(1, 2, 6, first=8)
    )
    assert sorted(half.nbytes.tolist()) == [6 * 32] * 2 + [11 * 32] * 2


def test_part_of_a_page_of_hnd_is_one_write_per_unit() -> None:
    """And a whole page is one."""
    (parts,) = elect(SPEC, [shard(SPEC)], shard(SPEC))
    site = plain_site(SPEC, shard(SPEC), 64, 8, "HND")
    writes = direct_writes(PairPlan(site, site, parts), Segment(0, 12, 0, 1), _tables(3, 5), _tables(4, 1))
    assert sorted(writes.nbytes.tolist()) == [32] * 8 + [256] * 2


def test_why_whole_pages_cannot_be_exchanged() -> None:
    """The reason has the numbers."""
    half, whole = shard(SPEC, tp=2, rank=0), shard(SPEC)
    (all_parts,) = elect(SPEC, [whole], whole)
    (some,) = elect(SPEC, [whole], half)
    small, large = plain_site(SPEC, whole, 64, 8), plain_site(SPEC, whole, 64, 16)
    hnd = plain_site(SPEC, whole, 64, 8, "HND")
    assert PairPlan(small, large, all_parts).direct_refusal == "layer 0, 'k': pages of 8 rows here and of 16 rows there"
    assert PairPlan(small, plain_site(SPEC, half, 64, 8), some).direct_refusal == (
        "layer 0, 'k': 2 units to send, but rows have 4 units here and 2 there"
    )
    assert PairPlan(small, hnd, all_parts).direct_refusal == "layer 0, 'k': rows are 32 bytes apart here and 8 there"
    with pytest.raises(GeometryError, match="direct: layer 0, 'k': rows are 32 bytes apart"):
        direct_writes(PairPlan(small, hnd, all_parts), WHOLE, _tables(0, 1, 2, 3), _tables(0, 1, 2, 3))
    assert PairPlan(small, small, all_parts).direct_refusal is None
    assert PairPlan(small, small, ()).direct_refusal is None


def test_strides_that_nothing_uses_are_no_reason() -> None:
    """NHD and HND are the same with one row in a page or with one unit in a row."""
    (parts,) = elect(SPEC, [shard(SPEC)], shard(SPEC))
    nhd, hnd = (plain_site(SPEC, shard(SPEC), 64, 1, order) for order in ("NHD", "HND"))
    assert PairPlan(nhd, hnd, parts).direct_refusal is None
    spec = CacheSpec.mla(1, 4, "int8")
    (parts,) = elect(spec, [shard(spec)], shard(spec))
    nhd, hnd = (plain_site(spec, shard(spec), 64, 8, order) for order in ("NHD", "HND"))
    assert PairPlan(nhd, hnd, parts).direct_refusal is None


def test_units_with_other_strides_are_a_reason() -> None:
    """A pool may pad its units."""
    (parts,) = elect(SPEC, [shard(SPEC)], shard(SPEC))
    here, there = _pair(SPEC, shard(SPEC), shard(SPEC))
    wide = [attrs.evolve(p, row_stride=32, unit_stride=16, page_stride=512) for p in there.planes]
    there = attrs.evolve(there, planes=wide)
    assert PairPlan(here, there, parts).direct_refusal == "layer 0, 'k': units are 8 bytes apart here and 16 there"


@pytest.mark.parametrize("plan", [slice_writes, direct_writes])
def test_page_tables_are_checked_before_anything_is_planned(plan: Planner) -> None:
    """Missing, too short, out of range or twice, on either side."""
    (parts,) = elect(SPEC, [shard(SPEC)], shard(SPEC))
    here, there = _pair(SPEC, shard(SPEC), shard(SPEC))
    good = _tables(0, 1, 2, 3)
    for bad, message in (
        ({}, r"no page table for group 'kv'; there are \[\]"),
        (_tables(0, 1, 2), "rows up to 32, but 3 pages end at 24"),
        (_tables(0, 1, 2, 8), "page 8 of 8"),
        (_tables(0, 1, 2, 2), "a page is in the table twice"),
        (_tables(1, 2, 3, first=8), "rows from 0 on, but the table begins at 8"),
    ):
        for ours, theirs in ((bad, good), (good, bad)):
            with pytest.raises(GeometryError, match=message):
                plan(PairPlan(here, there, parts), WHOLE, ours, theirs)


def test_offsets_beyond_four_gigabytes() -> None:
    """Addresses are 64 bits wide."""
    spec = CacheSpec.mla(1, 1 << 20, "int8")
    site = plain_site(spec, shard(spec), 8192, 1)
    (parts,) = elect(spec, [shard(spec)], shard(spec))
    for plan in (slice_writes, direct_writes):
        writes = plan(PairPlan(site, site, parts), Segment(0, 1, 0, 1), _tables(8191), _tables(5000))
        assert (writes.local_off.tolist(), writes.remote_off.tolist()) == ([8191 << 20], [5000 << 20])


def test_what_is_kept_of_a_plan_cannot_be_changed() -> None:
    """The runs of bytes of so many rows are made once, for every later segment too."""
    for kept in _byte_runs(4, 64, 2, 32, 8):
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 1


def test_batches_are_renamed_and_summed() -> None:
    """Buffer numbers become region ids; an empty batch stays one."""
    one = Writes.one(0, 10, 1, 20, 30)
    renamed = one.renamed(np.array([7], np.int32), np.array([8, 9], np.int32))
    assert renamed == Writes.one(7, 10, 9, 20, 30)
    assert renamed.total() == 30
    empty = slice_writes(PairPlan(*_pair(SPEC, shard(SPEC), shard(SPEC)), ()), WHOLE, {}, {})
    assert len(empty) == len(coalesce(empty)) == empty.total() == 0
