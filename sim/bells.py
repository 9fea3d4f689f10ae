"""Bells in a simulation: words that ring at their own time, get lost, ring twice, or are covered by an old value."""

from __future__ import annotations

from functools import partial

from attrs import frozen

from disagg_kv.errors import TransportError
from disagg_kv.ids import Epoch
from disagg_kv.memory import Bell, Buffer, new_buffer
from disagg_kv.transports.bells import SLOT_WORDS, HostBells, Record, heard, words_of

from .fault import FaultClass
from .simulation import SimProcess, Simulation

VALUES = 33
"""Values of a room and a writer: by one room earlier, the same slot had a value that is lower by a multiple of them."""

FAULTY = 0.5
"""Share of bells to which something happens, where that may be."""


LOOKS_S = (0.0, 0.0, 0.002, 0.05)
"""Seconds after which an engine reads the words of other ranks."""


class SimBells(HostBells):
    """A peer's board, as one process sees it."""

    def __init__(self, world: Simulation, here: SimProcess, there: SimProcess, board: Buffer) -> None:
        super().__init__(board)
        self._world = world
        self._here = here
        self._there = there
        self._board = words_of(board)

    def arm(self, slot: int, value: int, record: Record, device: str) -> Bell | None:
        """For the kernels of :mod:`.copies`, which ring through its owner."""
        return Bell(self.buffer.addr, value, SimWord(self, slot, value)) if self.note(slot, value, record) else None

    def store(self, slot: int, value: int) -> None:
        """The word alone: now; as a fault later, not at all, twice, or below an old value for a while."""
        outside = self._world.outside
        if not outside.happens(FaultClass.BELL, FAULTY):
            self._store(slot, value)
            return
        what = outside.helping.choice(("late", "lost", "twice", "old"))
        self._world.mark(f"bells:{what}")
        if what in ("twice", "old"):
            self._store(slot, value if what == "twice" else max(0, value - outside.helping.choice((1, VALUES, value))))
        if what != "lost":
            self._world.later(outside.helping.choice((0.001, 0.02, 0.3)), partial(self._store, slot, value))

    def _store(self, slot: int, value: int) -> None:
        """Whatever the slot has been used for since."""
        if self._here.alive:
            self._board[slot * SLOT_WORDS] = value
            self._notice(self._there)

    def _notice(self, there: SimProcess) -> None:
        """The engine of the other process reads it at once."""
        there.touch()


class SimArray(SimBells):
    """The words of another rank, whose engine reads them some time later."""

    def _store(self, slot: int, value: int) -> None:
        super()._store(slot, value)
        there = self._there
        if heard(self._board, slot, value) is None:
            there.decisions.pop(slot, None)
        elif self._here.rank == 0 and there.decisions.get(slot, (0, 0.0))[0] != value:
            there.decisions[slot] = value, there.clock()

    def _notice(self, there: SimProcess) -> None:
        world = self._world
        world.later(world.outside.helping.choice(LOOKS_S), there.touch)


class SimWords:
    """The words by which ranks of one instance agree; satisfies ``SharedWords``."""

    def __init__(self, world: Simulation, here: SimProcess) -> None:
        self._world = world
        self._here = here

    def make(self, epoch: Epoch, nbytes: int) -> tuple[Buffer, bytes]:
        """Words of the process."""
        self._here.words = new_buffer(nbytes, "cpu")
        return self._here.words, b"words"

    def open(self, epoch: Epoch, place: bytes) -> SimBells:
        """The words of another process; as a fault, not."""
        there = next(one for one in self._world.processes.values() if one.epoch == epoch)
        if there.words is None or not there.alive or self._world.outside.happens(FaultClass.BELL, 0.1):
            self._world.mark("bells:ranks have none")
            raise TransportError("sim: the words could not be opened")
        return SimArray(self._world, self._here, there, there.words)


@frozen(eq=False)
class SimWord:
    """The owner of a bell that a device rings."""

    bells: SimBells
    slot: int
    value: int

    def store(self) -> None:
        """The device rings."""
        self.bells.store(self.slot, self.value)
