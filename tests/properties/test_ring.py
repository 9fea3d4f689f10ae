"""The ring under random calls, against a list that names the owner of every byte."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from disagg_kv.errors import OversizeError
from disagg_kv.staging import Lease, RingStagingAllocator


class RingMachine(RuleBasedStateMachine):
    """Random calls against a list that names the owner of every byte."""

    made = RingStagingAllocator

    @initialize(places=st.integers(1, 24), alignment=st.sampled_from([1, 2, 8]))
    def make(self, places: int, alignment: int) -> None:
        """Begin with an empty buffer."""
        self.capacity = places * alignment
        self.alignment = alignment
        self.ring = self.made(self.capacity, alignment)
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
        assert lease.offset == expected % self.capacity
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
        """The allocator's own check agrees."""
        self.ring.check_integrity()


TestRingMachine = RingMachine.TestCase


class Forgetful(RingStagingAllocator):
    """Gives the bytes of the oldest lease away when it is full."""

    def reserve(self, nbytes: int) -> Lease | None:
        lease = super().reserve(nbytes)
        if lease is None:
            self.release(next(iter(self._live.values())))
            return self.reserve(nbytes)
        return lease


class ForgetfulMachine(RingMachine):
    made = Forgetful


def test_the_machine_finds_an_allocator_that_gives_bytes_away_twice() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ForgetfulMachine, settings=settings(database=None, print_blob=False))
