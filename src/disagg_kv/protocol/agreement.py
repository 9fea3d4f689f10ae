"""The ranks of one instance agree how each room ended: success needs every rank, any failure fails all.

Rank 0 counts. Every other rank tells it when a room opens and when its own outcome is known, and repeats that until it
is decided: rarely once rank 0 knows that the room is open. Generations number a room's lives on each rank separately,
so rank 0 pairs them in the order in which they come: the n-th unpaired life of a room on one rank belongs to the n-th
life of it on the others. For that, a rank speaks of a later life of a room only when the earlier one is decided.
An engine opens its part of a life within ``silence_s`` after that failed elsewhere, or never; ballots say when it did.

Rank 0 says of each room whether its own engine has opened it. Where it has, the room ends with that life of rank 0.
Where it has not said so and is lost, the room may be one of its next life, which nobody else has met yet: the others
wait ``closed_s`` for one that has the room, then vote against it. A room that begins while rank 0 is lost waits
``silence_s``. How such rooms end here, the next life hears.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import msgspec
from attrs import Factory, define, frozen

from ..ids import Epoch, Generation, Rank, RoomId
from .base import Decided, Options, RoomKey, Send
from .frames import Ballot, Verdict, words
from .retry import Repeater
from .tombstones import RoomOutcome, Tombstones

LATE = "rank 0 of our instance was lost, and no other life of it has opened the room in time"
LIVES = 8
"""So many decided lives of one room id are remembered."""

LOOKS = 2
"""Remembered rooms that each new one has looked at: those that are over go, however many others wait."""


@frozen
class Outcome:
    """A room of ours is decided. It may be said again, never otherwise."""

    key: RoomKey
    decided: Decided


@define
class _Life:
    """One life of a room over all ranks: which life of each rank it is, and how that ended."""

    lives: dict[Rank, tuple[Epoch, Generation]] = Factory(dict)
    votes: dict[Rank, bool] = Factory(dict)
    decided: Decided | None = None
    decided_at: float = inf


@define
class _Said:
    """A ballot of ours without a verdict.

    Args:
        ballot: what we say.
        opened: when our engine opened the room.
        alone: we ended the room without a verdict.
        shared: a life of rank 0 has opened the room too, and the room ends with it.
    """

    ballot: Ballot
    opened: float
    alone: bool = False
    shared: bool = False


class Agreement:
    """One rank's share of the agreement. Pure: frames and votes in, frames and outcomes out.

    Args:
        rank: ours.
        world: how many ranks the instance has.
        epoch: ours.
        options: repeat times, and how many rooms are remembered by name once they are decided. Beyond those it is
            remembered how each rank's generation ended.
    """

    def __init__(self, rank: Rank, world: int, epoch: Epoch, options: Options) -> None:
        self._rank = rank
        self._world = world
        self._epoch = epoch
        self._options = options
        self._leader: Epoch | None = None
        self._left: Epoch | None = None
        self._repeat = Repeater(options)
        self._waiting: OrderedDict[RoomId, OrderedDict[Generation, _Said]] = OrderedDict()
        self._unclaimed: dict[RoomKey, float] = {}
        self._lives: OrderedDict[RoomId, list[_Life]] = OrderedDict()
        self._alone: OrderedDict[RoomKey, None] = OrderedDict()
        self._ended = Tombstones()
        self._ranks: dict[Epoch, Rank] = {}
        self._followed: dict[Epoch, Rank] = {}

    @property
    def undecided(self) -> int:
        """Rooms of ours that wait for an outcome."""
        return sum(not said.alone for line in self._waiting.values() for said in line.values())

    @property
    def remembered(self) -> int:
        """Lives of rooms that are kept, decided or not."""
        return sum(map(len, self._lives.values())) + sum(map(len, self._waiting.values()))

    def joined(self, epoch: Epoch, rank: Rank, now: float) -> list[Send | Outcome]:
        """A rank of our instance is there (again, perhaps in a new life, which is the end of its others)."""
        out: list[Send | Outcome] = []
        if epoch in self._ranks:
            return out
        for other in [e for e, r in self._ranks.items() if r == rank]:
            out += self.lost(other, now)
        self._followed.pop(epoch, None)
        self._ranks[epoch] = rank
        if rank == 0 != self._rank:
            if self._left not in (None, epoch):
                self._drop_ended()
            self._leader = epoch
            out += [self._tell(room, now) for room in self._waiting]
        return out

    def followed(self, epoch: Epoch, rank: Rank) -> None:
        """This life of a rank is there, but another one counts, until this one joins or is lost."""
        self._followed[epoch] = rank

    def lost(self, epoch: Epoch, now: float) -> list[Send | Outcome]:
        """A rank of our instance is lost: rooms that need it fail; ours that may be its next life's wait for that."""
        self._followed.pop(epoch, None)
        rank = self._ranks.pop(epoch, None)
        out: list[Send | Outcome] = []
        if rank is None:
            return out
        if self._rank == 0:
            for room, lives in list(self._lives.items()):
                for life in list(lives):
                    if life.decided is None and not life.votes.get(rank, False):
                        out += self._decide(room, life, Decided(False, f"rank {rank} of our instance is lost"), now)
        elif rank == 0:
            self._left, self._leader = self._leader, None
            self._repeat.clear()
            for room, line in self._waiting.items():
                for generation, said in line.items():
                    key = RoomKey(room, generation)
                    if said.shared or said.ballot.ok is False:
                        out += self._end_alone(key, said, "rank 0 of our instance is lost")
                    elif not said.alone:
                        self._unclaimed.setdefault(key, now + self._options.closed_s)
        return out

    def vote(self, key: RoomKey, ok: bool | None, reason: str, now: float) -> list[Send | Outcome]:
        """Our own outcome: None when the room opens, then one or two votes (success may be taken back, failure not)."""
        if self._world == 1:
            return [] if ok is None else [Outcome(key, Decided(ok, reason))]
        if self._rank == 0:
            return self._count(key.room, self._rank, self._epoch, key.generation, ok, reason, now, now)
        line = self._waiting.get(key.room, OrderedDict())
        said = line.get(key.generation)
        if (said is None and ok is not None) or (said is not None and said.alone):
            return []
        if said is not None and said.ballot.ok is False:
            # The first may be lost or wait for an earlier life: a success after it would be all that rank 0 hears.
            return []
        ballot = Ballot(
            src=self._epoch,
            dst=b"",
            room=key.room,
            generation=key.generation,
            ok=ok,
            reason=words(reason),
            open_ms=0,
        )
        if said is None:
            said = line[key.generation] = _Said(ballot, now)
            self._waiting[key.room] = line
        else:
            said.ballot = ballot
        if self._leader is not None:
            return [self._tell(key.room, now)] if next(iter(line)) == key.generation else []
        if self._left is not None:
            self._unclaimed.setdefault(key, now + self._options.silence_s)
        # Nobody can have counted our success without rank 0, and it hears of the failure should it come.
        out = self._end_alone(key, said, reason) if ok is False else []
        # Rooms that wait are never given up for their number; of those that have ended the next rank 0 need not hear.
        while len(self._alone) > self._options.tombstones:
            ended, _ = self._alone.popitem(last=False)
            self._drop(ended)
        return out

    def _drop(self, key: RoomKey) -> None:
        """There is nothing more to say of a room."""
        self._alone.pop(key, None)
        line = self._waiting[key.room]
        del line[key.generation]
        if not line:
            del self._waiting[key.room]

    def on_ballot(self, ballot: Ballot, now: float) -> list[Send | Outcome]:
        """Rank 0: another rank's ballot; it is answered in any case, also where another life of that rank counts."""
        peer = Epoch(ballot.src)
        rank = self._ranks.get(peer, self._followed.get(peer))
        if rank is None or self._rank != 0:
            return []
        room, generation = RoomId(ballot.room), Generation(ballot.generation)
        if self._find(room, rank, peer, generation) is None:
            if (known := self._known(room, rank, peer, generation)) is not None:
                return [self._verdict(peer, room, generation, known)]
            if peer not in self._ranks:
                return [self._verdict(peer, room, generation, self._exclude(room, rank, peer, generation))]
        opened = now - ballot.open_ms / 1000
        earlier = self._close_earlier(room, rank, peer, generation, now)
        out = self._count(room, rank, peer, generation, ballot.ok, ballot.reason, opened, now)
        if not any(isinstance(e, Send) and e.to == peer for e in out):
            life = self._find(room, rank, peer, generation)
            assert life is not None
            out.append(self._verdict(peer, room, generation, life.decided, self._rank in life.lives))
        return earlier + out

    def on_verdict(self, verdict: Verdict, now: float) -> list[Send | Outcome]:
        """Other ranks: rank 0's answer."""
        key = RoomKey(RoomId(verdict.room), Generation(verdict.generation))
        line = self._waiting.get(key.room, OrderedDict())
        said = line.get(key.generation)
        if said is None or Epoch(verdict.src) != self._leader:
            return []
        if verdict.ok is None:
            if verdict.shared:
                said.shared = True
                self._unclaimed.pop(key, None)
            if said.ballot.ok is None and key not in self._unclaimed:
                self._repeat.slow(key)
            return []
        out: list[Send | Outcome] = []
        if not said.alone:
            out.append(Outcome(key, Decided(verdict.ok, verdict.reason)))
        self._repeat.stop(key)
        self._unclaimed.pop(key, None)
        self._drop(key)
        if line:
            out.append(self._tell(key.room, now))
        return out

    def tick(self, now: float) -> list[Send | Outcome]:
        """Repeat what is unanswered, and vote against what no life of rank 0 has opened in time."""
        if not self._waiting:
            return []
        out: list[Send | Outcome] = [self._dated(send, now) for send in self._repeat.tick(now)]
        if not self._unclaimed:
            return out
        for key in [key for key, until in self._unclaimed.items() if until <= now]:
            # A vote may end other rooms that are due.
            self._unclaimed.pop(key, None)
            out += self.vote(key, False, LATE, now)
        return out

    def next_at(self) -> float | None:
        """When a tick is due."""
        soonest = self._repeat.next_at()
        if not self._unclaimed:
            return soonest
        unclaimed = min(self._unclaimed.values())
        return unclaimed if soonest is None else min(soonest, unclaimed)

    # Other ranks.

    def _tell(self, room: RoomId, now: float) -> Send:
        """Say what we have to say of the earliest life of a room that is not decided."""
        assert self._leader is not None
        generation, said = next(iter(self._waiting[room].items()))
        addressed = msgspec.structs.replace(said.ballot, dst=self._leader)
        return self._dated(self._repeat.start(RoomKey(room, generation), Send(self._leader, addressed), now), now)

    def _dated(self, send: Send, now: float) -> Send:
        """A ballot as it leaves now."""
        assert isinstance(send.frame, Ballot)
        said = self._waiting[RoomId(send.frame.room)][Generation(send.frame.generation)]
        open_ms = int(1000 * (now - said.opened))
        return Send(send.to, msgspec.structs.replace(send.frame, open_ms=open_ms))

    def _end_alone(self, key: RoomKey, said: _Said, reason: str) -> list[Send | Outcome]:
        """End a room of ours without rank 0; it is told so when it is heard again."""
        if said.alone:
            return []
        said.alone = True
        self._alone[key] = None
        self._unclaimed.pop(key, None)
        said.ballot = msgspec.structs.replace(said.ballot, ok=False, reason=words(reason))
        return [Outcome(key, Decided(False, reason))]

    def _drop_ended(self) -> None:
        """Another life of rank 0 knows nothing of the rooms that its earlier life took with it."""
        for room, line in list(self._waiting.items()):
            for generation in [g for g, said in line.items() if said.alone and said.shared]:
                self._drop(RoomKey(room, generation))

    # Rank 0.

    def _find(self, room: RoomId, rank: Rank, epoch: Epoch, generation: Generation) -> _Life | None:
        lives = self._lives.get(room, [])
        return next((life for life in lives if life.lives.get(rank) == (epoch, generation)), None)

    def _known(self, room: RoomId, rank: Rank, epoch: Epoch, generation: Generation) -> Decided | None:
        """How a life ended that is not remembered by its room's name; None: nothing is known of it.

        A rank's generations grow, and it speaks of the lives of one room in order.
        """
        ended = self._ended.outcome(epoch, generation)
        if ended is RoomOutcome.DONE:
            return Decided(True, "")
        known = [life.lives[rank] for life in self._lives.get(room, []) if rank in life.lives]
        if ended is not None or any(e == epoch and g > generation for e, g in known):
            return Decided(False, "the room has failed, or its outcome is forgotten")
        return None

    def _life(self, room: RoomId, rank: Rank, epoch: Epoch, generation: Generation, opened: float) -> _Life:
        """The life that a rank's generation belongs to: its own, else the earliest that this rank has no part in.

        One that had failed for long when the rank opened its part is none that it could have meant.
        """
        life = self._find(room, rank, epoch, generation)
        if life is not None:
            return life
        lives = self._lives.setdefault(room, [])
        since = opened - self._options.silence_s
        for life in lives:
            if rank not in life.lives and life.decided_at > since:
                life.lives[rank] = (epoch, generation)
                return life
        lives.append(_Life({rank: (epoch, generation)}))
        self._lives.move_to_end(room)
        self._forget(since)
        return lives[-1]

    def _close_earlier(
        self, room: RoomId, rank: Rank, epoch: Epoch, generation: Generation, now: float
    ) -> list[Send | Outcome]:
        """A rank that speaks of a later life of a room never votes on an earlier one again: that one has failed."""
        out: list[Send | Outcome] = []
        for life in list(self._lives.get(room, [])):
            mine = life.lives.get(rank)
            if life.decided is None and mine is not None and mine[0] == epoch and mine[1] < generation:
                reason = f"rank {rank} of our instance has begun a later life of the room"
                out += self._decide(room, life, Decided(False, reason), now)
        return out

    def _exclude(self, room: RoomId, rank: Rank, epoch: Epoch, generation: Generation) -> Decided:
        """End what a followed life of a rank has begun by itself: no other rank's part of the room belongs to it."""
        decided = Decided(False, f"another life of rank {rank} is there")
        self._lives.setdefault(room, []).append(_Life({rank: (epoch, generation)}, {}, decided, -inf))
        self._trim(room)
        self._forget(-inf)
        return decided

    def _forget(self, since: float) -> None:
        """Bound what is remembered by name of rooms that are over: decided, and no rank opens a part of them any more.

        Args:
            since: what was decided by then is none that a rank could still mean.
        """
        for _ in range(LOOKS):
            if len(self._lives) <= self._options.tombstones:
                return
            room, lives = next(iter(self._lives.items()))
            if all(x.decided is not None and (len(x.lives) == self._world or x.decided_at <= since) for x in lives):
                for life in self._lives.pop(room):
                    self._bury(life)
            else:
                self._lives.move_to_end(room)

    def _bury(self, life: _Life) -> None:
        """Keep how it ended, for each rank that may ask again."""
        assert life.decided is not None
        for epoch, generation in life.lives.values():
            if epoch in self._ranks:
                self._ended.remember(epoch, generation, RoomOutcome.DONE if life.decided.ok else RoomOutcome.FAILED)

    def _count(
        self,
        room: RoomId,
        rank: Rank,
        epoch: Epoch,
        generation: Generation,
        ok: bool | None,
        reason: str,
        opened: float,
        now: float,
    ) -> list[Send | Outcome]:
        life = self._life(room, rank, epoch, generation, opened)
        if life.decided is not None:
            return [Outcome(RoomKey(room, generation), life.decided)] if rank == self._rank else []
        if ok is None:
            # Until they know that the room is open here too, they would take it for one of our next life.
            others = [] if rank != self._rank else [one for r, one in life.lives.items() if r != rank]
            return [self._verdict(e, room, g, None, shared=True) for e, g in others if e in self._ranks]
        life.votes[rank] = ok
        if not ok:
            return self._decide(room, life, Decided(False, reason), now)
        if sum(life.votes.values()) == self._world:
            return self._decide(room, life, Decided(True, ""), now)
        return []

    def _decide(self, room: RoomId, life: _Life, decided: Decided, now: float) -> list[Send | Outcome]:
        life.decided, life.decided_at = decided, now
        out: list[Send | Outcome] = []
        for rank, (epoch, generation) in life.lives.items():
            if rank == self._rank:
                out.append(Outcome(RoomKey(room, generation), decided))
            elif epoch in self._ranks:
                out.append(self._verdict(epoch, room, generation, decided))
        self._trim(room)
        return out

    def _trim(self, room: RoomId) -> None:
        """Of a room that is used again and again, keep the last few decided lives."""
        lives = self._lives[room]
        while len(lives) > LIVES and lives[0].decided is not None:
            self._bury(lives.pop(0))

    def _verdict(
        self, to: Epoch, room: RoomId, generation: Generation, decided: Decided | None, shared: bool = False
    ) -> Send:
        ok, reason = (None, "") if decided is None else (decided.ok, decided.reason)
        return Send(
            to,
            Verdict(
                src=self._epoch, dst=to, room=room, generation=generation, ok=ok, shared=shared, reason=words(reason)
            ),
        )
