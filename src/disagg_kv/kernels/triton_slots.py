"""Slots for the arguments of calls in flight: pinned memory on the host, and its copy on the GPU."""

from __future__ import annotations

import threading
from collections import deque

import torch
from attrs import define

from ..geometry import I64
from .cuda_queue import Mark

SLOTS = 128
"""Slots of one allocation: to allocate pinned memory may wait for all of the GPU, so calls in flight must not do it."""

SLOT_WORDS = 4096
"""Words of a slot of the usual size, which nearly all calls fit."""

LARGE_WORDS = SLOTS * SLOT_WORDS // 4
"""Words of one allocation for larger calls, unless a single one needs more."""

MOST_PREPARED = SLOTS // 2
"""Most slots that wait for their launch. Slots of the usual size are left for calls that are launched at once. Slots
of a larger size may all wait; such a call then allocates more."""


@define(eq=False)
class ArgumentSlot:
    """One call's arguments, on both sides; free again when ``event`` has fired."""

    pinned: torch.Tensor
    words: I64
    source: int
    device: torch.Tensor
    addr: int
    event: Mark | None = None


class ArgumentSlots:
    """The slots of one kernel on one GPU; any thread.

    Args:
        device: the GPU.
        stream: slots are allocated on it. Nothing of the engine's is queued there that may still use the memory.
    """

    def __init__(self, device: str, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._lock = threading.Lock()
        self._prepared = 0
        self._slots: dict[int, deque[ArgumentSlot]] = {SLOT_WORDS: deque(self._cut(SLOT_WORDS, SLOTS))}

    @property
    def counts(self) -> list[int]:
        """Slots of each size that are not in use by the host."""
        return [len(slots) for slots in self._slots.values()]

    def take(self, words: int) -> ArgumentSlot:
        """A slot that no launch reads, for at least that many words."""
        size = _size(words)
        with self._lock:
            slots = self._slots.setdefault(size, deque())
            slot = _free(slots)
        if slot is None:
            # Of larger ones a few at once, or none would be left for what is prepared.
            slot, *others = self._cut(size, SLOTS if size == SLOT_WORDS else max(1, LARGE_WORDS // size))
            slots.extend(others)
        return slot

    def spare(self, words: int) -> ArgumentSlot | None:
        """The same, but None where there is none: nothing is allocated."""
        with self._lock:
            return _free(self._slots.get(_size(words), deque()))

    @property
    def may_prepare(self) -> bool:
        """Whether one more slot may wait for its launch."""
        return self._prepared < MOST_PREPARED

    def prepared(self, more: int) -> None:
        """Count ``more`` slots as waiting for their launch; negative: fewer."""
        with self._lock:
            self._prepared += more

    def give(self, slot: ArgumentSlot, event: Mark | None) -> None:
        """Return a slot that is read until ``event``. Takes no lock: a finalizer may call it while a lock is held."""
        slot.event = event
        self._slots[len(slot.words)].append(slot)

    @torch.inference_mode(False)
    def _cut(self, words: int, count: int) -> list[ArgumentSlot]:
        """New slots, of one allocation on either side. The caller may be in torch's inference mode."""
        pinned = torch.empty((count, words), dtype=torch.int64, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            device = torch.empty((count, words), dtype=torch.int64, device=self._device)
        return [
            ArgumentSlot(host, host.numpy(), host.data_ptr(), there, there.data_ptr())
            for host, there in zip(pinned.unbind(), device.unbind(), strict=True)
        ]


def _size(words: int) -> int:
    """Words of a slot that holds ``words``."""
    return max(SLOT_WORDS, 1 << (words - 1).bit_length())


def _free(slots: deque[ArgumentSlot]) -> ArgumentSlot | None:
    """Take one out that no launch reads."""
    for _ in range(len(slots)):
        slot = slots.popleft()
        if slot.event is None or slot.event.query():
            return slot
        slots.append(slot)
    return None
