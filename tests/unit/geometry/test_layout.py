"""Page tables and planes that do not fit are refused before anything is written."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from disagg_kv.errors import ConfigurationError, GeometryError
from disagg_kv.geometry import CacheSpec, Component, Group, PageTable, Plane, Site, shard
from disagg_kv.ids import GroupId, LayerId
from disagg_kv.memory import PagedPool

KV = GroupId("kv")
GROUP = Group(KV, 4, 10, null_page=0)
SPEC = CacheSpec.kv(1, 2, 3, "int8")


def _site(**change: Any) -> Site:
    k = Plane(LayerId(0), "k", KV, 0, 0, 24, 6, 3)
    v = Plane(LayerId(0), "v", KV, 1, 0, 24, 3, 12)
    return Site(SPEC, shard(SPEC), [GROUP], [attrs.evolve(k, **change), v], [240, 240])


def test_a_table_keeps_the_callers_page_ids_without_a_copy() -> None:
    """A plan holds views of page ids."""
    pages = np.array([3, 1], np.int32)
    assert PageTable(KV, pages).pages is pages


def test_a_table_without_a_group_is_of_the_group_of_pools_that_name_none() -> None:
    """From any kind of list, and with a first row."""
    assert PageTable([3, 0, 2]) == PageTable("kv", [3, 0, 2], 0)
    assert PageTable(np.array([3, 0, 2]), first=8) == PageTable("kv", [3, 0, 2], 8)
    assert PageTable(range(2)) == PageTable(group="kv", pages=[0, 1])
    pool = PagedPool.allocate(SPEC, shard(SPEC), pages=2, page_size=4)
    PageTable([1, 0]).check(pool.site.group("kv"), 0, 8)


@pytest.mark.parametrize("given", [("kv",), ([1], [2]), (3,), (None,), ([1], "kv")])
def test_a_table_of_something_else_is_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"page ids must be|page table: group: text is needed"):
        PageTable(*given)


@pytest.mark.parametrize(
    ("pages", "first", "rows", "message"),
    [
        ([1, 2], 0, (0, 9), "rows up to 9, but 2 pages end at 8"),
        ([1, 2], 4, (0, 8), "rows from 0 on, but the table begins at 4"),
        ([1, 2], 2, (2, 8), "a table begins at row 2, not at a page of 4 rows"),
        ([1, 2], -4, (0, 2), "a table begins at row -4"),
        ([1, 10], 0, (0, 8), "page 10 of 10"),
        ([1, 2, 1], 0, (0, 8), "a page is in the table twice"),
        ([1, 0], 0, (0, 8), "row 4 is needed, but it lies in the null page"),
        ([0, 0, 1], 4, (5, 13), "row 5 is needed, but it lies in the null page"),
    ],
)
def test_a_table_that_does_not_have_the_rows(pages: list[int], first: int, rows: tuple[int, int], message: str) -> None:
    """Page ids out of range or twice, and token counts beyond the pages."""
    with pytest.raises(GeometryError, match=message):
        PageTable(KV, pages, first).check(GROUP, *rows)


def test_tables_that_fit() -> None:
    """Rows up to the last slot; and no pages for no rows."""
    PageTable(KV, [9, 1], 4).check(GROUP, 5, 12)
    PageTable(KV, []).check(GROUP, 0, 0)
    PageTable(KV, [0]).check(Group(KV, 4, 1), 0, 4)


def test_the_null_page_may_hold_rows_that_are_not_needed() -> None:
    """As often as it likes, before and after them; other pages stay distinct."""
    table = PageTable(KV, [0, 0, 3, 4, 0], 4)
    table.check(GROUP, 4, 20, 12)
    table.check(GROUP, 12, 20)
    table.check(GROUP, 4, 4)
    with pytest.raises(GeometryError, match="row 11 is needed, but it lies in the null page"):
        table.check(GROUP, 4, 20, 11)
    with pytest.raises(GeometryError, match="row 20 is needed"):
        table.check(GROUP, 12, 21)
    with pytest.raises(GeometryError, match="twice"):
        PageTable(KV, [0, 3, 3, 0]).check(GROUP, 4, 12)


@pytest.mark.parametrize("pages", [[[1]], [1.0], [-1], [2**31], ["1"]])
def test_what_is_no_page_id(pages: npt.ArrayLike) -> None:
    """They are whole numbers from 0 to 2^31-1, in a flat list."""
    with pytest.raises(GeometryError, match="page ids must be"):
        PageTable(KV, pages)


def test_groups_that_cannot_be() -> None:
    """Sizes are positive; a site knows its groups."""
    with pytest.raises(GeometryError, match="'kv': 0 pages of 4 rows"):
        Group(KV, 4, 0)
    with pytest.raises(GeometryError, match=r"no group 'x'; there are \['kv'\]"):
        _site().group(GroupId("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 1}, "layer 0, 'k': ends at byte 241 of a buffer of 240"),
        ({"offset": -1}, "the offset not negative"),
        ({"row_stride": 0}, "strides must be positive"),
        ({"row_stride": 5}, "a stride of 5 bytes makes cells of 6 bytes overlap"),
        ({"page_stride": 23}, "a stride of 23 bytes makes cells of 24 bytes overlap"),
        ({"unit_stride": 2}, "overlap"),
        ({"buffer": 2}, "buffer 2 of 2"),
        ({"group": GroupId("x")}, "no group 'x'"),
        ({"component": "v"}, "do not match the shard"),
        ({"component": "q"}, "do not match the shard"),
    ],
)
def test_planes_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    """Overlapping cells, bytes outside a buffer, planes that the shard does not have."""
    _site().check()
    with pytest.raises(GeometryError, match=message):
        _site(**change).check()


def test_strides_of_axes_with_one_cell_do_not_matter() -> None:
    """Engines leave any number in them."""
    spec = CacheSpec.mla(1, 3, "int8")
    plane = Plane(LayerId(0), "latent", KV, 0, 0, 12, 3, 1)
    Site(spec, shard(spec), [GROUP], [plane], [120]).check()


STATES = CacheSpec.uniform(1, [Component("k", "int8", 2, 3), Component("ssm", "int8", 2, 3, 0, rows=4)])


def _hybrid(group: GroupId, rows: int) -> Site:
    """A plane of tokens, and one of states in ``group``, whose slots have ``rows`` rows."""
    planes = [Plane(LayerId(0), "k", KV, 0, 0, 24, 6, 3), Plane(LayerId(0), "ssm", group, 1, 0, 24, 6, 3)]
    return Site(STATES, shard(STATES), [GROUP, Group(GroupId("state"), rows, 5)], planes, [240, 240])


def test_states_lie_in_slots_of_a_group_of_their_own() -> None:
    """A slot may have more rows than a state needs, never fewer; a page of tokens is no slot."""
    site = _hybrid(GroupId("state"), 6)
    site.check()
    assert site.state_groups == {"state"}
    assert site.token_groups == (GROUP,)
    assert [site.page_rows(plane) for plane in site.planes] == [4, 4]
    with pytest.raises(GeometryError, match="layer 0, 'ssm': a state of 4 rows in slots of 3"):
        _hybrid(GroupId("state"), 3).check()
    with pytest.raises(GeometryError, match=r"group 'kv' has pages of tokens \('k'\) and of states"):
        _hybrid(KV, 6).check()
