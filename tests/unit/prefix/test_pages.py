"""The free list of pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.errors import CapacityError, ConfigurationError, LocalProtocolError
from disagg_kv.prefix import PageAllocator


def test_pages_go_out_in_the_order_in_which_they_came() -> None:
    """First those of the constructor, then those given back."""
    pages = PageAllocator([3, 1, 2])
    assert pages.take(2).tolist() == [3, 1]
    pages.give([1])
    pages.give([3])
    assert pages.take(3).tolist() == [2, 1, 3]
    assert pages.free == 0


@given(st.data())
def test_every_page_is_either_free_or_taken_once(data: st.DataObject) -> None:
    """Against a plain set."""
    total = data.draw(st.integers(0, 12))
    pages = PageAllocator(range(total))
    taken: set[int] = set()
    for _ in range(data.draw(st.integers(0, 20))):
        if data.draw(st.booleans()):
            got = pages.take(data.draw(st.integers(0, pages.free))).tolist()
            assert taken.isdisjoint(got)
            taken.update(got)
        else:
            back = data.draw(st.sets(st.sampled_from(sorted(taken)))) if taken else set()
            pages.give(back)
            taken -= back
        pages.check_integrity()
        assert pages.free == total - len(taken)


def test_more_than_are_free_is_refused() -> None:
    """With the numbers, and nothing is taken."""
    pages = PageAllocator(range(4))
    pages.take(3)
    with pytest.raises(CapacityError, match="2 pages requested, 1 of 4 are free"):
        pages.take(2)
    with pytest.raises(ConfigurationError, match="pages asked must be at least 0, not -1"):
        pages.take(-1)
    assert pages.free == 1


@pytest.mark.parametrize("back", [[0], [9], [1, 1]], ids=["free", "stranger", "twice"])
def test_a_page_that_is_not_out_is_refused_and_none_is_taken_back(back: list[int]) -> None:
    """So that no page is ever in two tables."""
    pages = PageAllocator([1, 0])
    pages.take(1)
    with pytest.raises(LocalProtocolError, match=str(back[0])):
        pages.give([1, *back] if back == [0] else back)
    assert pages.free == 1


@pytest.mark.parametrize("ids", [[1, 1], [-1]])
def test_the_list_itself_must_be_sound(ids: list[int]) -> None:
    """Each page once, none negative."""
    with pytest.raises(ConfigurationError, match="distinct and not negative"):
        PageAllocator(ids)
