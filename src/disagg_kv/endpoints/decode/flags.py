"""Completion flags of rooms on a decode rank: which slots their writers raise, and what was raised.

Theory of operation. What copies a segment into decode's pages, a GPU or a core, raises a flag behind the bytes. The
loop reads the flags of moving rooms, on whichever thread advances it. A raised flag is the same event for the room's
machine as the frame ``ChunkReady``, which follows in any case: so a flag that is late, lost or repeated is harmless.

Blocks of slots stay with the process that they were named to. Another one gets them once that process has ended, or
was forgotten: then all its rooms are forgotten, each on evidence that nothing of it is written any more. A
word of it that is raised once more hides the flag of another process at worst, and the frame of that follows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from attrs import define

from ...core.wire.frames import ChunkReady, WireFlags
from ...ids import Epoch
from ...memory import Buffer
from ...transports.flags import SLOT_WORDS, raised, words_of
from ..peers.mapping import BLOCK, BLOCK_BYTES
from ..peers.session import PeerSession
from .room import DecodeRoom

NO_VALUE = np.uint64(2**64 - 1)
"""No flag is raised with it."""


class FlagPage:
    """The slots of a decode rank; on the thread that advances.

    Args:
        memory: of a number of blocks, which peers of this host map.
    """

    def __init__(self, memory: Buffer) -> None:
        self.words: Sequence[int] = words_of(memory)
        self.blocks = memory.nbytes // BLOCK_BYTES
        self._free = list(range(self.blocks))
        self._used: dict[int, PeerSession] = {}
        self._value = 1

    def issue(self, writers: Sequence[PeerSession]) -> tuple[WireFlags, ...]:
        """A block and new values for each writer of a room; empty: there are not enough blocks."""
        blocks: list[int] = []
        for session in writers:
            spare = session.flag_blocks or self._free
            if not spare:
                self._take_back(blocks)
                return ()
            blocks.append(spare.pop())
            self._used[blocks[-1]] = session
        flags = tuple((block * BLOCK, BLOCK, self._value + i * BLOCK) for i, block in enumerate(blocks))
        self._value += len(blocks) * BLOCK
        return flags

    def take_back(self, flags: Sequence[WireFlags]) -> None:
        """A room has ended; its writers may still raise late flags."""
        self._take_back([slot // BLOCK for slot, _, _ in flags])

    def _take_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            session = self._used.pop(block)
            (self._free if session.gone else session.flag_blocks).append(block)

    def gone(self, session: PeerSession) -> None:
        """Evidence: a process stores nothing any more."""
        session.gone = True
        self.forget(session)

    def forget(self, session: PeerSession) -> None:
        """A process is forgotten, which no room uses: its blocks are for others, too."""
        self._free += session.flag_blocks
        session.flag_blocks.clear()

    def check_integrity(self, issued: Sequence[WireFlags], sessions: Iterable[PeerSession]) -> None:
        """Raise AssertionError unless exactly the blocks of these flags are used, and each block is somewhere once."""
        spare = [block for session in sessions for block in session.flag_blocks]
        assert sorted(self._used) == sorted(slot // BLOCK for slot, _, _ in issued)
        assert sorted([*self._free, *spare, *self._used]) == list(range(self.blocks))


@define
class _Line:
    """One writer's flags of a room: the next slot to be read, how many are left, and its value."""

    room: DecodeRoom
    writer: Epoch
    slot: int
    left: int
    value: int


class RoomFlags:
    """The flags of all rooms of a decode rank; on the thread that advances.

    A look costs the same for few rooms and for many: it compares the next word of every block at once.

    Args:
        memory: of the page.
        epoch, host: of this endpoint.
    """

    def __init__(self, memory: Buffer, epoch: Epoch, host: str) -> None:
        self._epoch = epoch
        self._host = host
        self.page = page = FlagPage(memory)
        self._words = np.asarray(page.words, np.uint64)
        self._next = np.zeros(page.blocks, np.intp)
        self._values = np.full(page.blocks, NO_VALUE)
        self._lines: dict[int, _Line] = {}

    def issue(self, room: DecodeRoom) -> tuple[WireFlags, ...]:
        """Flags for the prefill ranks of a room; empty: one of them is not on this host, or slots are missing."""
        if all(remote.hello.host == self._host for remote in room.remotes):
            room.flags = self.page.issue(room.used)
        return room.flags

    def follow(self, room: DecodeRoom) -> None:
        """An event of a room was handled: from now on its flags are read, or are not any more."""
        if not room.flags:
            return
        moving = room.machine.moving
        if moving == (room.flags[0][0] // BLOCK in self._lines):
            return
        for remote, (slot, left, value) in zip(room.remotes, room.flags, strict=True):
            if moving:
                self._await(slot // BLOCK, _Line(room, remote.epoch, slot, left, value))
            else:
                del self._lines[slot // BLOCK]
                self._values[slot // BLOCK] = NO_VALUE

    def _await(self, block: int, line: _Line) -> None:
        self._lines[block] = line
        self._next[block] = line.slot * SLOT_WORDS if line.left else 0
        self._values[block] = line.value if line.left else NO_VALUE

    def look(self) -> list[ChunkReady]:
        """What has landed since the last look, as the frames of the writers will say it."""
        found: list[ChunkReady] = []
        if not self._lines:
            return found
        for block in np.flatnonzero(self._words[self._next] == self._values).tolist():
            line, words = self._lines.get(block), self.page.words
            if line is None:  # another process may store NO_VALUE there
                continue
            key = line.room.key
            while line.left and (record := raised(words, line.slot, line.value)) is not None:
                line.slot, line.value, line.left = line.slot + 1, line.value + 1, line.left - 1
                box = (*record[:4], record[4] != 0)
                found.append(ChunkReady(
                    src=line.writer, dst=self._epoch, room=key.room, generation=key.generation, segment=box, lease=None
                ))  # fmt: skip
            self._await(block, line)
        return found

    def ended(self, room: DecodeRoom) -> None:
        """A room is forgotten."""
        self.page.take_back(room.flags)
        room.flags = ()

    def check_integrity(self, rooms: Collection[DecodeRoom], sessions: Iterable[PeerSession]) -> None:
        """Raise AssertionError if the accounts contradict each other."""
        moving = {slot // BLOCK for room in rooms if room.machine.moving for slot, _, _ in room.flags}
        assert set(self._lines) == moving
        assert set(np.flatnonzero(self._values != NO_VALUE).tolist()) <= moving
        self.page.check_integrity([flags for room in rooms for flags in room.flags], sessions)
