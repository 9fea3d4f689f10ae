"""All ranks of an instance come to the same end, whatever the network does to votes and decisions."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.core import AnyFrame, Codec, Elected, Options, Outcome, RoomKey, Send
from disagg_kv.core.wire.frames import Decision, Vote
from disagg_kv.ids import Epoch, Generation, Rank, RoomId

CODEC = Codec()


class Instance:
    """Some ranks, a network between them, and the outcomes that each has."""

    def __init__(self, world: int, seed: int, drop: float, duplicate: float, options: Options | None = None) -> None:
        self.random = random.Random(seed)
        self.drop, self.duplicate = drop, duplicate
        self.now = 0.0
        self.epochs = [Epoch(bytes([r] * 16)) for r in range(world)]
        self.options = options or Options()
        self.ranks = [Elected(Rank(r), world, e, self.options, "P") for r, e in enumerate(self.epochs)]
        self.network: list[tuple[int, AnyFrame]] = []
        self.told: list[dict[RoomKey, bool]] = [{} for _ in range(world)]

    def meet(self, rank: int) -> None:
        if rank:
            self.act(0, self.ranks[0].joined(self.epochs[rank], Rank(rank), self.now))
            self.act(rank, self.ranks[rank].joined(self.epochs[0], Rank(0), self.now))

    def restart(self) -> None:
        """Another process takes rank 0's place; nobody has met it."""
        self.epochs[0] = Epoch(b"again".ljust(16))
        self.ranks[0] = Elected(Rank(0), len(self.ranks), self.epochs[0], self.options, "P")
        self.told[0] = {}

    def miss(self, rank: int, epoch: Epoch) -> None:
        """A rank notices that a life of rank 0 is lost."""
        self.act(rank, self.ranks[rank].lost(epoch, self.now))

    def vote(self, rank: int, key: RoomKey, ok: bool | None) -> None:
        if key not in self.told[rank]:
            self.act(rank, self.ranks[rank].vote(key, ok, f"rank {rank}", self.now))

    def act(self, rank: int, effects: list[Send | Outcome]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                frame = CODEC.decode(CODEC.encode(effect.frame))
                if effect.to not in self.epochs:
                    continue
                self.network += [(self.epochs.index(effect.to), frame)] * (1 + (self.random.random() < self.duplicate))
            else:
                ok = effect.decided.ok
                assert self.told[rank].setdefault(effect.key, ok) is ok, "an outcome changed"

    def deliver(self) -> None:
        to, frame = self.network.pop(self.random.randrange(len(self.network)))
        if self.random.random() < self.drop or frame.dst != self.epochs[to]:
            return
        one = self.ranks[to]
        if isinstance(frame, Vote):
            self.act(to, one.on_vote(frame, self.now))
        else:
            assert isinstance(frame, Decision)
            self.act(to, one.on_decision(frame, self.now))

    def tick(self) -> None:
        self.now += 0.5
        for rank, one in enumerate(self.ranks):
            self.act(rank, one.tick(self.now))

    def settle(self) -> None:
        self.drop = self.duplicate = 0.0
        for _ in range(100):
            self.tick()
            while self.network:
                self.deliver()


many = st.lists(st.lists(st.sampled_from([True, True, True, False]), min_size=4, max_size=4), min_size=1, max_size=4)


@given(st.integers(1, 4), many, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.6]), st.sampled_from([0.0, 0.4]))
def test_all_ranks_reach_the_same_outcome_and_any_failure_fails_all(
    world: int, rooms: list[list[bool]], seed: int, drop: float, duplicate: float
) -> None:
    """Votes lost, repeated and out of order; several rooms at a time, in another order on each rank; late meetings."""
    instance = Instance(world, seed, drop, duplicate)
    chance = instance.random
    keys = [
        [RoomKey(RoomId(b"room %d" % n), Generation(10 * r + 3 * n + 1)) for n in range(len(rooms))]
        for r in range(world)
    ]
    todo: list[list[tuple[RoomKey, bool | None]]] = []
    for r in range(world):
        steps = [(key, ok) for key in keys[r] for ok in (None, True)]
        chance.shuffle(steps)
        opened: set[RoomKey] = set()
        todo.append([])
        for key, _ in steps:
            todo[r].append((key, rooms[keys[r].index(key)][r] if key in opened else None))
            opened.add(key)
    unmet = list(range(1, world))
    for _ in range(2000):
        if not any(todo) and not unmet:
            break
        what, rank = chance.randrange(6), chance.randrange(world)
        if what == 0 and unmet:
            instance.meet(unmet.pop(chance.randrange(len(unmet))))
        elif what in (1, 2) and todo[rank]:
            instance.vote(rank, *todo[rank].pop(0))
        elif what == 5:
            instance.tick()
        elif instance.network:
            instance.deliver()
    assert not any(todo), "the steps did not suffice"
    instance.settle()
    for n, of in enumerate(rooms):
        assert {instance.told[r][keys[r][n]] for r in range(world)} == {all(of[:world])}
    assert not any(one.undecided for one in instance.ranks)


votes = st.lists(st.sampled_from([True, True, True, False]), min_size=3, max_size=3)
OLD, ALONE, NEW = (RoomKey(RoomId(name), Generation(n)) for n, name in enumerate((b"old", b"alone", b"new"), 1))
Step = Callable[[], None]


def shuffled(instance: Instance, scripts: list[list[Step]], most: int) -> None:
    """At most so many steps, each rank's in order, frames and a few seconds between them."""
    ticks = 8
    for _ in range(most):
        what, script = instance.random.randrange(4), instance.random.choice(scripts)
        if what < 2 and script:
            script.pop(0)()
        elif what == 2 and instance.network:
            instance.deliver()
        elif what == 3 and ticks and instance.random.randrange(2):
            ticks -= 1
            instance.tick()


@given(
    st.integers(2, 3),
    st.tuples(votes, votes),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 0.6]),
    st.sampled_from([3.0, 40.0]),
    st.booleans(),
)
def test_ranks_agree_on_what_begins_when_rank_0_has_restarted_and_nothing_waits_for_ever(
    world: int, ballots: tuple[list[bool], list[bool]], seed: int, drop: float, closed_s: float, back: bool
) -> None:
    """Another process takes rank 0's place at any moment, and the others notice at any later one.

    They may meet it before they notice that the first is lost. One room begins before that; one is never opened on
    rank 0; one begins after that. The others open the first two before they notice: what the next rank 0 does not open
    although it is known waits for its deadline. With ``closed_s`` long enough for all ranks to meet, the last one has
    the outcome that it has without a restart.
    """
    instance = Instance(world, seed, drop, drop, Options(closed_s=closed_s))
    others = range(1, world)
    for rank in others:
        instance.meet(rank)

    def room(rank: int, key: RoomKey, ok: bool) -> list[Step]:
        return [partial(instance.vote, rank, key, None), partial(instance.vote, rank, key, ok)]

    def both(rank: int, ok: bool) -> list[Step]:
        pairs = [room(rank, key, ok) for key in ((ALONE, OLD) if rank else (OLD,))]
        return [opened for opened, _ in pairs] + [voted for _, voted in reversed(pairs)]

    before, after = ballots
    scripts = [both(rank, before[rank]) for rank in range(world)]
    shuffled(instance, scripts, instance.random.randrange(60))
    first, counted = instance.epochs[0], instance.told[0].get(OLD)
    instance.restart()
    scripts[0] = room(0, NEW, after[0]) if back else []
    for rank in others:
        opened = max(0, len(scripts[rank]) - 2)
        scripts[rank] += room(rank, NEW, after[rank])
        notices = sorted(instance.random.choices(range(opened, len(scripts[rank]) + 1), k=2), reverse=True)
        steps = [partial(instance.miss, rank, first), *([partial(instance.meet, rank)] if back else [])]
        instance.random.shuffle(steps)
        for at, step in zip(notices, steps, strict=False):
            scripts[rank].insert(at, step)
    shuffled(instance, scripts, 200)
    while any(scripts):
        next(script for script in scripts if script).pop(0)()
    instance.settle()
    assert not any(one.undecided for one in instance.ranks)
    assert not any(instance.told[r][ALONE] for r in others)
    assert counted or not any(instance.told[r][OLD] for r in others), "nobody can have counted a success"
    (outcome,) = {instance.told[r][NEW] for r in range(0 if back else 1, world)}
    expected = back and all(after[:world])
    assert outcome is expected if closed_s > 3.0 else outcome <= expected


uses = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([b"same", b"same", b"x", b"y"]), st.sampled_from([True, True, False])),
    min_size=1,
    max_size=12,
)


@given(st.integers(2, 3), uses, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.6]), st.sampled_from([1, 1000]))
def test_ids_that_are_used_twice_never_give_a_wrong_success(
    world: int, uses: list[tuple[int, bytes, bool]], seed: int, drop: float, remembered: int
) -> None:
    """On some ranks or on all of them, while the first use is undecided, decided, or forgotten; everything ends.

    A success is one of every rank; where ids are remembered, it is of the first use on every rank.
    """
    instance = Instance(world, seed, drop, drop, Options(tombstones=remembered))
    for rank in range(1, world):
        instance.meet(rank)
    made: list[list[tuple[RoomKey, bool]]] = [[] for _ in range(world)]
    for rank, name, ok in uses:
        mine = made[rank % world]
        mine.append((RoomKey(RoomId(name), Generation(len(mine) + 1)), ok))
    scripts: list[list[Step]] = [
        [partial(instance.vote, rank, key, vote) for key, ok in mine for vote in (None, ok)]
        for rank, mine in enumerate(made)
    ]
    shuffled(instance, scripts, 100)
    while any(scripts):
        next(script for script in scripts if script).pop(0)()
    instance.settle()
    for rank, mine in enumerate(made):
        for key, _ in mine:
            instance.vote(rank, key, ok=False)  # its deadline
    instance.settle()
    assert not any(one.undecided for one in instance.ranks)
    for name in (b"same", b"x", b"y"):
        ended = [
            [(instance.told[rank][key], ok) for key, ok in mine if key.room == name] for rank, mine in enumerate(made)
        ]
        assert len({sum(won for won, _ in of) for of in ended}) == 1, "a success of some ranks"
        assert not any(won and not ok for of in ended for won, ok in of)
        if remembered > 1:
            assert not any(won for of in ended for won, _ in of[1:])
            assert len({of[0][0] for of in ended if of}) <= 1
