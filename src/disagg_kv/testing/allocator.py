"""What every :class:`StagingAllocator` must do: a suite to inherit. A ring has one more, and a state machine to run.

::

    class TestMine(StagingAllocatorSuite):
        def allocator(self, capacity, alignment):
            return MyAllocator(capacity, alignment)

    class TestMyRing(RingAllocatorSuite):
        def allocator(self, capacity, alignment):
            return MyRing(capacity, alignment)

    class MyMachine(AllocatorMachine):
        def allocator(self, capacity, alignment):
            return MyRing(capacity, alignment)

    TestMyMachine = MyMachine.TestCase

Needs pytest and hypothesis.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..errors import ConfigurationError, LocalProtocolError, OversizeError
from ..staging import Lease, StagingAllocator

CAPACITY = 1024
ALIGNMENT = 64
LARGEST = CAPACITY // 8
"""Bytes of the largest lease that a decode endpoint reserves: an eighth of the ring."""


def reserve(allocator: StagingAllocator, nbytes: int) -> Lease:
    """A lease that must be there."""
    lease = allocator.reserve(nbytes)
    assert lease is not None, f"no room for {nbytes} bytes"
    assert (lease.nbytes, lease.capacity) == (nbytes, allocator.capacity)
    allocator.check_integrity()
    return lease


def filled(allocator: StagingAllocator) -> list[Lease]:
    """Leases of the largest size, until there is no place for one more."""
    live: list[Lease] = []
    while (lease := allocator.reserve(LARGEST)) is not None:
        live.append(lease)
        allocator.check_integrity()
        assert len(live) <= CAPACITY // LARGEST, "more leases than bytes"
    return live


class StagingAllocatorSuite:
    """Promises of any allocator, whatever the places of its leases. Subclasses give ``allocator``."""

    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        """An empty allocator; ``capacity`` is a multiple of 8 times ``alignment``. It may align to more than that."""
        raise NotImplementedError

    @pytest.fixture
    def ring(self) -> StagingAllocator:
        """An empty allocator of 16 aligned places."""
        return self.allocator(CAPACITY, ALIGNMENT)

    def test_it_says_what_it_was_made_of(self, ring: StagingAllocator) -> None:
        """All of the capacity, aligned as was asked for or better; nothing is live."""
        assert ring.capacity == CAPACITY
        assert ring.alignment >= ALIGNMENT
        assert ring.alignment % ALIGNMENT == 0
        assert ring.live_bytes == 0

    def test_starts_are_aligned_and_never_used_twice(self, ring: StagingAllocator) -> None:
        """A late message about an ended lease is never taken for one about a live lease."""
        seen = set()
        for nbytes in (1, ALIGNMENT, ALIGNMENT + 1, LARGEST) * 50:
            lease = reserve(ring, nbytes)
            assert lease.start % ring.alignment == 0
            seen.add(lease.start)
            ring.release(lease)
        assert len(seen) == 200

    def test_live_leases_lie_apart_inside_the_buffer(self, ring: StagingAllocator) -> None:
        """As many as there are; none straddles the end."""
        for _ in range(20):
            live = filled(ring)
            spans = sorted((lease.offset, lease.offset + lease.nbytes) for lease in live)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert spans[-1][1] <= CAPACITY
            for lease in live:
                ring.release(lease)

    def test_an_eighth_of_an_empty_buffer_is_one_lease(self, ring: StagingAllocator) -> None:
        """The largest that endpoints ask for, again and again."""
        for _ in range(50):
            ring.release(reserve(ring, LARGEST))

    def test_a_full_buffer_says_wait_and_goes_on_after_a_release(self, ring: StagingAllocator) -> None:
        """Leases come back in any order, and their bytes at once."""
        live = filled(ring)
        assert len(live) >= 2
        for index in (len(live) // 2, 0, len(live) - 1):
            ring.release(live[index])
            live[index] = reserve(ring, LARGEST)
            assert ring.reserve(LARGEST) is None

    def test_live_bytes_are_those_of_live_leases(self, ring: StagingAllocator) -> None:
        """Rounding included; all come back."""
        first = reserve(ring, 1)
        assert 1 <= ring.live_bytes <= CAPACITY
        second = reserve(ring, LARGEST)
        assert LARGEST + 1 <= ring.live_bytes <= CAPACITY
        ring.release(first)
        ring.release(second)
        assert ring.live_bytes == 0

    def test_a_second_release_is_harmless(self, ring: StagingAllocator) -> None:
        """Also when another lease has the bytes since."""
        first = reserve(ring, LARGEST)
        ring.release(first)
        ring.release(first)
        live = filled(ring)
        before = ring.live_bytes
        ring.release(first)
        assert ring.live_bytes == before
        for lease in live:
            ring.release(lease)
        assert ring.live_bytes == 0

    def test_more_than_the_buffer_is_refused_with_both_sizes(self, ring: StagingAllocator) -> None:
        """For good, full or not."""
        with pytest.raises(OversizeError) as caught:
            ring.reserve(CAPACITY + 1)
        assert caught.value.asked == CAPACITY + 1
        assert LARGEST <= caught.value.capacity <= CAPACITY

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_a_lease_of_nothing_is_refused(self, ring: StagingAllocator, nbytes: int) -> None:
        """The number is in the message."""
        with pytest.raises(ConfigurationError, match=str(nbytes)):
            ring.reserve(nbytes)

    def test_a_lease_of_another_buffer_is_refused(self, ring: StagingAllocator) -> None:
        """Ours stays live."""
        reserve(ring, LARGEST)
        before = ring.live_bytes
        foreign = reserve(self.allocator(2 * CAPACITY, ALIGNMENT), ALIGNMENT)
        with pytest.raises(LocalProtocolError):
            ring.release(foreign)
        assert ring.live_bytes == before

    def test_a_frozen_lease_never_stops_the_others(self, ring: StagingAllocator) -> None:
        """It is a hole; twenty buffers of bytes pass beside it, some of them on their way at any time."""
        frozen = reserve(ring, LARGEST)
        moving: list[Lease] = []
        moved = 0
        while moved < 20 * CAPACITY:
            lease = ring.reserve(LARGEST)
            if lease is None:
                done = moving.pop(0)
                ring.release(done)
                moved += done.nbytes
            else:
                assert abs(lease.offset - frozen.offset) >= LARGEST
                moving.append(lease)
            ring.check_integrity()
        assert ring.tail == frozen.start

    def test_the_tail_is_the_oldest_live_lease(self, ring: StagingAllocator) -> None:
        """Whatever comes back in between."""
        first, second, third = (reserve(ring, ALIGNMENT) for _ in range(3))
        ring.release(second)
        assert ring.tail == first.start
        ring.release(first)
        assert ring.tail == third.start


class RingAllocatorSuite(StagingAllocatorSuite):
    """Promises of a ring: any run of free bytes is a lease, and leases follow one another around."""

    def test_leases_are_aligned_as_was_asked_for(self, ring: StagingAllocator) -> None:
        """And not coarser, which would waste bytes."""
        assert ring.alignment == ALIGNMENT

    def test_starts_only_grow_and_are_aligned(self, ring: StagingAllocator) -> None:
        """A start is never used again, over many laps."""
        last_end = 0
        for nbytes in (1, ALIGNMENT, ALIGNMENT + 1, CAPACITY // 2 - 1, CAPACITY) * 20:
            lease = reserve(ring, nbytes)
            assert lease.start >= last_end
            assert lease.start % ALIGNMENT == 0
            last_end = lease.end
            ring.release(lease)

    def test_a_lease_never_straddles_the_end(self, ring: StagingAllocator) -> None:
        """What does not fit before the end begins a new lap."""
        ring.release(reserve(ring, CAPACITY - ALIGNMENT))
        lease = reserve(ring, ALIGNMENT + 1)
        assert (lease.lap, lease.offset) == (1, 0)

    def test_the_whole_buffer_can_be_one_lease_wherever_the_head_is(self, ring: StagingAllocator) -> None:
        """An empty buffer has no place that is better than another."""
        ring.release(reserve(ring, 3 * ALIGNMENT))
        assert reserve(ring, CAPACITY).offset == 0

    def test_a_full_buffer_says_wait(self, ring: StagingAllocator) -> None:
        """After a release it grants leases again."""
        first = reserve(ring, ALIGNMENT)
        reserve(ring, CAPACITY - ALIGNMENT)
        assert ring.reserve(1) is None
        ring.release(first)
        assert reserve(ring, ALIGNMENT).offset == first.offset

    def test_bytes_come_back_in_any_order(self, ring: StagingAllocator) -> None:
        """A younger lease's bytes can be used while an older one is live."""
        leases = [reserve(ring, CAPACITY // 4) for _ in range(4)]
        for index in (2, 0, 3, 1):
            ring.release(leases[index])
            assert reserve(ring, CAPACITY // 4).offset == leases[index].offset

    def test_more_than_the_capacity_is_refused(self, ring: StagingAllocator) -> None:
        """And nothing less; both sizes are in the message."""
        with pytest.raises(OversizeError, match=str(CAPACITY)) as caught:
            ring.reserve(CAPACITY + 1)
        assert (caught.value.asked, caught.value.capacity) == (CAPACITY + 1, CAPACITY)

    def test_a_lease_of_another_ring_is_refused(self, ring: StagingAllocator) -> None:
        """Of another size, not granted yet, or in the place of one of ours; ours stays live."""
        reserve(ring, CAPACITY // 2)
        other, twin = self.allocator(2 * CAPACITY, ALIGNMENT), self.allocator(CAPACITY, ALIGNMENT)
        for foreign in (reserve(other, ALIGNMENT), reserve(twin, ALIGNMENT), reserve(twin, CAPACITY // 2)):
            with pytest.raises(LocalProtocolError, match="not from this ring"):
                ring.release(foreign)
        assert ring.reserve(CAPACITY // 2 + 1) is None

    def test_one_frozen_lease_never_stops_the_others(self, ring: StagingAllocator) -> None:
        """Later leases skip the frozen one, lap after lap."""
        reserve(ring, 5 * ALIGNMENT)
        frozen = reserve(ring, ALIGNMENT)
        for _ in range(100):
            lease = reserve(ring, 5 * ALIGNMENT)
            assert lease.offset + lease.nbytes <= frozen.offset or lease.offset >= frozen.offset + ALIGNMENT
            ring.release(lease)
        assert ring.tail == 0

    def test_a_request_of_twenty_buffers_passes_through(self, ring: StagingAllocator) -> None:
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

    def test_the_tail_is_the_head_where_nothing_is_live(self, ring: StagingAllocator) -> None:
        """Else the oldest live lease."""
        assert ring.tail == 0
        first, second, third = (reserve(ring, ALIGNMENT) for _ in range(3))
        ring.release(second)
        assert ring.tail == first.start
        ring.release(first)
        assert ring.tail == third.start
        ring.release(third)
        assert ring.tail == third.end


class AllocatorMachine(RuleBasedStateMachine):
    """For rings: random calls against a list that names the owner of every byte. Subclasses give ``allocator``."""

    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        """An empty allocator; ``capacity`` is a multiple of ``alignment``."""
        raise NotImplementedError

    @initialize(places=st.integers(1, 24), alignment=st.sampled_from([1, 2, 8]))
    def make(self, places: int, alignment: int) -> None:
        """Begin with an empty buffer."""
        self.capacity = places * alignment
        self.alignment = alignment
        self.ring = self.allocator(self.capacity, alignment)
        self.owners: list[Lease | None] = [None] * self.capacity
        self.live: list[Lease] = []
        self.ended: list[Lease] = []
        self.head = 0

    def expected(self, nbytes: int) -> int | None:
        """The first aligned start from the head on, at most one round away, whose bytes are free."""
        for start in range(self.head, self.head + self.capacity, self.alignment):
            place = start % self.capacity
            if place + nbytes <= self.capacity and not any(self.owners[place : place + nbytes]):
                return start
        return None

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """The lease is the next free run, or there is none."""
        nbytes = data.draw(st.integers(1, self.capacity))
        expected = self.expected(nbytes)
        lease = self.ring.reserve(nbytes)
        if expected is None:
            assert lease is None
            return
        assert lease is not None
        assert (lease.start, lease.nbytes, lease.capacity) == (expected, nbytes, self.capacity)
        assert (lease.offset, lease.lap) == (expected % self.capacity, expected // self.capacity)
        self.owners[lease.offset : lease.offset + nbytes] = [lease] * nbytes
        self.live.append(lease)
        self.head = -(-lease.end // self.alignment) * self.alignment

    @rule(more=st.integers(1, 100))
    def oversize(self, more: int) -> None:
        """What can never fit is refused and changes nothing."""
        with pytest.raises(OversizeError):
            self.ring.reserve(self.capacity + more)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any live lease gives its bytes back."""
        lease = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.ring.release(lease)
        self.owners[lease.offset : lease.offset + lease.nbytes] = [None] * lease.nbytes
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """A lease that has ended gives nothing back."""
        self.ring.release(data.draw(st.sampled_from(self.ended)))

    @invariant()
    def holds(self) -> None:
        """The allocator's own check agrees, and the tail is the oldest live start."""
        self.ring.check_integrity()
        assert self.ring.tail == (self.live[0].start if self.live else self.head)
