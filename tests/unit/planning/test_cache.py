"""What plans are remembered in."""

from __future__ import annotations

from disagg_kv.geometry import CacheSpec, Component, shard
from disagg_kv.ids import LayerId, Rank, RoomId
from disagg_kv.planning import InstancePlans, RowRange, plain_site
from disagg_kv.planning.cache import KEPT, PlanCache


def test_a_table_is_bounded_and_keeps_what_came_last() -> None:
    """A peer that asks ever other questions costs no memory."""
    table: PlanCache[int, str] = PlanCache()
    for question in range(3 * KEPT):
        assert table.keep(question, str(question)) == str(question)
        assert len(table) <= KEPT
        assert table[question] == str(question)


def test_plans_of_one_question_are_one_and_others_are_not_mistaken_for_them() -> None:
    """By rotation, window, writer and pool; a forgotten plan is made again, equal to the first."""
    spec = CacheSpec({LayerId(0): (Component("k", "int8", 4, 16), Component("v", "int8", 4, 16, window=8))})
    ours, target = [shard(spec, tp=2, rank=rank) for rank in range(2)], plain_site(spec, shard(spec), 64, 4)
    plans, sites = InstancePlans(ours, target), [plain_site(spec, one, 64, 4) for one in ours]
    one = plans.pair(0, Rank(0), sites[0], RowRange(0, 40))
    assert plans.pair(0, Rank(0), sites[0], RowRange(0, 40)) is one
    assert plans.pair(0, Rank(1), sites[1], RowRange(0, 40)).parts != one.parts
    other = plans.pair(0, Rank(0), sites[0], RowRange(0, 44))
    assert (one.rows, other.rows) == (RowRange(0, 40), RowRange(0, 44))
    assert one.source_view is not other.source_view
    for stop in range(41, 41 + 2 * KEPT):
        plans.pair(0, Rank(0), sites[0], RowRange(0, stop))
    again = plans.pair(0, Rank(0), sites[0], RowRange(0, 40))
    assert again is not one
    assert (again.parts, again.rows) == (one.parts, one.rows)


def test_the_rotation_of_a_room_is_within_the_period_of_the_election() -> None:
    """Two replicas of each head: a room has one of two rotations, always the same."""
    spec = CacheSpec.kv(2, 2, 8, "float16")
    plans = InstancePlans([shard(spec, tp=4, rank=rank) for rank in range(4)], plain_site(spec, shard(spec), 64, 4))
    rooms = [RoomId(b"%d" % number) for number in range(32)]
    assert {plans.rotation(room) for room in rooms} == {0, 1}
    assert [plans.rotation(room) for room in rooms] == [plans.rotation(room) for room in rooms]
