"""Completion flags: words of host memory by which a writer shows a reader on the same host that its bytes have landed.

Theory of operation
===================

The reader owns a *flag page*, an array of slots. It names a slot and a value to one writer, and that writer alone may
use the slot from then on. The writer stores a record when it plans a copy. What copies, a GPU's stream or a core,
raises the flag behind the copied bytes: it stores the value in the slot's first word::

    word 0        1      2     3      4     5      6             7
    the value     start  stop  first  last  state  the value     unused

The record names what has landed. The reader compares word 0 with the value that it has named, and reads the record only
if the whole word is equal. Values come from a counter of the reader and are never used again. So an unset word, or the
late word of an earlier use, is no raised flag. A writer never puts a record over that of a higher value, so a record
that a reader awaits does not change under it. A late word may hide a later one: that flag is lost, and its frame
follows.

Nothing waits for a word: neither a thread nor a stream of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import TransportError
from ..memory import Buffer, Flag, bytes_of
from ..memory.flag import fence

SLOT_WORDS = 8
"""Words of a slot: one cache line."""

WORD = 8
"""Bytes of a word."""

Record = tuple[int, int, int, int, int]
"""What has landed: the first row and one past the last, the first layer and one past the last; 1: rows of states."""


def words_of(buffer: Buffer) -> memoryview:
    """The words of a flag page."""
    return bytes_of(buffer).data.cast("Q")


class HostFlags:
    """A peer's flag page, as this process raises flags there; see :class:`~disagg_kv.transports.Flags`. One thread."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._words = words_of(buffer)

    def note(self, slot: int, value: int, record: Record) -> bool:
        """Store a record; False: the slot has that of a higher value.

        Raises:
            TransportError: the page has no such slot.
        """
        slots = len(self._words) // SLOT_WORDS
        if not 0 <= slot < slots:
            raise TransportError(f"slot {slot} of a page of {slots} flags")
        at = slot * SLOT_WORDS + 1
        # The page itself knows what was stored last, also by an earlier connection of this process to its owner.
        latest = self._words[at + len(record)]
        if value > latest:
            for word in (*record, value):
                self._words[at] = word
                at += 1
        return value >= latest

    def arm(self, slot: int, value: int, record: Record, device: str) -> Flag | None:
        """Store a record, and return what kernels of ``device`` store to raise the flag."""
        base = self.base(device)
        if base is None or not self.note(slot, value, record):
            return None
        return Flag(base + slot * SLOT_WORDS * WORD, value, self)

    def base(self, device: str) -> int | None:
        """The page's address for whatever runs on a device; None: it cannot store there."""
        return self.buffer.addr if device == "cpu" else None


def raised(words: Sequence[int], slot: int, value: int) -> Record | None:
    """The record of a slot whose flag was raised with this value; None: it was not."""
    at = slot * SLOT_WORDS
    if words[at] != value:
        return None
    fence()
    if words[at + 6] != value:
        return None
    return words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5]
