"""The ring under random calls, against a list that names the owner of every byte."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from disagg_kv.staging import Lease, RingStagingAllocator, StagingAllocator
from disagg_kv.testing.allocator import AllocatorMachine


class RingMachine(AllocatorMachine):
    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        return RingStagingAllocator(capacity, alignment)


TestRingMachine = RingMachine.TestCase


class Forgetful(RingStagingAllocator):
    """Gives the bytes of the oldest lease away when it is full."""

    def reserve(self, nbytes: int) -> Lease | None:
        lease = super().reserve(nbytes)
        if lease is None:
            self.release(next(iter(self._live.values())))
            return self.reserve(nbytes)
        return lease


class ForgetfulMachine(AllocatorMachine):
    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        return Forgetful(capacity, alignment)


def test_the_machine_finds_an_allocator_that_gives_bytes_away_twice() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ForgetfulMachine, settings=settings(database=None, print_blob=False))
