"""Coverage says what a set of cells says."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.geometry import Coverage

Rectangle = tuple[int, int, int, int]
rectangles = st.builds(
    lambda start, rows, first, layers: (start, start + rows, first, first + layers),
    st.integers(0, 25),
    st.integers(1, 8),
    st.integers(0, 9),
    st.integers(1, 5),
)


def _cells(rectangle: Rectangle) -> set[tuple[int, int]]:
    start, stop, first, last = rectangle
    return {(row, layer) for row in range(start, stop) for layer in range(first, last)}


def check(coverage: Coverage) -> None:
    """Bands do not overlap, none could be part of another one, and each has runs of rows that do not touch."""
    for band in coverage._bands:
        edges = [edge for pair in zip(band.starts, band.stops, strict=True) for edge in pair]
        assert edges == sorted(set(edges)) != [], band
        assert band.first < band.last, band
    for a, b in pairwise(coverage._bands):
        assert a.last <= b.first, (a, b)
        assert a.last < b.first or (a.starts, a.stops) != (b.starts, b.stops), (a, b)


@given(st.lists(rectangles, max_size=30), st.lists(rectangles, min_size=1, max_size=10))
def test_it_answers_as_a_set_of_cells_would(added: list[Rectangle], asked: list[Rectangle]) -> None:
    """Whatever order segments land in, and however often."""
    coverage, model = Coverage(), set[tuple[int, int]]()
    for rectangle in added:
        coverage.add(*rectangle)
        check(coverage)
        model |= _cells(rectangle)
    for rectangle in [*asked, *added]:
        assert coverage.contains(*rectangle) == (_cells(rectangle) <= model)
        assert coverage.overlaps(*rectangle) == bool(_cells(rectangle) & model)


@given(st.integers(1, 20), st.integers(1, 8), st.randoms())
def test_a_grid_of_segments_in_any_order_ends_as_one_rectangle(rows: int, layers: int, random: Random) -> None:
    """Stages land independently of each other."""
    pieces = [(3 * r, 3 * r + 3, layer, layer + 1) for r in range(rows) for layer in range(layers)]
    random.shuffle(pieces)
    coverage = Coverage()
    for piece in pieces:
        assert not coverage.overlaps(*piece)
        coverage.add(*piece)
    check(coverage)
    assert coverage.contains(0, 3 * rows, 0, layers)
