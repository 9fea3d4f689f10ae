"""The conformance suite for allocators: two that differ from the ring pass, and broken ones do not."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
from attrs import evolve

from disagg_kv.errors import ConfigurationError, LocalProtocolError, OversizeError
from disagg_kv.ids import VirtualOffset
from disagg_kv.staging import Lease, StagingAllocator
from disagg_kv.testing.allocator import ALIGNMENT, CAPACITY, LARGEST, Model, StagingAllocatorSuite


class FirstFit:
    """The lowest free place that is large enough, always: not the ring's order."""

    def __init__(self, capacity: int, alignment: int) -> None:
        self._capacity, self._alignment = capacity, alignment
        self._live: dict[int, Lease] = {}
        self._granted = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def alignment(self) -> int:
        return self._alignment

    @property
    def live_bytes(self) -> int:
        return sum(self.occupied(lease) for lease in self._live.values())

    def occupied(self, lease: Lease) -> int:
        """Its bytes, rounded up."""
        return -(-lease.nbytes // self._alignment) * self._alignment

    def place(self, nbytes: int) -> int | None:
        """The lowest free place."""
        at = 0
        for place in sorted(self._live):
            if at + nbytes <= place:
                break
            at = place + self.occupied(self._live[place])
        return at if at + nbytes <= self._capacity else None

    def start(self, place: int) -> VirtualOffset:
        """A virtual offset that was never used."""
        self._granted += 1
        return VirtualOffset(self._granted * self._capacity + place)

    def reserve(self, nbytes: int) -> Lease | None:
        if nbytes < 1:
            raise ConfigurationError(f"a lease of {nbytes} bytes")
        if nbytes > self._capacity:
            raise OversizeError("this buffer", nbytes, self._capacity)
        place = self.place(nbytes)
        if place is None:
            return None
        self._live[place] = lease = Lease(self.start(place), nbytes, self._capacity)
        return lease

    def release(self, lease: Lease) -> None:
        if lease.capacity != self._capacity:
            raise LocalProtocolError(f"{lease} is not from here")
        if self._live.get(lease.offset) == lease:
            del self._live[lease.offset]

    def check_integrity(self) -> None:
        for left, right in pairwise(sorted(self._live)):
            assert left + self._live[left].nbytes <= right, f"{self._live[left]} reaches {self._live[right]}"


class TestFirstFit(StagingAllocatorSuite):
    """It passes."""

    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        return FirstFit(capacity, alignment)


class Trusting(FirstFit):
    """What the mutants share; it checks nothing itself."""

    def check_integrity(self) -> None:
        """Nothing is checked."""


class Overlaps(Trusting):
    """It takes the end of a lease for free."""

    def occupied(self, lease: Lease) -> int:
        return max(super().occupied(lease) - self._alignment, self._alignment)


class Unaligned(Trusting):
    """It packs leases without rounding."""

    def occupied(self, lease: Lease) -> int:
        return lease.nbytes


class Straddles(Trusting):
    """It forgets the end of the buffer."""

    def place(self, nbytes: int) -> int | None:
        return max((at + self.occupied(one) for at, one in self._live.items()), default=self._alignment)


class SameStart(Trusting):
    """A start is the place, lap after lap."""

    def start(self, place: int) -> VirtualOffset:
        return VirtualOffset(place)


class Shorter(Trusting):
    """It gives less than was asked for."""

    def reserve(self, nbytes: int) -> Lease | None:
        return super().reserve(max(nbytes - 1, 1) if nbytes > 0 else nbytes)


class OtherCapacity(Trusting):
    """Its leases are of another buffer."""

    def reserve(self, nbytes: int) -> Lease | None:
        lease = super().reserve(nbytes)
        return lease and evolve(lease, capacity=2 * self._capacity)


class NeverReleases(Trusting):
    """Bytes never come back."""

    def release(self, lease: Lease) -> None:
        if lease.capacity != self._capacity:
            super().release(lease)


class InOrder(Trusting):
    """Bytes come back once all older leases have come back."""

    def __init__(self, capacity: int, alignment: int) -> None:
        super().__init__(capacity, alignment)
        self._done: list[Lease] = []

    def release(self, lease: Lease) -> None:
        if lease.capacity != self._capacity:
            super().release(lease)
        self._done.append(lease)
        for old in sorted(self._live.values(), key=lambda one: one.start):
            if old not in self._done:
                return
            super().release(old)


class Circle(Trusting):
    """A plain ring: nothing passes the oldest lease."""

    def __init__(self, capacity: int, alignment: int) -> None:
        super().__init__(capacity, alignment)
        self._head = 0

    def reserve(self, nbytes: int) -> Lease | None:
        size = -(-nbytes // self._alignment) * self._alignment
        start = self._head
        if start % self._capacity + size > self._capacity:
            start += self._capacity - start % self._capacity
        oldest = min((one.start for one in self._live.values()), default=start)
        if 0 < nbytes <= self._capacity and start + size > oldest + self._capacity:
            return None
        lease = super().reserve(nbytes)
        if lease is None:
            return None
        del self._live[lease.offset]
        lease = Lease(VirtualOffset(start), nbytes, self._capacity)
        self._live[lease.offset] = lease
        self._head = start + size
        return lease


class Splinters(Trusting):
    """It never joins pieces that were once cut."""

    def __init__(self, capacity: int, alignment: int) -> None:
        super().__init__(capacity, alignment)
        self._cuts: dict[int, int] = {}

    def place(self, nbytes: int) -> int | None:
        size = -(-nbytes // self._alignment) * self._alignment
        at = super().place(nbytes)
        for place in range(0, self._capacity, self._alignment):
            taken = any(one <= place < one + self.occupied(lease) for one, lease in self._live.items())
            if not taken and self._cuts.get(place, size) >= size and at is not None:
                free = all(
                    self._cuts.get(p, size) >= size and p not in self._live for p in range(place, place + size, 64)
                )
                if free and place + size <= self._capacity:
                    for p in range(place, place + size, self._alignment):
                        self._cuts[p] = size
                    return place
        return None


class ForgetsRelease(Trusting):
    """It counts bytes as live that have come back."""

    _counted = 0

    @property
    def live_bytes(self) -> int:
        self._counted = max(self._counted, super().live_bytes)
        return self._counted


class CountsTwice(Trusting):
    """A second release takes the place from the lease that has it now."""

    def release(self, lease: Lease) -> None:
        super().release(lease)
        self._live.pop(lease.offset, None)


class AnyBuffer(Trusting):
    """It takes a lease of another buffer for its own."""

    def release(self, lease: Lease) -> None:
        self._live.pop(lease.offset, None)


class RaisesWhenFull(Trusting):
    """It calls a full buffer an error."""

    def reserve(self, nbytes: int) -> Lease | None:
        lease = super().reserve(nbytes)
        if lease is None:
            raise OversizeError("this buffer", nbytes, 0)
        return lease


class WaitsForEver(Trusting):
    """It lets a request wait that can never be granted."""

    def reserve(self, nbytes: int) -> Lease | None:
        return None if nbytes > self._capacity else super().reserve(nbytes)


class AnySize(Trusting):
    """It takes a request for nothing."""

    def reserve(self, nbytes: int) -> Lease | None:
        return super().reserve(max(nbytes, 1))


class HalfOfIt(Trusting):
    """It never grants as much as an eighth."""

    def place(self, nbytes: int) -> int | None:
        return None if nbytes >= LARGEST else super().place(nbytes)


class Coarse(Trusting):
    """It says another capacity than it has."""

    @property
    def capacity(self) -> int:
        return self._capacity - self._alignment


START, RANDOM = "a_start_is_never_used_twice", "random_calls_never_give_a_byte_away_twice"
FULL, AGAIN = "a_full_buffer_says_wait_and_goes_on_after_a_release", "a_second_release_is_harmless"
MUTANTS: list[tuple[type[FirstFit], str, str]] = [
    (Overlaps, RANDOM, "shares bytes with|live leases have"),
    (Unaligned, RANDOM, "does not begin at a multiple of 64"),
    (Straddles, "live_leases_lie_apart_inside_the_buffer", "straddles the end of the buffer"),
    (SameStart, START, "begins where an earlier lease began"),
    (Shorter, START, "bytes were asked for"),
    (OtherCapacity, START, "is of a buffer of"),
    (NeverReleases, START, "gives no byte back"),
    (InOrder, FULL, "gives no byte back"),
    (Circle, "a_frozen_lease_never_stops_the_others", "there is no room for any other"),
    (Splinters, "small_leases_leave_no_splinters", "leases of an eighth, where 8 were before"),
    (ForgetsRelease, START, "gives no byte back"),
    (CountsTwice, AGAIN, "changes live_bytes"),
    (AnyBuffer, "a_lease_of_another_buffer_is_refused", "wanted a LocalProtocolError"),
    (RaisesWhenFull, FULL, "this buffer"),
    (WaitsForEver, "more_than_the_buffer_is_refused_with_both_sizes", "not refused"),
    (AnySize, "a_lease_of_nothing_is_refused", "wanted a ConfigurationError"),
    (HalfOfIt, "an_eighth_of_an_empty_buffer_is_one_lease", "no lease of 128 bytes"),
    (Coarse, "it_says_what_it_was_made_of", "a capacity of 960"),
]
"""Each mutant, the test that notices it, and what that says."""


@pytest.mark.parametrize(("kind", "test", "says"), MUTANTS, ids=[one[0].__name__ for one in MUTANTS])
def test_a_broken_allocator_is_noticed(kind: type[FirstFit], test: str, says: str) -> None:
    """By a test that says what is wrong; the sound one passes it."""

    class Suite(StagingAllocatorSuite):
        made: type[FirstFit] = FirstFit

        def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
            return self.made(capacity, alignment)

    class Broken(Suite):
        made = kind

    def call(suite: Suite) -> None:
        check = getattr(suite, f"test_{test}")
        more = {"seed": 0, "nbytes": 0, "before": 0}
        given = {name: more[name] for name in inspect.signature(check).parameters if name in more}
        check(Model(suite.allocator(CAPACITY, ALIGNMENT)), **given)

    call(Suite())
    with pytest.raises((AssertionError, OversizeError, pytest.fail.Exception), match=says):
        call(Broken())


def test_every_broken_allocator_is_run() -> None:
    """None is made and forgotten."""
    assert set(Trusting.__subclasses__()) == {one[0] for one in MUTANTS}


def test_the_suite_wants_an_allocator() -> None:
    """It has none of its own."""
    with pytest.raises(NotImplementedError):
        StagingAllocatorSuite().allocator(CAPACITY, ALIGNMENT)
