"""What has landed: the answers at the edges, and the size."""

from __future__ import annotations

import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import Coverage


def test_nothing_has_landed_at_first() -> None:
    """An empty rectangle is in even so, and overlaps nothing."""
    coverage = Coverage()
    assert not coverage.contains(0, 1, 0, 1)
    assert coverage.contains(5, 5, 0, 64)
    assert coverage.contains(0, 9, 3, 3)
    assert not coverage.overlaps(5, 5, 0, 64)
    assert not coverage.overlaps(0, 9, 3, 3)


@pytest.mark.parametrize("rectangle", [(0, 0, 0, 1), (2, 1, 0, 1), (-1, 1, 0, 1), (0, 1, 1, 1), (0, 1, -1, 1)])
def test_what_is_no_rectangle_is_refused(rectangle: tuple[int, int, int, int]) -> None:
    """And changes nothing."""
    coverage = Coverage()
    with pytest.raises(GeometryError, match="are not a rectangle of the cache"):
        coverage.add(*rectangle)
    assert not coverage.overlaps(0, 100, 0, 100)


def test_segments_in_order_cost_constant_memory() -> None:
    """Thousands of segments over layer groups end as one band with one interval."""
    coverage = Coverage()
    for chunk in range(500):
        for group in range(8):
            coverage.add(chunk * 16, chunk * 16 + 16, group * 8, group * 8 + 8)
            assert len(coverage._bands) <= 2
            assert all(len(band.starts) == 1 for band in coverage._bands)
    assert len(coverage._bands) == 1
    assert coverage.contains(0, 8000, 0, 64)
