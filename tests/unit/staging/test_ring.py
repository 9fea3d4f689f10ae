"""The ring: the conformance suite, and what is the ring's own."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError, LocalProtocolError, OversizeError
from disagg_kv.staging import ALIGNMENT, Lease, RingStagingAllocator, StagingAllocator
from disagg_kv.testing.allocator import CAPACITY, StagingAllocatorSuite

PLACE = 64
"""Bytes to which the small ring of these tests is aligned."""


def reserve(ring: RingStagingAllocator, nbytes: int) -> Lease:
    """A lease that must be there."""
    lease = ring.reserve(nbytes)
    assert lease is not None, f"no room for {nbytes} bytes"
    ring.check_integrity()
    return lease


class TestRing(StagingAllocatorSuite):
    """Any run of free bytes is a lease, and leases follow one another around."""

    @pytest.fixture
    def ring(self) -> RingStagingAllocator:
        return RingStagingAllocator(CAPACITY, PLACE)

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
        assert ring.live_bytes == 3 * ALIGNMENT
        ring.release(second)
        assert ring.live_bytes == ALIGNMENT
        ring.release(first)
        assert ring.live_bytes == 0

    def test_leases_are_aligned_as_was_asked_for(self, ring: RingStagingAllocator) -> None:
        """And not coarser, which would waste bytes."""
        assert ring.alignment == PLACE

    def test_starts_only_grow_and_are_aligned(self, ring: RingStagingAllocator) -> None:
        """A start is never used again, over many laps."""
        last_end = 0
        for nbytes in (1, PLACE, PLACE + 1, CAPACITY // 2 - 1, CAPACITY) * 20:
            lease = reserve(ring, nbytes)
            assert lease.start >= last_end
            assert lease.start % PLACE == 0
            last_end = lease.end
            ring.release(lease)

    def test_a_lease_never_straddles_the_end(self, ring: RingStagingAllocator) -> None:
        """What does not fit before the end begins a new lap."""
        ring.release(reserve(ring, CAPACITY - PLACE))
        lease = reserve(ring, PLACE + 1)
        assert (lease.start, lease.offset) == (CAPACITY, 0)

    def test_the_whole_buffer_can_be_one_lease_wherever_the_head_is(self, ring: RingStagingAllocator) -> None:
        """An empty buffer has no place that is better than another."""
        ring.release(reserve(ring, 3 * PLACE))
        assert reserve(ring, CAPACITY).offset == 0

    def test_a_full_buffer_says_wait(self, ring: RingStagingAllocator) -> None:
        """After a release it grants leases again."""
        first = reserve(ring, PLACE)
        reserve(ring, CAPACITY - PLACE)
        assert ring.reserve(1) is None
        ring.release(first)
        assert reserve(ring, PLACE).offset == first.offset

    def test_bytes_come_back_in_any_order(self, ring: RingStagingAllocator) -> None:
        """A younger lease's bytes can be used while an older one is live."""
        leases = [reserve(ring, CAPACITY // 4) for _ in range(4)]
        for index in (2, 0, 3, 1):
            ring.release(leases[index])
            assert reserve(ring, CAPACITY // 4).offset == leases[index].offset

    def test_more_than_the_capacity_is_refused(self, ring: RingStagingAllocator) -> None:
        """And nothing less; both sizes are in the message."""
        with pytest.raises(OversizeError, match=str(CAPACITY)) as caught:
            ring.reserve(CAPACITY + 1)
        assert (caught.value.asked, caught.value.capacity) == (CAPACITY + 1, CAPACITY)

    def test_a_lease_of_another_ring_is_refused(self, ring: RingStagingAllocator) -> None:
        """Of another size, not granted yet, or in the place of one of ours; ours stays live."""
        reserve(ring, CAPACITY // 2)
        other, twin = RingStagingAllocator(2 * CAPACITY, PLACE), RingStagingAllocator(CAPACITY, PLACE)
        for foreign in (reserve(other, PLACE), reserve(twin, PLACE), reserve(twin, CAPACITY // 2)):
            with pytest.raises(LocalProtocolError, match="not from this ring"):
                ring.release(foreign)
        assert ring.reserve(CAPACITY // 2 + 1) is None

    def test_one_frozen_lease_never_stops_the_others(self, ring: RingStagingAllocator) -> None:
        """Later leases skip the frozen one, lap after lap."""
        reserve(ring, 5 * PLACE)
        frozen = reserve(ring, PLACE)
        for _ in range(100):
            lease = reserve(ring, 5 * PLACE)
            assert lease.offset + lease.nbytes <= frozen.offset or lease.offset >= frozen.offset + PLACE
            ring.release(lease)

    def test_a_request_of_twenty_buffers_passes_through(self, ring: RingStagingAllocator) -> None:
        """In segments, some of which are on their way at any time."""
        moving: list[Lease] = []
        moved = 0
        while moved < 20 * CAPACITY:
            lease = ring.reserve(CAPACITY // 8)
            if lease is None:
                done = moving.pop(0)
                ring.release(done)
                moved += done.nbytes
            else:
                moving.append(lease)
            ring.check_integrity()
