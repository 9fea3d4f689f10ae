"""Bells of rooms on a decode rank: which slots their writers ring, and what the engine's thread concludes from them.

Theory of operation
===================

Prefill's frames reach decode's engine by way of the endpoint's thread. Bells do not: ``Receiver.poll`` and
``Reception.phase`` read the words themselves, on the engine's thread. :class:`BellWatch` counts what rang by the
rules of the room's machine, in accounts of its own. Once the segments that rang are exactly the awaited rows, the
room is ``DONE`` for the engine, and the endpoint's thread gets a command to do its bookkeeping::

    endpoint's thread                                engine's thread
    hold: take the claim; handle an event;
    offer: a new claim                               all awaited rows have landed: take the claim; the room is DONE

    hold: the claim is taken, so the engine has
    seen the end: handle the same bells, and then
    handle the event, which comes too late

Only a claim is shared: it can be taken once. So an event that fails the room comes before the engine's conclusion or
after it, and the engine never sees another outcome later. On the endpoint's thread a bell is the event
:class:`~disagg_kv.protocol.Rang`, whose transition is that of ``ChunkReady``.

Blocks of slots stay with the process that they were named to. Another one gets them once that process has ended, or
once its link was dropped: then all its rooms are forgotten, each on evidence that nothing of it is written any more. A
word of it that is rung once more hides the bell of another process at worst, and the frame of that follows.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from attrs import define

from ...errors import DisaggKVError
from ...ids import Epoch, Rank
from ...memory import Buffer
from ...planning import Intake, RowRange, Segment
from ...protocol import Rang
from ...protocol.frames import WireBells
from ...protocol.inbound import InboundSegments
from ...transports.bells import heard, words_of
from ..runtime.mapping import BLOCK, BLOCK_BYTES


class BellBoard:
    """The slots of a decode rank; on the endpoint's thread.

    Args:
        memory: of a number of blocks; peers of this host map it.
    """

    def __init__(self, memory: Buffer) -> None:
        self.words = words_of(memory)
        self._memory = memory
        self._free = list(range(memory.nbytes // BLOCK_BYTES))
        self._of: defaultdict[Epoch, list[int]] = defaultdict(list)
        self._gone: set[Epoch] = set()
        self._used: dict[int, Epoch] = {}
        self._value = 1

    def issue(self, writers: Sequence[Epoch]) -> tuple[WireBells, ...]:
        """A block and new values for each writer of a room; empty: there are not enough blocks."""
        blocks: list[int] = []
        for epoch in writers:
            spare = self._of.get(epoch) or self._free
            if not spare:
                self.take_back_blocks(blocks)
                return ()
            blocks.append(spare.pop())
            self._used[blocks[-1]] = epoch
        bells = tuple((block * BLOCK, BLOCK, self._value + i * BLOCK) for i, block in enumerate(blocks))
        self._value += len(blocks) * BLOCK
        return bells

    def take_back(self, bells: Sequence[WireBells]) -> None:
        """A room has ended."""
        self.take_back_blocks([slot // BLOCK for slot, _, _ in bells])

    def take_back_blocks(self, blocks: Sequence[int]) -> None:
        """Blocks are not used by a room any more; their writers may still store late words."""
        for block in blocks:
            epoch = self._used.pop(block)
            (self._free if epoch in self._gone else self._of[epoch]).append(block)
            self._forget(epoch)

    def gone(self, epoch: Epoch) -> None:
        """Evidence: a process stores nothing any more."""
        self._free += self._of.pop(epoch, ())
        self._gone.add(epoch)
        self._forget(epoch)

    def parted(self, epoch: Epoch) -> None:
        """The link to a process was dropped, which no room uses: blocks that are not used are for others, too."""
        self._free += self._of.pop(epoch, ())

    def _forget(self, epoch: Epoch) -> None:
        if epoch in self._gone and epoch not in self._used.values():
            self._gone.discard(epoch)

    def check_integrity(self, issued: Sequence[WireBells]) -> None:
        """Raise AssertionError unless exactly the blocks of these bells are used, and each block is somewhere once."""
        spare = [block for blocks in self._of.values() for block in blocks]
        assert sorted(self._used) == sorted(slot // BLOCK for slot, _, _ in issued)
        assert sorted([*self._free, *spare, *self._used]) == list(range(self._memory.nbytes // BLOCK_BYTES))


class _Claim:
    """May be taken once, by one thread of two."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    def take(self) -> bool:
        """True for one caller of all."""
        return self._taken.acquire(blocking=False)


@define
class _Line:
    """One writer's bells of a room: the next slot to be read, its value, and how many are left."""

    rank: Rank
    epoch: Epoch
    slot: int
    left: int
    value: int


class BellWatch:
    """The bells of one room, as the engine's thread sees them.

    Args:
        board: its words.
        bells: by rank of the writers.
        writers: their lives, by rank.
        intake: what comes from each of them.
        rows: that are awaited.
    """

    def __init__(
        self,
        board: BellBoard,
        bells: Sequence[WireBells],
        writers: Sequence[Epoch],
        intake: Intake,
        rows: RowRange,
    ) -> None:
        assert rows.stop is not None
        self._words = board.words
        self._intake = intake
        self._rows = rows
        self._span = range(intake.floor(rows.start), rows.stop)
        self._lines = [_Line(Rank(i), epoch, *bell) for i, (epoch, bell) in enumerate(zip(writers, bells, strict=True))]
        self._inbound = InboundSegments()
        self._claim: _Claim | None = None
        self._void = self._all = self._looking = False
        self.heard: list[Rang] = []

    # Endpoint's thread.

    def hold(self) -> bool:
        """Keep the engine from a conclusion until :meth:`offer`; False: it has come to one already."""
        claim, self._claim = self._claim, None
        return claim is None or claim.take()

    def offer(self) -> None:
        """The engine may come to a conclusion."""
        self._claim = _Claim()

    # Engine's thread.

    def complete(self) -> bool:
        """Look at the words: True once, when all awaited rows have landed and no event of the room comes first."""
        claim = self._claim
        if claim is None or self._void or self._looking:  # a signal handler has interrupted a look, and takes none
            return False
        self._looking = True
        try:
            return self._listen() and claim.take()
        except BaseException:
            self._void = True  # what a handler's exception has cut off is left to the frames
            raise
        finally:
            self._looking = False

    @property
    def placed(self) -> tuple[int, int]:
        """How many segments have landed, and how many bytes they have."""
        return self._inbound.segments_placed, self._inbound.bytes_placed

    def _listen(self) -> bool:
        """Take in what rang since the last look; True: all awaited rows have landed."""
        new = False
        for line in self._lines:
            while line.left and (record := heard(self._words, line.slot, line.value)) is not None:
                new = True
                self._hear(line, Segment(*record))
                line.slot, line.value, line.left = line.slot + 1, line.value + 1, line.left - 1
        if new:
            self._all = not self._inbound.missing(self._intake, self._rows)
        return self._all

    def _hear(self, line: _Line, segment: Segment) -> None:
        try:
            part = self._inbound.find(segment, line.rank, line.epoch, self._intake, self._span)
        except DisaggKVError:
            self._void = True  # the frame says the same, and the room fails by it with the reason
            return
        self.heard.append(Rang(line.epoch, segment))
        part.arrived.add(line.rank)
        if part.arrived.issuperset(part.writers):
            self._inbound.place(segment)
            self._inbound.drop(segment)
