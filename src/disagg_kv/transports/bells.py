"""Bells: words of host memory by which a writer shows a reader on the same host that its bytes have landed.

Theory of operation
===================

The reader owns a *board*, an array of slots. It names a slot and a value to one writer, and that writer alone may use
the slot from then on. To ring, the writer stores a record, then the value in the slot's first word::

    word 0        1      2     3      4     5      6             7
    the value     start  stop  first  last  state  the value     unused

The record names what has landed. The reader compares word 0 with the value that it has named, and reads the record only
if the whole word is equal. Values come from a counter of the reader and are never used again. So an unset word, or the
late word of an earlier use, is no bell. A writer never puts a record over that of a higher value, so a record that a
reader awaits does not change under it. A late word may hide a later one: that bell is lost, and its frame follows.

A *final record* is in a slot of its own, and says how the writer's part of a room ends. It says nothing about rows::

    word 0        1      2                  3                4, 5     6             7
    the value     stop   bytes of aux data  their checksum   unused   the value     unused

The aux data lie in the slots behind it. The reader copies them, and then compares the value again. The checksum covers
value, row and aux data. So the late store of an earlier process among them makes no other record: the bell is lost.

A device rings by the word alone. Its process stores the record when it plans the copy, and the device's stream stores
the value behind the copied bytes. The process may ring the same value again later.

Nothing waits for a word: neither a thread nor a stream of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ..errors import TransportError
from ..memory import Bell, Buffer, bytes_of
from ..memory.bell import fence

SLOT_WORDS = 8
"""Words of a slot: one cache line."""

WORD = 8
"""Bytes of a word."""

AUX_BYTES = 4096
"""The most bytes of aux data behind a final record; rooms with more are ended by frames."""

FINAL_SLOTS = 1 + AUX_BYTES // (SLOT_WORDS * WORD)
"""Slots of a final record and of what lies behind it."""

NO_AUX = (1 << 64) - 1
"""In place of the bytes of aux data: the writer gives none."""

Record = tuple[int, int, int, int, int]
"""What has landed: the first row and one past the last, the first layer and one past the last; 1: rows of states."""

Final = tuple[int, bytes | None]
"""How a writer's part of a room ends: one past the last row, and the aux data; None: it gives none."""


def words_of(buffer: Buffer) -> memoryview:
    """The words of a board."""
    return bytes_of(buffer).data.cast("Q")


class HostBells:
    """A peer's board, to which this process stores; satisfies :class:`~disagg_kv.transports.Bells`. One thread."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._words = words_of(buffer)

    def note(self, slot: int, value: int, record: Record) -> bool:
        """Store a record; False: the slot has that of a higher value.

        Raises:
            TransportError: the board has no such slot.
        """
        self._check(slot, 1)
        at = slot * SLOT_WORDS + 1
        # The board itself knows what was stored last, also by an earlier connection of this process to its owner.
        latest = self._words[at + len(record)]
        if value > latest:
            for word in (*record, value):
                self._words[at] = word
                at += 1
        return value >= latest

    def ring(self, slot: int, value: int, record: Record) -> None:
        """See :meth:`~disagg_kv.transports.Bells.ring`."""
        if self.note(slot, value, record):
            self.store(slot, value)

    def ring_final(self, slot: int, value: int, final: Final) -> None:
        """See :meth:`~disagg_kv.transports.Bells.ring_final`."""
        self._check(slot, FINAL_SLOTS)
        stop, aux = final
        data = aux or b""
        if len(data) > AUX_BYTES:
            raise TransportError(f"{len(data)} bytes of aux data; at most {AUX_BYTES} lie behind a final record")
        if self.note(slot, value, (stop, NO_AUX if aux is None else len(data), _sum(value, stop, data), 0, 0)):
            at = (slot + 1) * SLOT_WORDS * WORD
            self._words.cast("B")[at : at + len(data)] = data
            self.store(slot, value)

    def store(self, slot: int, value: int) -> None:
        """Store the value of a slot; all that was stored before is visible with it."""
        fence()
        self._words[slot * SLOT_WORDS] = value

    def _check(self, slot: int, count: int) -> None:
        slots = len(self._words) // SLOT_WORDS
        if not 0 <= slot <= slots - count:
            raise TransportError(f"slot {slot} of a board of {slots} bells")

    def arm(self, slot: int, value: int, record: Record, device: str) -> Bell | None:
        """See :meth:`~disagg_kv.transports.Bells.arm`."""
        base = self.base(device)
        if base is None or not self.note(slot, value, record):
            return None
        return Bell(base + slot * SLOT_WORDS * WORD, value, self)

    def base(self, device: str) -> int | None:
        """The board's address for whatever runs on a device; None: it cannot store there."""
        return self.buffer.addr if device == "cpu" else None


def heard(words: Sequence[int], slot: int, value: int) -> Record | None:
    """The record of a slot that was rung with this value; None: it was not."""
    at = slot * SLOT_WORDS
    if words[at] != value:
        return None
    fence()
    if words[at + 6] != value:
        return None
    return words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5]


def heard_final(words: memoryview, slot: int, value: int) -> Final | None:
    """The final record of a slot that was rung with this value; None: it was not."""
    record = heard(words, slot, value)
    if record is None:
        return None
    stop, length, total = record[:3]
    aux = None
    if length != NO_AUX:
        if length > AUX_BYTES:
            return None
        at = (slot + 1) * SLOT_WORDS * WORD
        aux = bytes(words.cast("B")[at : at + length])
    fence()
    if words[slot * SLOT_WORDS] != value or total != _sum(value, stop, aux or b""):
        return None
    return stop, aux


def _sum(value: int, stop: int, aux: bytes) -> int:
    return crc32(aux, value + stop & 0xFFFFFFFF)
