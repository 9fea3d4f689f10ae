"""An allocator that another project wrote against the Protocol alone serves a decode endpoint."""

from __future__ import annotations

import pytest

from disagg_kv.errors import ConfigurationError, LocalProtocolError, OversizeError
from disagg_kv.geometry import CacheSpec
from disagg_kv.ids import VirtualOffset
from disagg_kv.staging import Lease, StagingAllocator
from disagg_kv.testing.allocator import StagingAllocatorSuite
from tests.support.rig import Rig, tp_shards

SPEC = CacheSpec.kv(2, 4, 8, "float16")
SLOTS = 8


class SlotAllocator:
    """Slots of one size: any free one will do, and each lease takes a whole one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = capacity // SLOTS
        self._free = list(range(SLOTS))
        self._taken: dict[int, Lease] = {}
        self.granted = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def alignment(self) -> int:
        return self._size

    @property
    def live_bytes(self) -> int:
        return self._size * len(self._taken)

    def reserve(self, nbytes: int) -> Lease | None:
        if nbytes < 1:
            raise ConfigurationError(f"a lease of {nbytes} bytes")
        if nbytes > self._size:
            raise OversizeError("a slot", nbytes, self._size)
        if not self._free:
            return None
        slot = self._free.pop()
        self.granted += 1
        start = VirtualOffset(self.granted * self._capacity + slot * self._size)
        self._taken[slot] = lease = Lease(start, nbytes, self._capacity)
        return lease

    def release(self, lease: Lease) -> None:
        if lease.capacity != self._capacity:
            raise LocalProtocolError(f"{lease} is not from here")
        slot = lease.offset // self._size
        if self._taken.get(slot) == lease:
            del self._taken[slot]
            self._free.append(slot)

    def check_integrity(self) -> None:
        assert sorted([*self._free, *self._taken]) == list(range(SLOTS))


class TestSlots(StagingAllocatorSuite):
    """The suite for allocators that are no rings."""

    def allocator(self, capacity: int, alignment: int) -> StagingAllocator:
        return SlotAllocator(capacity)


def test_slots_carry_a_transfer() -> None:
    """More segments than slots, from two prefill ranks to one decode rank: every byte is there, no slot stays taken."""
    made: list[SlotAllocator] = []

    def slots(capacity: int) -> StagingAllocator:
        made.append(SlotAllocator(capacity))
        return made[-1]

    rig = Rig(SPEC)
    prefills = rig.prefill(tp_shards(SPEC, 2), strategy="staged", slot_bytes=1024)
    decodes = rig.decode(tp_shards(SPEC, 1), strategy="staged", ring_bytes=1 << 14, allocator=slots)
    for number in range(3):
        rig.request(f"room {number}", prefills, decodes, 40).start().landed()
    (allocator,) = made
    assert allocator.granted > SLOTS
    assert allocator.live_bytes == decodes[0].endpoint.usage().ring_used_bytes == 0
    rig.quiet()


@pytest.mark.parametrize("allocator", [lambda capacity: None, 3])
def test_what_is_no_allocator_is_refused(allocator: object) -> None:
    """Before anything is registered or bound."""
    rig = Rig(SPEC)
    with pytest.raises(ConfigurationError, match="allocator"):
        rig.decode(tp_shards(SPEC, 1), allocator=allocator)  # type: ignore[arg-type]
