"""Bells of rooms on a decode rank: which slots their writers ring, and what the engine's thread concludes from them.

Theory of operation
===================

Prefill's frames reach decode's engine by way of the endpoint's thread. Bells do not: ``Receiver.poll`` and
``Reception.phase`` read the words themselves, on the engine's thread. :class:`BellWatch` counts what rang in accounts
of its own. Once the segments that rang are exactly the awaited rows, the
room is ``DONE`` for the engine of the only rank of an instance; :mod:`.ballots` says how several ranks agree then. The
endpoint's thread gets a command to do its bookkeeping::

    endpoint's thread                                engine's thread
    hold: take the claim; handle an event;
    offer: a new claim                               all that is awaited is there: store the aux data;
                                                     take the claim; the room is DONE

    hold: the claim is taken, so the engine has
    seen the end: follow it, and then handle the
    event, which comes too late

Only claims are shared: each can be taken once. So an event that fails the room comes before the engine's conclusion or
after it, and the engine never sees another outcome later. On the endpoint's thread a conclusion is the event
:class:`~disagg_kv.core.Concluded`. The room's machine knows frames alone, and they may contradict the bells where a
prefill rank is wrong. So that event cannot fail: what a claim was taken for has happened. The engine comes to no
conclusion about a room that has leases, since scatters would write into pages that it takes for complete.

Where decode does not know the end of the room, or awaits aux data, the final records of all writers are needed. The aux
data are stored before the claim is taken, so the engine never sees the room done without them. A store that fails
leaves the room to the frames, and no claim has to be given back. The row is the room's until the engine has seen its
release, and the engine's thread is still in this look. So a store into a room that has just failed harms nothing. The
endpoint's thread may store the same data at that moment, by its frames.

A look is short: what is needed is computed with the watch, on the endpoint's thread. A segment that is all of what is
needed of its layers is found there as it is. Only where others ring, cells are counted (:class:`Coverage`).

Blocks of slots stay with the process that they were named to. Another one gets them once that process has ended, or
once its link was dropped: then all its rooms are forgotten, each on evidence that nothing of it is written any more. A
word of it that is rung once more hides the bell of another process at worst, and the frame of that follows.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from attrs import define, field

from ...core import Awaited
from ...core.room.inbound import check_place
from ...core.room.machine import corners
from ...core.room.writers import chosen, misplaced
from ...core.wire.frames import WireBells
from ...errors import DisaggKVError
from ...geometry import Coverage
from ...ids import Epoch, Rank
from ...memory import Buffer
from ...planning import Intake, RowRange, Segment
from ...transports.bells import Final, Record, heard, heard_final, words_of
from ..peers.mapping import BLOCK, BLOCK_BYTES, BLOCK_SLOTS
from .ballots import Ballot


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
        values = BLOCK + 1  # one for the final record
        bells = tuple((block * BLOCK_SLOTS, BLOCK, self._value + i * values) for i, block in enumerate(blocks))
        self._value += len(blocks) * values
        return bells

    def take_back(self, bells: Sequence[WireBells]) -> None:
        """A room has ended."""
        self.take_back_blocks([slot // BLOCK_SLOTS for slot, _, _ in bells])

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
        assert sorted(self._used) == sorted(slot // BLOCK_SLOTS for slot, _, _ in issued)
        assert sorted([*self._free, *spare, *self._used]) == list(range(self._memory.nbytes // BLOCK_BYTES))


class _Claim:
    """May be taken once, by one thread of two."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    @property
    def free(self) -> bool:
        """Whether no thread has taken it."""
        return not self._taken.locked()

    def take(self) -> bool:
        """True for one caller of all."""
        return self._taken.acquire(blocking=False)


@define
class _Line:
    """One writer's bells of a room: the next slot to be read, how many are left, and the value; the final record's."""

    rank: Rank
    slot: int
    left: int
    value: int
    final_slot: int = field()
    final_value: int = field()

    @final_slot.default
    def _after_slots(self) -> int:
        return self.slot + self.left

    @final_value.default
    def _after_values(self) -> int:
        return self.value + self.left


class BellWatch:
    """The bells of one room, as the engine's thread sees them.

    What does not depend on the words is computed here, so that the engine's looks are short.
    ``voted``: the engine has voted by a word. ``taken``: how many of its conclusions the endpoint's thread knows.

    Args:
        board: its words.
        bells: by rank of the writers.
        awaited: by the engine.
        intake: what comes from each writer.
        store: puts aux data where the engine wants them; None: it wants none.
    """

    def __init__(
        self,
        board: BellBoard,
        bells: Sequence[WireBells],
        awaited: Awaited,
        intake: Intake,
        store: Callable[[bytes], None] | None,
    ) -> None:
        self._words = board.words
        self._awaited = awaited
        self._intake = intake
        self._store = store
        self._lines = [_Line(Rank(rank), *bell) for rank, bell in enumerate(bells)]
        self._unended = list(self._lines) if awaited.needs_ends else []
        self._ends: dict[Rank, Final] = {}
        self._aux: bytes | None = None
        self._waits: dict[Record, set[Rank]] = {}
        self._whole: dict[Record, set[Rank]] = {}
        self._claimed: dict[bool, Coverage] | None = None
        self._open = 0
        self._claims: tuple[_Claim, ...] = ()
        self._void = self._all = self._looking = self.voted = False
        self.ballot: Ballot | None = None
        self.taken = 0
        self._need(awaited.stop)

    # Endpoint's thread.

    def hold(self) -> bool:
        """Keep the engine from its next conclusion until :meth:`offer`; False: it has seen the end of the room already.

        This thread may see a decision before the engine does.
        """
        claims, self._claims = self._claims, ()
        for claim in claims[self.taken :]:
            if claim.take():
                break
            self.taken += 1
        ballot = self.ballot
        if ballot is None:
            return True
        if ballot.votes and self.taken == 1 and ballot.heard():
            self.taken = 2
        return self.taken < ballot.claims

    def offer(self, ballot: Ballot) -> None:
        """The engine may come to a conclusion; of one room always with the same ballot."""
        self.ballot = ballot
        self._claims = tuple(_Claim() for _ in range(ballot.claims))

    # Engine's thread.

    def complete(self) -> bool:
        """Look at the words: True once, when the room has succeeded and no event of it comes first."""
        claims, ballot = self._claims, self.ballot
        if not claims or self._void or self._looking:  # a signal handler has interrupted a look, and takes none
            return False
        assert ballot is not None
        self._looking = True
        try:
            return self._listen() and self._stored(claims[0]) and self._agree(ballot, claims)
        except BaseException:
            self._void = True  # what a handler's exception has cut off is left to the frames
            raise
        finally:
            self._looking = False

    def _agree(self, ballot: Ballot, claims: Sequence[_Claim]) -> bool:
        """All awaited rows have landed here: go on with the ballot; True: the room has succeeded on all ranks."""
        if ballot.votes and not self.voted:
            if not claims[0].take():
                return False
            self.voted = True
            ballot.ring()
        if not ballot.heard() or not claims[-1].take():
            return False
        if not ballot.votes:
            ballot.ring()
        return True

    @property
    def placed(self) -> tuple[int, int]:
        """How many segments have landed, and how many bytes they have."""
        return len(self._waits), self._nbytes

    def _listen(self) -> bool:
        """Take in what rang since the last look; True: all that is awaited is there."""
        words, new = self._words, False
        for line in self._lines:
            while line.left and (record := heard(words, line.slot, line.value)) is not None:
                new = True
                self._hear(line, record)
                line.slot, line.value, line.left = line.slot + 1, line.value + 1, line.left - 1
        for line in [*self._unended]:
            if (final := heard_final(words, line.final_slot, line.final_value)) is not None:
                new = True
                self._hear_final(line, final)
        if new:
            self._all = not (self._void or self._open or self._unended) and self._covered()
        return self._all

    def _hear(self, line: _Line, record: Record) -> None:
        waits = self._waits.get(record)
        if waits is None:
            waits = self._admit(record)
        if line.rank not in waits:
            self._void = True  # the frame says the same, and the room fails by it with the reason
            return
        waits.remove(line.rank)
        self._open -= 1

    def _admit(self, record: Record) -> set[Rank]:
        """Who rings for a segment of which no bell has rung before; empty: it cannot be."""
        waits = self._whole.pop(record, None)
        if waits is None:
            waits = self._piece(Segment(*record[:4], state=record[4] != 0))
        self._waits[record] = waits
        self._open += len(waits)
        return waits

    def _piece(self, segment: Segment) -> set[Rank]:
        """A segment that is not all of what is awaited of its layers: from now on it matters which cells have come."""
        if self._claimed is None:
            self._whole.clear()
            self._claimed = {False: Coverage(), True: Coverage()}
            for *known, state in self._waits:
                self._claimed[bool(state)].add(*known)
        try:
            check_place(segment, self._intake, self._span)
            if self._claimed[segment.state].overlaps(*corners(segment)):
                return set()
            self._claimed[segment.state].add(*corners(segment))
            return set(self._intake.writers(segment))
        except DisaggKVError:
            return set()

    def _hear_final(self, line: _Line, final: Final) -> None:
        self._unended.remove(line)
        self._ends[line.rank] = final
        if self._unended:
            return
        ends, most = [self._ends[rank] for rank in sorted(self._ends)], self._awaited.aux_bytes
        aux = chosen(aux for _, aux in ends) if most else None
        if misplaced((stop for stop, _ in ends), self._awaited) or (most and (aux is None or len(aux) > most)):
            self._void = True
            return
        self._aux = aux
        if self._awaited.stop is None:
            self._need(final[0])

    def _need(self, stop: int | None) -> None:
        """The room ends at this row; None: that is not known yet, nor is what is needed."""
        a, intake = self._awaited, self._intake
        self._span = range(intake.floor(a.start), a.most if stop is None else stop)
        self._boxes = () if stop is None else intake.needed(RowRange(a.start, stop))
        self._nbytes = sum(nbytes for box in self._boxes for _, nbytes in intake.lease(box)[0].values())
        if not self._waits:
            self._whole = {box: set(self._intake.writers(box)) for box in self._boxes}

    def _covered(self) -> bool:
        claimed = self._claimed
        if claimed is None:
            return not self._whole
        return all(claimed[box.state].covers(*corners(box)) for box in self._boxes)

    def _stored(self, claim: _Claim) -> bool:
        """Whether the aux data are where the engine wants them; they get there before it learns that the room is done.

        That a store has failed is left to the frames: the endpoint's thread stores again, and reports the error.
        """
        if self._aux is None or self._store is None:
            return True
        if not claim.free:
            return False
        try:
            self._store(self._aux)
        except Exception:
            self._void = True
            return False
        self._aux = None
        return True
