"""How the ranks of a decode instance agree by words that a room has succeeded, where they are on one host.

Theory of operation
===================

Bells show each engine of an instance that its own rows have landed. The engines agree on their own threads, by words
that do what the frames ``Vote`` and ``Decision`` do. Rank 0 decides, and nothing else does::

    a follower's engine                              rank 0's engine
    all its rows have landed: take the first
    claim, ring the vote
                                                     all its rows have landed, and every vote has rung:
                                                     take the claim, ring the decisions; the room is DONE
    the decision has rung: take the second
    claim; the room is DONE

*A vote.* A follower that has rung its vote fails the room only by rank 0's decision: its endpoint's thread finds the
first claim taken, and votes for success by a frame, too, before it handles any other event. A later doubt is a frame
that withdraws the vote, as without words. Rank 0 takes it if it has not decided.

*The decision.* Rank 0 decides success by words or by frames, and failure by frames alone. Its endpoint's thread takes
the claim before it counts a vote against the room, or a lost rank. If its engine has taken the claim, the room has
succeeded, whatever comes. Else its engine decides nothing until the thread offers a new claim.

*Loss.* A follower that loses rank 0 ends the room as without words, and looks for the decision before. So two followers
that live end a room alike, if rank 0 has rung for both.

*Words.* Each rank has an array of slots, which other ranks of the instance open. A follower rings in rank 0's array,
and rank 0 in the follower's. The follower's generation of the room names the slot, modulo their number, and the value:
the generation plus the time at which the follower's life began, in nanoseconds since the boot of the host. A life opens
fewer rooms than nanoseconds pass, so values of one rank grow from life to life, and none is used for two rooms. A word
that another one covers, or that is late, lost or repeated, is harmless: the frames follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ...core import Hello, RoomKey
from ...errors import DisaggKVError, RegistrationError, TransportError, text_of
from ...ids import Epoch
from ...memory import Buffer
from ...transports.bells import SLOT_WORDS, WORD, HostBells, Record, heard, words_of
from ..loop.event_loop import EventLoop
from ..peers.handshake import EndpointInfo

NOTHING: Record = (0, 0, 0, 0, 0)
"""The record of a word whose value says all."""

SLOT_BYTES = SLOT_WORDS * WORD


@frozen
class Word:
    """A slot and its value."""

    slot: int
    value: int


@frozen(eq=False)
class Ballot:
    """What one rank's engine rings and awaits for one room; on the engine's thread.

    Args:
        votes: a follower rings first, and then awaits; False: rank 0 awaits first, and then rings.
        rings: words of other ranks' arrays.
        words: of this rank.
        awaited: which of them it awaits.
        peers: the lives on the other side of these words.
    """

    votes: bool = False
    rings: tuple[tuple[HostBells, Word], ...] = ()
    words: Sequence[int] = ()
    awaited: tuple[Word, ...] = ()
    peers: frozenset[Epoch] = frozenset()

    @property
    def claims(self) -> int:
        """How many conclusions the engine comes to."""
        return 2 if self.votes else 1

    def ring(self) -> None:
        """Ring the vote, or the decisions."""
        for array, word in self.rings:
            array.ring(word.slot, word.value, NOTHING)

    def heard(self) -> bool:
        """Whether the decision, or all votes, have rung. Any thread."""
        return all(heard(self.words, word.slot, word.value) is not None for word in self.awaited)


ALONE = Ballot()
"""Of the only rank of an instance."""


class Ballots:
    """The words of one decode rank, and of the other ranks of its instance, on the endpoint's thread.

    Args:
        loop: the endpoint's.
        own: this rank's words.
    """

    def __init__(self, loop: EventLoop, own: OwnWords) -> None:
        self._loop = loop
        self._own = own
        self._memory = memory = own.memory
        self._words: Sequence[int] = () if memory is None else words_of(memory)
        self._world = len(loop.me.shards)
        self._open: dict[Epoch, tuple[Hello, HostBells]] = {}
        self._silent: dict[Epoch, str] = {}

    @property
    def ready(self) -> bool:
        """Whether words may agree on a room that begins now: this rank is alone, or has open what it rings in."""
        needed = range(1, self._world) if self._loop.me.rank == 0 else range(1)
        return self._world == 1 or {hello.rank for hello, _ in self._open.values()}.issuperset(needed)

    def joined(self, hello: Hello) -> None:
        """Another rank of the instance is there. Followers need only rank 0."""
        rank, epoch = self._loop.me.rank, Epoch(hello.src)
        if (rank == 0) == (hello.rank == 0) or epoch in self._open:
            return
        try:
            self._open[epoch] = hello, self._opened(hello)
            self._silent.pop(epoch, None)
        except DisaggKVError as exc:
            self._silent[epoch] = text_of(exc)

    def _opened(self, hello: Hello) -> HostBells:
        """The words of a rank; raises the reason why they are not open."""
        life = self._loop.me.life
        if hello.host != life.process.host:
            raise TransportError("ranks of one instance agree by words within one host, and it is on another")
        if self._memory is None:
            raise TransportError(self._own.missing)
        if not hello.words:
            raise TransportError("it has no words for other ranks")
        array = life.words.open(Epoch(hello.src), hello.words)
        if _slots(array.buffer) < (1 if hello.rank else self._world - 1):
            raise TransportError(f"{array.buffer.nbytes} bytes are too few words for {self._world} ranks")
        return array

    def left(self, epoch: Epoch) -> None:
        """Another rank of the instance is lost."""
        self._open.pop(epoch, None)
        self._silent.pop(epoch, None)

    def no_bells(self, epoch: Epoch) -> str:
        """Why the words of another rank are not open here; empty: they are, or are not needed. From any thread."""
        return self._silent.get(epoch, "")

    def of(self, key: RoomKey) -> Ballot | None:
        """The ballot on a room; None: words cannot agree on it now."""
        if self._world == 1:
            return ALONE
        voters, memory = self._loop.agreement.voters(key), self._memory
        if voters is None or memory is None or not all(epoch in self._open for epoch, _ in voters):
            return None
        me, rings, awaited = self._loop.me, list[tuple[HostBells, Word]](), list[Word]()
        for epoch, generation in voters:
            hello, array = self._open[epoch]
            if me.rank == 0:
                vote, decision = self._pair(hello.rank, hello.born, generation, memory, array.buffer)
                awaited.append(vote)
                rings.append((array, decision))
            else:
                vote, decision = self._pair(me.rank, me.life.born, generation, array.buffer, memory)
                awaited.append(decision)
                rings.append((array, vote))
        peers = frozenset(epoch for epoch, _ in voters)
        return Ballot(me.rank > 0, tuple(rings), self._words, tuple(awaited), peers)

    def _pair(self, rank: int, born: int, generation: int, first: Buffer, own: Buffer) -> tuple[Word, Word]:
        """A follower's vote in the ``first`` rank's words, and the decision for it in its ``own``."""
        value, shared = born + generation, _slots(first) // (self._world - 1)
        return Word((rank - 1) * shared + generation % shared, value), Word(generation % _slots(own), value)

    def stands(self, ballot: Ballot, key: RoomKey) -> bool:
        """Whether those that agree on the room now are the ranks of its ballot."""
        voters = () if self._world == 1 else self._loop.agreement.voters(key)
        return (
            voters is not None and {epoch for epoch, _ in voters} == ballot.peers and ballot.peers <= self._open.keys()
        )


@frozen(eq=False)
class OwnWords:
    """A rank's words.

    Args:
        memory: of them; None: it has none.
        place: where other ranks of its instance find them.
        missing: why it has none.
    """

    memory: Buffer | None = None
    place: bytes = b""
    missing: str = "this rank has no words for other ranks"


def new_words(me: EndpointInfo, rooms: int) -> OwnWords:
    """A rank's words for a number of rooms at a time; none, if it needs none, or the host does not give the memory."""
    others = len(me.shards) - 1
    if not others or not rooms:
        return OwnWords()
    try:
        return OwnWords(*me.life.words.make(me.epoch, rooms * SLOT_BYTES * (others if me.rank == 0 else 1)))
    except RegistrationError as exc:
        return OwnWords(missing=f"{OwnWords().missing}: {text_of(exc)}")


def _slots(words: Buffer) -> int:
    return words.nbytes // SLOT_BYTES
