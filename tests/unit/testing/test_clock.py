"""The clock that stands still."""

from __future__ import annotations

import pytest

from disagg_kv.testing import FakeClock


def test_time_passes_only_when_told() -> None:
    """And never back."""
    clock = FakeClock(5.0)
    assert [clock(), clock()] == [5.0, 5.0]
    clock.advance(0.25)
    assert clock() == 5.25
    with pytest.raises(AssertionError):
        clock.advance(-1.0)
