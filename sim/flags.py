"""Flags in a simulation: words that are raised at their own time, lost, raised twice, or covered by an old value."""

from __future__ import annotations

from functools import partial

from attrs import frozen

from disagg_kv.memory import Buffer, Flag
from disagg_kv.transports.flags import SLOT_WORDS, HostFlags, Record, words_of

from .fault import FaultClass
from .simulation import SimProcess, Simulation

VALUES = 32
"""Values of a room and a writer: by one room earlier, the same slot had a value that is lower by a multiple of them."""

FAULTY = 0.5
"""Share of flags to which something happens, where that may be."""


class SimFlags(HostFlags):
    """A peer's flag page, as one process sees it."""

    def __init__(self, world: Simulation, here: SimProcess, there: SimProcess, page: Buffer) -> None:
        super().__init__(page)
        self._world = world
        self._here = here
        self._there = there
        self._page = words_of(page)

    def arm(self, slot: int, value: int, record: Record, device: str) -> Flag | None:
        """For the kernels of :mod:`.copies`, which raise it through its owner."""
        return Flag(self.buffer.addr, value, SimWord(self, slot, value)) if self.note(slot, value, record) else None

    def store(self, slot: int, value: int) -> None:
        """The word: now; as a fault later, not at all, twice, below an old value for a while, or beside a torn record.

        A torn record is what a reader sees if the words of a record reach it one by one.
        """
        outside = self._world.outside
        if not outside.happens(FaultClass.FLAG, FAULTY):
            self._store(slot, value)
            return
        what = outside.helping.choice(("late", "lost", "twice", "old", "torn"))
        self._world.mark(f"flags:{what}")
        if what == "torn":
            at = slot * SLOT_WORDS + 1
            whole = list(self._page[at : at + 6])
            for word in range(at, at + 6):
                self._page[word] = 0
            self._store(slot, value)
            self._world.later(outside.helping.choice((0.001, 0.02)), partial(self._mend, at, whole))
            return
        if what in ("twice", "old"):
            self._store(slot, value if what == "twice" else max(0, value - outside.helping.choice((1, VALUES, value))))
        if what != "lost":
            self._world.later(outside.helping.choice((0.001, 0.02, 0.3)), partial(self._store, slot, value))

    def _store(self, slot: int, value: int) -> None:
        """Whatever the slot has been used for since."""
        if self._here.alive:
            self._page[slot * SLOT_WORDS] = value
            self._there.raised_at = self._world.now
            self._there.touch()

    def _mend(self, at: int, whole: list[int]) -> None:
        """The record is whole, unless the slot is used again."""
        if self._page[at + 5] == 0:
            for word, known in enumerate(whole, at):
                self._page[word] = known
            self._there.touch()


@frozen(eq=False)
class SimWord:
    """The owner of a flag that a device raises."""

    flags: SimFlags
    slot: int
    value: int

    def store(self) -> None:
        """The device raises it."""
        self.flags.store(self.slot, self.value)
