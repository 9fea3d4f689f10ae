"""The ring: the conformance suite, and what is the ring's own."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError
from disagg_kv.staging import ALIGNMENT, RingStagingAllocator, StagingAllocator
from disagg_kv.testing.allocator import RingAllocatorSuite


class TestRing(RingAllocatorSuite):
    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        return RingStagingAllocator(capacity, alignment)

    @pytest.mark.parametrize(("capacity", "alignment"), [(0, 256), (-256, 256), (257, 256), (128, 256), (256, 0)])
    def test_a_capacity_that_is_not_whole_places_is_refused(self, capacity: int, alignment: int) -> None:
        with pytest.raises(ConfigurationError, match=f"ring of {capacity} bytes.*{alignment}"):
            RingStagingAllocator(capacity, alignment)

    def test_occupancy_counts_leases_and_their_bytes_as_rounded(self) -> None:
        ring = RingStagingAllocator(4 * ALIGNMENT)
        first = ring.reserve(1)
        second = ring.reserve(ALIGNMENT + 1)
        assert first is not None
        assert second is not None
        assert (ring.live, ring.live_bytes) == (2, 3 * ALIGNMENT)
        ring.release(second)
        assert (ring.live, ring.live_bytes) == (1, ALIGNMENT)
        ring.release(first)
        assert (ring.live, ring.live_bytes) == (0, 0)
