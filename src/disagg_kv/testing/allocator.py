"""What every :class:`StagingAllocator` must do: a suite to inherit.

::

    class TestMine(StagingAllocatorSuite):
        def allocator(self, capacity, alignment):
            return MyAllocator(capacity, alignment)

It tests the contract: leases share no byte, are aligned, lie inside the buffer, come back in any order and at once, and
one that never comes back stops no other. Where an allocator puts a lease is its own affair. Needs only pytest.
"""

from __future__ import annotations

import random

import pytest

from ..errors import ConfigurationError, LocalProtocolError, OversizeError
from ..staging import Lease, StagingAllocator
from .pair import refused

CAPACITY = 1024
ALIGNMENT = 64
LARGEST = CAPACITY // 8
"""Bytes of the largest lease that a decode endpoint reserves: an eighth of the ring."""

STEPS = 400
"""Random calls of one run."""


class Model:
    """Calls an allocator, and knows which bytes it has given away.

    Args:
        allocator: an empty one.
    """

    def __init__(self, allocator: StagingAllocator) -> None:
        self.allocator = allocator
        self.live: list[Lease] = []
        self._starts: set[int] = set()

    def reserve(self, nbytes: int) -> Lease | None:
        """A lease, checked against all others."""
        allocator = self.allocator
        lease = allocator.reserve(nbytes)
        if lease is None:
            return None
        assert lease.nbytes == nbytes, f"{lease}: {nbytes} bytes were asked for"
        assert lease.capacity == allocator.capacity, f"{lease} is of a buffer of {allocator.capacity} bytes"
        assert lease.start % allocator.alignment == 0, f"{lease} does not begin at a multiple of {allocator.alignment}"
        assert lease.offset + nbytes <= allocator.capacity, f"{lease} straddles the end of the buffer"
        assert lease.start not in self._starts, f"{lease} begins where an earlier lease began"
        for other in self.live:
            apart = lease.offset + nbytes <= other.offset or other.offset + other.nbytes <= lease.offset
            assert apart, f"{lease} shares bytes with {other}, which is live"
        self._starts.add(lease.start)
        self.live.append(lease)
        self._count()
        return lease

    def need(self, nbytes: int) -> Lease:
        """A lease that must be there."""
        lease = self.reserve(nbytes)
        assert lease is not None, f"no lease of {nbytes} bytes beside {self.live}"
        return lease

    def fill(self) -> None:
        """Leases of the largest size until there is no place for one more."""
        while self.reserve(LARGEST) is not None:
            pass

    def release(self, lease: Lease) -> None:
        """One that is live."""
        before = self.allocator.live_bytes
        self.live.remove(lease)
        self.allocator.release(lease)
        assert self.allocator.live_bytes < before, f"releasing {lease} gives no byte back"
        self._count()

    def release_all(self) -> None:
        """Every live lease."""
        for lease in tuple(self.live):
            self.release(lease)

    def _count(self) -> None:
        self.allocator.check_integrity()
        asked, counted = sum(lease.nbytes for lease in self.live), self.allocator.live_bytes
        assert asked <= counted <= CAPACITY, f"live_bytes is {counted}; live leases have {asked} bytes of {CAPACITY}"
        assert self.live or not counted, f"live_bytes is {counted}, but no lease is live"


class StagingAllocatorSuite:
    """Promises of any allocator. Subclasses give ``allocator``."""

    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        """An empty allocator; ``capacity`` is a multiple of 8 times ``alignment``. It may align to more than that."""
        raise NotImplementedError

    @pytest.fixture
    def model(self) -> Model:
        """An empty allocator of 16 aligned places, and what is known of it."""
        return Model(self.allocator(CAPACITY, ALIGNMENT))

    def test_it_says_what_it_was_made_of(self, model: Model) -> None:
        """All of the capacity, aligned as was asked for or better; nothing is live."""
        found = model.allocator
        assert found.capacity == CAPACITY, f"a capacity of {found.capacity} instead of {CAPACITY}"
        aligned = found.alignment >= ALIGNMENT and found.alignment % ALIGNMENT == 0
        assert aligned, f"an alignment of {found.alignment}, which is no multiple of {ALIGNMENT}"
        assert found.live_bytes == 0, f"{found.live_bytes} live bytes before the first lease"

    def test_a_start_is_never_used_twice(self, model: Model) -> None:
        """A late message about an ended lease is never taken for one about a live lease."""
        for nbytes in (1, ALIGNMENT, ALIGNMENT + 1, LARGEST) * 50:
            model.release(model.need(nbytes))

    def test_live_leases_lie_apart_inside_the_buffer(self, model: Model) -> None:
        """As many as there are; then they all come back."""
        for _ in range(20):
            model.fill()
            assert 2 <= len(model.live) <= 8, f"{len(model.live)} leases of an eighth of the buffer"
            model.release_all()

    @pytest.mark.parametrize("seed", range(8))
    def test_random_calls_never_give_a_byte_away_twice(self, model: Model, seed: int) -> None:
        """Any sizes, in any order; after each call the accounts add up. At last the buffer is as good as new."""
        draw = random.Random(seed)
        for _ in range(STEPS):
            if model.live and draw.random() < 0.5:
                model.release(draw.choice(model.live))
            else:
                model.reserve(draw.randint(1, LARGEST))
        model.release_all()
        model.need(LARGEST)

    def test_an_eighth_of_an_empty_buffer_is_one_lease(self, model: Model) -> None:
        """The largest that endpoints ask for, again and again, also after smaller ones."""
        for nbytes in range(1, LARGEST, 7):
            model.release(model.need(nbytes))
            model.release(model.need(LARGEST))

    def test_small_leases_leave_no_splinters(self, model: Model) -> None:
        """Once they have come back, in any order, an eighth is one lease again, as often as before."""
        model.fill()
        whole = len(model.live)
        model.release_all()
        for seed in range(5):
            while model.reserve(ALIGNMENT) is not None:
                pass
            random.Random(seed).shuffle(model.live)
            model.release_all()
            model.fill()
            assert len(model.live) == whole, f"{len(model.live)} leases of an eighth, where {whole} were before"
            model.release_all()

    def test_a_full_buffer_says_wait_and_goes_on_after_a_release(self, model: Model) -> None:
        """Leases come back in any order, and their bytes at once."""
        model.fill()
        for place in (len(model.live) // 2, 0, len(model.live) - 1):
            model.release(model.live[place])
            model.need(LARGEST)
            assert model.reserve(LARGEST) is None, "a full buffer gives a lease"

    def test_a_second_release_is_harmless(self, model: Model) -> None:
        """Also when another lease has the bytes since."""
        first = model.need(LARGEST)
        model.release(first)
        model.allocator.release(first)
        model.fill()
        before = model.allocator.live_bytes
        model.allocator.release(first)
        after = model.allocator.live_bytes
        assert after == before, f"a second release of {first} changes live_bytes from {before} to {after}"
        assert model.reserve(LARGEST) is None, f"a second release of {first} gives bytes of another lease away"
        model.release_all()

    def test_more_than_the_buffer_is_refused_with_both_sizes(self, model: Model) -> None:
        """For good, full or not."""
        for _ in range(2):
            with refused(OversizeError, "a request for more than the buffer") as found:
                model.allocator.reserve(CAPACITY + 1)
            asked, capacity = found[0].asked, found[0].capacity
            assert asked == CAPACITY + 1, f"the error says that {asked} bytes were asked for, not {CAPACITY + 1}"
            assert LARGEST <= capacity <= CAPACITY, f"the error says that {capacity} bytes are the most"
            model.fill()

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_a_lease_of_nothing_is_refused(self, model: Model, nbytes: int) -> None:
        """With a ConfigurationError."""
        with refused(ConfigurationError, f"a request for {nbytes} bytes") as found:
            model.allocator.reserve(nbytes)
        assert str(nbytes) in str(found[0]), f"the error does not name the {nbytes} bytes: {found[0]}"

    def test_a_lease_of_another_buffer_is_refused(self, model: Model) -> None:
        """Ours stays live."""
        model.need(LARGEST)
        before = model.allocator.live_bytes
        foreign = self.allocator(2 * CAPACITY, ALIGNMENT).reserve(ALIGNMENT)
        assert foreign is not None, "an empty allocator gives no lease"
        with refused(LocalProtocolError, "releasing a lease of another buffer"):
            model.allocator.release(foreign)
        assert model.allocator.live_bytes == before, "a refused release changes live_bytes"

    @pytest.mark.parametrize("before", range(4))
    def test_a_frozen_lease_never_stops_the_others(self, model: Model, before: int) -> None:
        """It is a hole; twenty buffers of bytes pass beside it, some of them on their way at any time."""
        for _ in range(before):
            model.need(ALIGNMENT)
        frozen = model.need(LARGEST)
        moved = 0
        while moved < 20 * CAPACITY:
            if model.reserve(LARGEST) is None:
                moving = [lease for lease in model.live if lease is not frozen]
                assert moving, f"beside one frozen lease, {frozen}, there is no room for any other"
                moved += moving[0].nbytes
                model.release(moving[0])
