"""Staging slots of a prefill rank. :attr:`Slot.reusable` decides when a slot may be reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from attrs import define, field

from ...ids import Epoch

W = TypeVar("W", bound=Hashable)
"""A write."""


@define(eq=False)
class Slot(Generic[W]):
    """A part of the staging buffer. A pin is a write that may still read it; the gather that fills it holds it, too."""

    offset: int
    pins: dict[W, Epoch] = field(factory=dict)
    filling: bool = False

    @property
    def reusable(self) -> bool:
        """No gather writes to it, and no posted write may still read it."""
        return not self.pins and not self.filling


class StagingSlots(Generic[W]):
    """All slots of one endpoint.

    One destination pins at most a quarter of them, so a slow one never delays the others.

    Args:
        nbytes: size of the staging buffer.
        slot_bytes: size of one slot.
    """

    def __init__(self, nbytes: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots = [Slot[W](at) for at in range(0, nbytes - slot_bytes + 1, slot_bytes)]
        self.quota = max(1, len(self._slots) // 4)
        self._pins: Counter[Epoch] = Counter()

    def __iter__(self) -> Iterator[Slot[W]]:
        return iter(self._slots)

    @property
    def held(self) -> int:
        """Slots that may not be reused yet."""
        return sum(not slot.reusable for slot in self._slots)

    def reusable(self) -> Slot[W] | None:
        """A slot that may be reused; None: there is none."""
        for slot in self._slots:
            if slot.reusable:
                return slot
        return None

    def full(self, to: Epoch) -> bool:
        """Whether a destination pins as many slots as it may."""
        return self._pins[to] >= self.quota

    def pin(self, slot: Slot[W], write: W, to: Epoch) -> None:
        """A write to a destination will read this slot."""
        slot.pins[write] = to
        self._pins[to] += 1

    def unpin(self, slot: Slot[W], write: W) -> None:
        """The write does not read the slot any more, whatever became of it."""
        to = slot.pins.pop(write)
        self._pins[to] -= 1
        if not self._pins[to]:
            del self._pins[to]

    def check_integrity(self) -> None:
        """Raise AssertionError if the number of pins contradicts the slots."""
        towards = Counter(to for slot in self._slots for to in set(slot.pins.values()))
        assert towards == self._pins, (towards, self._pins)
