"""Two planes share a byte exactly if a model that marks every byte says so."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Component, Group, PageTable, Plane, Site, check_planes, shard
from disagg_kv.geometry.overlap import Lattice, meet
from disagg_kv.ids import GroupId, LayerId

Axes = list[tuple[int, int]]


@st.composite
def lattices(draw: st.DrawFn) -> tuple[Axes, int]:
    """Nested strides: each covers what is inside it, with a gap or without one."""
    run = draw(st.integers(1, 6))
    axes: Axes = []
    extent = run
    for count in draw(st.lists(st.integers(1, 4), max_size=3)):
        stride = extent + draw(st.sampled_from((0, 0, 1, 3, 8)))
        axes.append((stride, count))
        extent += stride * (count - 1)
    return axes, run


def _bytes(axes: Axes, run: int, start: int) -> set[int]:
    starts = {start}
    for stride, count in axes:
        starts = {one + i * stride for one in starts for i in range(count)}
    return {one + i for one in starts for i in range(run)}


@given(lattices(), lattices(), st.integers(-40, 300))
def test_lattices_meet_exactly_where_a_model_has_a_common_byte(
    one: tuple[Axes, int], other: tuple[Axes, int], distance: int
) -> None:
    """Equal and unequal strides, with the axes in any order."""
    (axes, run), (others, length) = one, other
    want = bool(_bytes(axes, run, 0) & _bytes(others, length, distance))
    assert meet(Lattice.of(axes, run), Lattice.of(others[::-1], length), distance) == want


@given(lattices(), lattices(), st.integers(-40, 300))
def test_the_answer_does_not_depend_on_which_plane_is_first(
    one: tuple[Axes, int], other: tuple[Axes, int], distance: int
) -> None:
    """The order in which an engine names its planes is of no consequence."""
    a, b = Lattice.of(*one), Lattice.of(*other)
    assert meet(a, b, distance) == meet(b, a, -distance)


LAYERS = tuple(map(LayerId, range(3)))


@st.composite
def overlaid_sites(draw: st.DrawFn) -> Site:
    """One plane in each of up to three groups, of which most pairs have the same strides."""
    unit, most = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    names = [GroupId(name) for name in "abc"[: draw(st.integers(2, 3))]]
    groups, planes = [], []
    strides = draw(st.permutations([(unit, 2), (unit * 2, 3)]))
    page = draw(st.sampled_from([unit * 6, unit * 6 + 1, unit]))
    for layer, name in zip(LAYERS, names, strict=False):
        groups.append(Group(name, draw(st.integers(1, 3)), draw(st.integers(1, most))))
        row, units = (stride for stride, _ in strides)
        factor = draw(st.sampled_from([1, 1, 1, 2]))
        inner = max(row * 3, units * 3) if page == unit else 1
        offset = draw(st.sampled_from([0, 0, 0, 1, unit, page, 6 * unit]))
        planes.append(Plane(layer, "k", name, 0, offset, page * factor, row * inner, units * inner))
    spec = CacheSpec({layer: [Component("k", "int8", 2, unit)] for layer in LAYERS[: len(names)]})
    return Site(spec, shard(spec), groups, planes, (1 << 12,), overlaid=True)


def _pages(site: Site, plane: Plane) -> list[set[int]]:
    """The bytes of each page, marked one by one."""
    unit_bytes, rows = site.spec.component(plane.layer, plane.component).unit_bytes, site.page_rows(plane)
    return [
        {
            plane.offset + page * plane.page_stride + row * plane.row_stride + unit * plane.unit_stride + byte
            for row, unit, byte in itertools.product(range(rows), range(2), range(unit_bytes))
        }
        for page in range(site.group(plane.group).pages)
    ]


@given(overlaid_sites())
def test_overlaid_planes_are_accepted_exactly_where_they_share_bytes_page_by_page(site: Site) -> None:
    """A page that one group has is never in a page of another id of another group."""
    try:
        site.check()
    except GeometryError:
        return  # a plane overlaps itself
    crossing = any(
        one & two
        for a, b in itertools.combinations(site.planes, 2)
        for (i, one), (j, two) in itertools.product(enumerate(_pages(site, a)), enumerate(_pages(site, b)))
        if i != j or a.page_stride != b.page_stride
    )
    event(f"crossing: {crossing}")
    if crossing:
        with pytest.raises(GeometryError, match="not page by page"):
            check_planes(site)
    else:
        check_planes(site)


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), min_size=2, max_size=3), st.booleans())
def test_a_page_has_one_owner_exactly_where_groups_are_overlaid(tables: list[list[int]], overlaid: bool) -> None:
    """Page 0 is the null page of the first two groups, and a page like others of the third."""
    names = [GroupId(name) for name in "abc"[: len(tables)]]
    spec = CacheSpec({layer: [Component("k", "int8", 1, 1)] for layer in LAYERS[: len(names)]})
    groups = [Group(name, 1, 13, None if name == "c" else 0) for name in names]
    planes = [Plane(layer, "k", name, 0, 0, 1, 1, 1) for layer, name in zip(LAYERS, names, strict=False)]
    site = Site(spec, shard(spec), groups, planes, (13,), overlaid)
    given_ = [PageTable(name, pages) for name, pages in zip(names, tables, strict=True)]
    owned = [page for name, pages in zip(names, tables, strict=True) for page in pages if page or name == "c"]
    if overlaid and len(set(owned)) < len(owned):
        with pytest.raises(GeometryError, match=r"page \d+ is in group '.' and in group '.', which are overlaid"):
            site.check_owners(given_)
    else:
        site.check_owners(given_)
