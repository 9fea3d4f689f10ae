"""The ranks of one instance agree how each room ended: success needs every rank, and one failure fails all.

Theory of operation
-------------------

*Names.* A room id is used once: every rank of the instance opens it at most once, and a retry has an id of its own
(:func:`~disagg_kv.endpoints.attempt_id`). So the ranks agree by the id alone. A *use* is one ``open`` of an id on one
rank; the rank's epoch and the room's generation number it. These numbers matter only if an engine opens an id twice:
rank 0 keeps one use per rank and fails every other one by name. A second use never gets the outcome of the first.

*Votes.* Rank 0 counts. Each other rank (a follower) sends a ``Vote`` to rank 0 when its engine opens the room (``ok``
is None), and another one when it knows its own outcome. It repeats the latest vote until it has the ``Decision``; once
rank 0 has acknowledged an open room, it repeats rarely. Until the decision, an abort, a deadline or the engine may turn
a success vote into a failure vote. A failure never becomes a success.

*Decisions.* Rank 0 decides failure at the first vote against the room, when it loses a rank whose success it does not
have, or when it has lost every rank that has opened the room. It decides success when it has the success of every rank.
It sends each decision once to every rank that has voted, and again as the answer to every later vote. A decision never
changes. A follower that has not voted for a room refuses a decision of its success, and votes against the room.

*Memory.* Rank 0 never forgets an undecided room. Of decided rooms it remembers ``tombstones`` by id. A decided room
that some rank has not opened stays for at least ``silence_s``, so that this rank fails at once when it opens the room.
Of forgotten rooms, two bits per use remain (:class:`~disagg_kv.core.tombstones.Tombstones`): a late or repeated
vote gets the outcome of its own use, and never begins a room.

*Loss of rank 0.* A new incarnation of rank 0 knows no votes. Its engine may still open rooms that followers opened
before. So a ``Decision`` says whether the engine of rank 0 has opened the room, and a follower that loses rank 0 acts
on that:

- Rank 0 had opened the room, or this rank has voted against it: the room fails at once.
- Otherwise the room waits for an incarnation of rank 0 that opens it. If none does within ``closed_s``, this rank votes
  against the room.
- A room that begins while rank 0 is lost waits ``silence_s`` in the same way.

Without any rank 0 a vote against a room ends it here at once: no success is possible any more, because this rank does
not vote for the room again. The follower keeps the last ``tombstones`` of such votes for the next incarnation of rank
0. If rank 0 was only silent and says that it still waits for another one, the follower votes against that room again.

*Two incarnations of one rank.* The newest incarnation of a rank counts. Rank 0 fails what an older incarnation begins,
and still takes the older one's votes on rooms that it had begun before.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import msgspec
from attrs import Factory, define, frozen

from ...ids import Epoch, Generation, Rank, RoomId
from ..base import Decided, Options, RoomKey, Send
from ..timers import Repeater
from ..tombstones import RoomOutcome, Tombstones
from ..wire.frames import Decision, Vote, words
from .base import Outcome, Verdict

USED_TWICE = "the room id was used twice: every attempt needs an id of its own"
FORGOTTEN = Decided(False, "the room has failed, or its outcome is forgotten")

PROBES = 2
"""Remembered rooms that are examined whenever one is added: some may go although the oldest has to stay."""


@frozen
class _Use:
    """One ``open`` of an id, on a rank's incarnation."""

    epoch: Epoch
    generation: Generation


@define
class _Room:
    """Rank 0: one room over all ranks."""

    uses: dict[Rank, _Use] = Factory(dict)
    votes: dict[Rank, bool] = Factory(dict)
    decided: Decided | None = None
    decided_at: float = inf


@define
class _Pending:
    """A follower's room without a decision.

    Args:
        vote: the latest one.
        agreed: this rank has voted for success, and may have taken that back.
        ended: the room has ended here without rank 0; only the vote is still to be delivered.
        shared: this incarnation of rank 0 has opened the room, so the room ends with it.
    """

    vote: Vote
    agreed: bool = False
    ended: bool = False
    shared: bool = False


class Elected(Verdict):
    """Ends each room alike on all ranks of the instance, which vote; satisfies :class:`.Verdict`.

    An endpoint makes the object of its rank from the class. Pure: votes and frames in, frames and outcomes out.

    Args:
        rank: of this endpoint.
        world: number of ranks of the instance.
        epoch: of this endpoint.
        options: repeat times, and how many decided rooms are remembered by id.
        instance: name of the instance, for reasons that the other side reads.
    """

    name = "elected"

    def __init__(self, rank: Rank, world: int, epoch: Epoch, options: Options, instance: str) -> None:
        self._instance = instance
        self._rank = rank
        self._world = world
        self._epoch = epoch
        self._options = options
        self._ranks: dict[Epoch, Rank] = {}
        self._older: dict[Epoch, Rank] = {}
        # Followers.
        self._leader: Epoch | None = None
        self._leader_lost = False
        self._pending: dict[RoomId, _Pending] = {}
        self._ended: OrderedDict[RoomId, None] = OrderedDict()
        self._unclaimed: dict[RoomId, float] = {}
        self._repeat = Repeater(options)
        # Rank 0.
        self._rooms: OrderedDict[RoomId, _Room] = OrderedDict()
        self._tombstones = Tombstones()

    @property
    def undecided(self) -> int:
        """Rooms of this rank that wait for an outcome; rank 0: of any rank."""
        counted = sum(room.decided is None for room in self._rooms.values())
        return len(self._pending) - len(self._ended) + counted

    # The ranks of the instance.

    def joined(self, epoch: Epoch, rank: Rank, now: float) -> list[Send | Outcome]:
        """A rank of the instance is there (again, perhaps in a new incarnation, which is the end of its others)."""
        out: list[Send | Outcome] = []
        if epoch in self._ranks:
            return out
        for other in [e for e, r in self._ranks.items() if r == rank]:
            out += self.lost(other, now)
        self._older.pop(epoch, None)
        self._ranks[epoch] = rank
        if rank == 0 != self._rank:
            self._leader = epoch
            out += [self._deliver(room, now) for room in self._pending]
        return out

    def followed(self, epoch: Epoch, rank: Rank) -> None:
        """This incarnation of a rank is there, but a younger one counts, until this one joins or is lost."""
        self._older[epoch] = rank

    def lost(self, epoch: Epoch, now: float) -> list[Send | Outcome]:
        """A rank is lost: rooms that need it fail; those that its next incarnation may open wait for it."""
        self._older.pop(epoch, None)
        rank = self._ranks.pop(epoch, None)
        out: list[Send | Outcome] = []
        if rank is None:
            return out
        if self._rank == 0:
            for name, room in list(self._rooms.items()):
                if room.decided is None and not (room.votes.get(rank, False) and self._awaited(room)):
                    out += self._decide(name, room, Decided(False, self._lost(rank)), now)
        elif rank == 0:
            self._leader, self._leader_lost = None, True
            self._repeat.clear()
            for name, pending in list(self._pending.items()):
                if pending.shared or pending.vote.ok is False:
                    out += self._end(name, pending, self._lost(rank))
                elif not pending.ended:
                    self._unclaimed.setdefault(name, now + self._options.closed_s)
        return out

    # The outcome of this rank.

    def vote(self, key: RoomKey, ok: bool | None, reason: str, now: float) -> list[Send | Outcome]:
        """This rank's own outcome: None when the room opens, then one or two votes.

        A success may be withdrawn, a failure not.
        """
        if self._world == 1:
            return [] if ok is None else [Outcome(key, Decided(ok, reason))]
        if self._rank == 0:
            return self._count(key.room, self._rank, _Use(self._epoch, key.generation), ok, reason, now)
        pending = self._pending.get(key.room)
        if ok is None:
            if pending is not None:
                return [Outcome(key, Decided(False, USED_TWICE))]
            vote = Vote(src=self._epoch, dst=b"", room=key.room, generation=key.generation, ok=None, reason="")
            pending = self._pending[key.room] = _Pending(vote)
        elif pending is None or pending.vote.generation != key.generation or pending.ended:
            return []
        elif pending.vote.ok is False:
            return []  # the vote against the room may have been lost; a success in its place would be a wrong one
        else:
            pending.vote = msgspec.structs.replace(pending.vote, ok=ok, reason=words(reason))
            pending.agreed |= ok
        if self._leader is not None:
            return [self._deliver(key.room, now)]
        if self._leader_lost:
            self._unclaimed.setdefault(key.room, now + self._options.silence_s)
        return self._end(key.room, pending, reason) if ok is False else []

    # Frames.

    def on_frame(self, frame: Vote | Decision, now: float) -> list[Send | Outcome]:
        """What another rank of the instance has voted, or rank 0 has decided."""
        return self.on_vote(frame, now) if isinstance(frame, Vote) else self.on_decision(frame, now)

    def on_vote(self, vote: Vote, now: float) -> list[Send | Outcome]:
        """Rank 0: another rank's vote; every vote is answered, an older incarnation's too."""
        epoch, generation, name = Epoch(vote.src), Generation(vote.generation), RoomId(vote.room)
        rank = self._ranks.get(epoch, self._older.get(epoch))
        if rank is None or self._rank != 0:
            return []
        use, room = _Use(epoch, generation), self._rooms.get(name)
        if room is None or room.uses.get(rank) != use:
            refused = self._refusal(room, rank, use)
            if refused is not None:
                return [self._decision(name, use, refused)]
        out = self._count(name, rank, use, vote.ok, vote.reason, now)
        if not any(isinstance(e, Send) and e.to == epoch for e in out):
            room = self._rooms[name]
            out.append(self._decision(name, use, room.decided, shared=self._rank in room.uses))
        return out

    def on_decision(self, decision: Decision, now: float) -> list[Send | Outcome]:
        """Followers: rank 0's answer."""
        name = RoomId(decision.room)
        pending = self._pending.get(name)
        if Epoch(decision.src) != self._leader:
            return []
        if pending is None and decision.ok is None:
            # Its vote was one too many while rank 0 was lost. Of what is decided rank 0 takes no other vote.
            ended = Vote(
                src=self._epoch, dst=self._leader, room=name, generation=decision.generation, ok=False,
                reason=FORGOTTEN.reason,
            )  # fmt: skip
            return [Send(self._leader, ended)]
        if pending is None or pending.vote.generation != decision.generation:
            return []
        if decision.ok is None:
            if decision.shared:
                pending.shared = True
                self._unclaimed.pop(name, None)
            if pending.vote.ok is None and name not in self._unclaimed:
                self._repeat.slow(name)
            return []
        if decision.ok and not pending.agreed and not pending.ended:
            wrong = f"rank 0 decided a success that rank {self._rank} has not voted for"
            return [*self._end(name, pending, wrong), self._deliver(name, now)]
        self._drop(name)
        if pending.ended:
            return []
        key = RoomKey(name, Generation(decision.generation))
        return [Outcome(key, Decided(decision.ok, decision.reason))]

    # Time.

    def tick(self, now: float) -> list[Send | Outcome]:
        """Repeat what is unanswered, and vote against rooms that no incarnation of rank 0 has opened in time."""
        out: list[Send | Outcome] = [*self._repeat.tick(now)]
        for name in [name for name, until in self._unclaimed.items() if until <= now]:
            del self._unclaimed[name]
            generation = Generation(self._pending[name].vote.generation)
            late = f"{self._lost(Rank(0))}, and no other incarnation of it has opened the room in time"
            out += self.vote(RoomKey(name, generation), False, late, now)
        return out

    def next_at(self) -> float | None:
        """When a tick is due."""
        soonest = self._repeat.next_at()
        if not self._unclaimed:
            return soonest
        unclaimed = min(self._unclaimed.values())
        return unclaimed if soonest is None else min(soonest, unclaimed)

    def _lost(self, rank: Rank) -> str:
        return f"rank {rank} of instance {self._instance!r} is lost"

    # Followers.

    def _deliver(self, name: RoomId, now: float) -> Send:
        """Send the latest vote on a room, and repeat it."""
        assert self._leader is not None
        vote = msgspec.structs.replace(self._pending[name].vote, dst=self._leader)
        return self._repeat.start(name, Send(self._leader, vote), now)

    def _end(self, name: RoomId, pending: _Pending, reason: str) -> list[Send | Outcome]:
        """End a room without rank 0, which receives the vote against it later."""
        if pending.ended:
            return []
        pending.ended = True
        pending.vote = msgspec.structs.replace(pending.vote, ok=False, reason=words(reason))
        self._ended[name] = None
        self._unclaimed.pop(name, None)
        if len(self._ended) > self._options.tombstones:
            self._drop(next(iter(self._ended)))
        return [Outcome(RoomKey(name, Generation(pending.vote.generation)), Decided(False, reason))]

    def _drop(self, name: RoomId) -> None:
        """The vote on a room needs no delivery any more."""
        self._repeat.stop(name)
        self._unclaimed.pop(name, None)
        self._ended.pop(name, None)
        del self._pending[name]

    # Rank 0.

    def _refusal(self, room: _Room | None, rank: Rank, use: _Use) -> Decided | None:
        """Why a use is not the rank's part of a room, as the answer to its vote; None: it may be."""
        ended = self._tombstones.outcome(use.epoch, use.generation)
        if ended is RoomOutcome.DONE:
            return Decided(True, "")
        if use.epoch not in self._ranks:
            refused = Decided(False, f"another incarnation of rank {rank} is there")
        elif room is not None and rank in room.uses:
            refused = Decided(False, USED_TWICE)
        elif ended is not None:
            refused = FORGOTTEN
        else:
            return None
        self._tombstones.remember(use.epoch, use.generation, RoomOutcome.FAILED)
        return refused

    def _count(
        self, name: RoomId, rank: Rank, use: _Use, ok: bool | None, reason: str, now: float
    ) -> list[Send | Outcome]:
        """Take a vote: a rank's first use of an id is its part of the room."""
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = _Room()
            self._forget(now)
        if room.uses.setdefault(rank, use) != use:
            return [Outcome(RoomKey(name, use.generation), Decided(False, USED_TWICE))]
        if room.decided is not None:
            return [Outcome(RoomKey(name, use.generation), room.decided)] if rank == self._rank else []
        if ok is None:
            # Followers must know when the room is open on rank 0, or they would take it for a later one's.
            others = [] if rank != self._rank else [one for r, one in room.uses.items() if r != rank]
            return [self._decision(name, one, None, shared=True) for one in others if one.epoch in self._ranks]
        room.votes[rank] = ok
        if not ok:
            return self._decide(name, room, Decided(False, reason), now)
        if sum(room.votes.values()) == self._world:
            return self._decide(name, room, Decided(True, ""), now)
        return []

    def _decide(self, name: RoomId, room: _Room, decided: Decided, now: float) -> list[Send | Outcome]:
        room.decided, room.decided_at = decided, now
        out: list[Send | Outcome] = []
        for rank, use in room.uses.items():
            if rank == self._rank:
                out.append(Outcome(RoomKey(name, use.generation), decided))
            elif use.epoch in self._ranks:
                out.append(self._decision(name, use, decided))
        return out

    def _awaited(self, room: _Room) -> bool:
        """Whether a rank that has opened a room is there still."""
        return any(rank == self._rank or use.epoch in self._ranks for rank, use in room.uses.items())

    def _forget(self, now: float) -> None:
        """Bound what is remembered by id of decided rooms that every rank has opened, or none opens any more."""
        for _ in range(PROBES):
            if len(self._rooms) <= self._options.tombstones:
                return
            name, room = next(iter(self._rooms.items()))
            opened_by_all = len(room.uses) == self._world
            if room.decided is None or not (opened_by_all or room.decided_at <= now - self._options.silence_s):
                self._rooms.move_to_end(name)
                continue
            del self._rooms[name]
            ended = RoomOutcome.DONE if room.decided.ok else RoomOutcome.FAILED
            for use in room.uses.values():
                self._tombstones.remember(use.epoch, use.generation, ended)

    def _decision(self, name: RoomId, use: _Use, decided: Decided | None, *, shared: bool = False) -> Send:
        ok, reason = (None, "") if decided is None else (decided.ok, words(decided.reason))
        frame = Decision(
            src=self._epoch,
            dst=use.epoch,
            room=name,
            generation=use.generation,
            ok=ok,
            shared=shared,
            reason=reason,
        )
        return Send(use.epoch, frame)
