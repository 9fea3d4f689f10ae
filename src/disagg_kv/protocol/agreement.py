"""The ranks of one instance agree how each room ended: success needs every rank, any failure fails all.

Rank 0 counts. Every other rank tells it when a room opens and when its own outcome is known, and repeats that until it
is answered. Generations number a room's lives on each rank separately, so rank 0 pairs them in the order in which
they come: the n-th unpaired life of a room on one rank belongs to the n-th life of it on the others.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import Factory, define, frozen

from ..ids import Epoch, Generation, Rank, RoomId
from .base import Decided, Options, RoomKey, Send
from .frames import Ballot, Verdict
from .retry import Repeater


@frozen
class Outcome:
    """A room of ours is decided."""

    key: RoomKey
    decided: Decided


@define
class _Life:
    """One life of a room over all ranks."""

    generations: dict[Rank, Generation] = Factory(dict)
    votes: dict[Rank, bool] = Factory(dict)
    decided: Decided | None = None


class Agreement:
    """One rank's share of the agreement. Pure: frames and votes in, frames and outcomes out.

    Args:
        rank: ours.
        world: how many ranks the instance has.
        epoch: ours.
        options: repeat times, and how many undecided and decided rooms are remembered.
    """

    def __init__(self, rank: Rank, world: int, epoch: Epoch, options: Options) -> None:
        self._rank = rank
        self._world = world
        self._epoch = epoch
        self._options = options
        self._leader: Epoch | None = None
        self._repeat = Repeater(options)
        self._waiting: dict[RoomKey, Ballot] = {}
        self._lives: OrderedDict[RoomId, list[_Life]] = OrderedDict()
        self._ranks: dict[Epoch, Rank] = {}

    @property
    def undecided(self) -> int:
        """Rooms of ours that wait for an outcome."""
        return len(self._waiting)

    def joined(self, epoch: Epoch, rank: Rank, now: float) -> list[Send]:
        """A rank of our instance is there (again, perhaps in a new life)."""
        self._ranks = {e: r for e, r in self._ranks.items() if r != rank} | {epoch: rank}
        if rank != 0 or self._rank == 0:
            return []
        self._leader = epoch
        return [self._tell(key, ballot, now) for key, ballot in self._waiting.items()]

    def lost(self, epoch: Epoch, now: float) -> list[Send | Outcome]:
        """A rank of our instance is lost: rooms that need it fail."""
        rank = self._ranks.pop(epoch, None)
        out: list[Send | Outcome] = []
        if rank is None:
            return out
        if self._rank != 0:
            self._leader = None
            for key in list(self._waiting):
                out += self._close(key, Decided(False, "rank 0 of our instance is lost"))
            return out
        for room, lives in list(self._lives.items()):
            for life in lives:
                if life.decided is None and not life.votes.get(rank, False):
                    out += self._decide(room, life, Decided(False, f"rank {rank} of our instance is lost"))
        return out

    def vote(self, key: RoomKey, ok: bool | None, reason: str, now: float) -> list[Send | Outcome]:
        """Our own outcome: None when the room opens, then one or two votes (success may be taken back)."""
        if self._world == 1:
            return [] if ok is None else [Outcome(key, Decided(ok, reason))]
        if self._rank == 0:
            return self._count(key.room, self._rank, key.generation, ok, reason)
        if ok is not None and key not in self._waiting:
            return []
        ballot = Ballot(src=self._epoch, dst=b"", room=key.room, generation=key.generation, ok=ok, reason=reason[:1000])
        self._waiting[key] = ballot
        if self._leader is not None:
            return [self._tell(key, ballot, now)]
        while len(self._waiting) > self._options.tombstones:
            self._waiting.pop(next(iter(self._waiting)))
        # Nobody can have counted our success without rank 0, and it hears of the failure should it come.
        return [Outcome(key, Decided(False, reason))] if ok is False else []

    def on_ballot(self, ballot: Ballot) -> list[Send | Outcome]:
        """Rank 0: another rank's ballot; it is answered in any case."""
        peer = Epoch(ballot.src)
        rank = self._ranks.get(peer)
        if rank is None or self._rank != 0:
            return []
        room, generation = RoomId(ballot.room), Generation(ballot.generation)
        out = self._count(room, rank, generation, ballot.ok, ballot.reason)
        if not any(isinstance(e, Send) and e.to == peer for e in out):
            life = self._life(room, rank, generation)
            out.append(self._verdict(peer, room, generation, life.decided))
        return out

    def on_verdict(self, verdict: Verdict) -> list[Send | Outcome]:
        """Other ranks: rank 0's answer."""
        key = RoomKey(RoomId(verdict.room), Generation(verdict.generation))
        ballot = self._waiting.get(key)
        if ballot is None or Epoch(verdict.src) != self._leader:
            return []
        if verdict.ok is not None:
            return self._close(key, Decided(verdict.ok, verdict.reason))
        if ballot.ok is None:
            self._repeat.stop(key)
        return []

    def tick(self, now: float) -> list[Send]:
        """Repeat what is unanswered."""
        return self._repeat.tick(now)

    def next_at(self) -> float | None:
        """When a tick is due."""
        return self._repeat.next_at()

    def _tell(self, key: RoomKey, ballot: Ballot, now: float) -> Send:
        assert self._leader is not None
        addressed = Ballot(
            src=ballot.src,
            dst=self._leader,
            room=ballot.room,
            generation=ballot.generation,
            ok=ballot.ok,
            reason=ballot.reason,
        )
        return self._repeat.start(key, Send(self._leader, addressed), now)

    def _close(self, key: RoomKey, decided: Decided) -> list[Send | Outcome]:
        self._waiting.pop(key, None)
        self._repeat.stop(key)
        return [Outcome(key, decided)]

    def _life(self, room: RoomId, rank: Rank, generation: Generation) -> _Life:
        """The life that a rank's generation belongs to: its own, else the earliest that this rank has no part in."""
        lives = self._lives.setdefault(room, [])
        for life in lives:
            if life.generations.get(rank) == generation:
                return life
        for life in lives:
            if rank not in life.generations:
                life.generations[rank] = generation
                return life
        lives.append(_Life({rank: generation}))
        self._lives.move_to_end(room)
        self._forget()
        return lives[-1]

    def _forget(self) -> None:
        """Bound what is remembered of decided rooms."""
        while len(self._lives) > self._options.tombstones:
            room = next((r for r, ls in self._lives.items() if all(x.decided is not None for x in ls)), None)
            if room is None:
                return
            del self._lives[room]

    def _count(
        self, room: RoomId, rank: Rank, generation: Generation, ok: bool | None, reason: str
    ) -> list[Send | Outcome]:
        life = self._life(room, rank, generation)
        if life.decided is not None:
            late = life.decided if rank == self._rank else None
            return [] if late is None else [Outcome(RoomKey(room, generation), late)]
        if ok is None:
            return []
        life.votes[rank] = ok
        if not ok:
            return self._decide(room, life, Decided(False, reason))
        if sum(life.votes.values()) == self._world:
            return self._decide(room, life, Decided(True, ""))
        return []

    def _decide(self, room: RoomId, life: _Life, decided: Decided) -> list[Send | Outcome]:
        life.decided = decided
        out: list[Send | Outcome] = []
        for epoch, rank in self._ranks.items():
            if rank in life.generations and rank != self._rank:
                out.append(self._verdict(epoch, room, life.generations[rank], decided))
        if self._rank in life.generations:
            out.append(Outcome(RoomKey(room, life.generations[self._rank]), decided))
        self._trim(room)
        return out

    def _trim(self, room: RoomId) -> None:
        """Of a room that is used again and again, keep the last few decided lives."""
        lives = self._lives[room]
        while len(lives) > 8 and lives[0].decided is not None:
            lives.pop(0)

    def _verdict(self, to: Epoch, room: RoomId, generation: Generation, decided: Decided | None) -> Send:
        ok, reason = (None, "") if decided is None else (decided.ok, decided.reason)
        return Send(
            to,
            Verdict(src=self._epoch, dst=to, room=room, generation=generation, ok=ok, reason=reason[:1000]),
        )
