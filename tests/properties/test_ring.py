"""The ring under random calls, against a list that names the owner of every byte."""

from __future__ import annotations

from disagg_kv.staging import RingStagingAllocator, StagingAllocator
from disagg_kv.testing.allocator import AllocatorMachine


class RingMachine(AllocatorMachine):
    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        return RingStagingAllocator(capacity, alignment)


TestRingMachine = RingMachine.TestCase
