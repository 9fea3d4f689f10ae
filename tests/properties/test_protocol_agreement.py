"""All ranks of an instance come to the same end, whatever the network does to ballots and verdicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.ids import Epoch, Generation, Rank, RoomId
from disagg_kv.protocol import Agreement, AnyFrame, Codec, Options, Outcome, RoomKey, Send
from disagg_kv.protocol.frames import Ballot, Verdict

ROOM = RoomId(b"r")
CODEC = Codec()


class Instance:
    """Some ranks, a network between them, and what each was told of each life of each room."""

    def __init__(self, world: int, seed: int, drop: float, duplicate: float, options: Options | None = None) -> None:
        self.random = random.Random(seed)
        self.drop, self.duplicate = drop, duplicate
        self.now = 0.0
        self.epochs = [Epoch(bytes([r] * 16)) for r in range(world)]
        self.options = options or Options()
        self.ranks = [Agreement(Rank(r), world, e, self.options) for r, e in enumerate(self.epochs)]
        self.network: list[tuple[int, AnyFrame]] = []
        self.told: list[dict[RoomKey, bool]] = [{} for _ in range(world)]

    def meet(self, rank: int) -> None:
        if rank:
            self.act(0, self.ranks[0].joined(self.epochs[rank], Rank(rank), self.now))
            self.act(rank, self.ranks[rank].joined(self.epochs[0], Rank(0), self.now))

    def restart(self) -> None:
        """Another process takes rank 0's place; nobody has met it."""
        self.epochs[0] = Epoch(b"again".ljust(16))
        self.ranks[0] = Agreement(Rank(0), len(self.ranks), self.epochs[0], self.options)
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
        if isinstance(frame, Ballot):
            self.act(to, one.on_ballot(frame, self.now))
        else:
            assert isinstance(frame, Verdict)
            self.act(to, one.on_verdict(frame, self.now))

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


ballots = st.lists(st.lists(st.sampled_from([True, True, True, False]), min_size=4, max_size=4), min_size=1, max_size=4)


@given(st.integers(1, 4), ballots, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.6]), st.sampled_from([0.0, 0.4]))
def test_all_ranks_reach_the_same_outcome_and_any_failure_fails_all(
    world: int, lives: list[list[bool]], seed: int, drop: float, duplicate: float
) -> None:
    """Ballots lost, repeated and out of order; lives of one room id; ranks that meet late."""
    # Engines of one instance open a room within ``silence_s`` of each other.
    instance = Instance(world, seed, drop, duplicate, Options(silence_s=1000.0))
    chance = instance.random
    # Generations are each rank's own: they only grow.
    generations = [[Generation(10 * r + 3 * n + 1) for n in range(len(lives))] for r in range(world)]
    todo: list[list[tuple[Generation, bool | None]]] = [
        [vote for n, life in enumerate(lives) for vote in ((generations[r][n], None), (generations[r][n], life[r]))]
        for r in range(world)
    ]
    unmet = list(range(1, world))
    for _ in range(2000):
        if not any(todo) and not unmet:
            break
        what = chance.randrange(6)
        rank = chance.randrange(world)
        if what == 0 and unmet:
            instance.meet(unmet.pop(chance.randrange(len(unmet))))
        elif what in (1, 2) and todo[rank]:
            generation, ok = todo[rank][0]
            # The engine uses an id again when its earlier life has ended here.
            earlier = [g for g in generations[rank] if g < generation]
            if ok is not None or all(RoomKey(ROOM, g) in instance.told[rank] for g in earlier):
                todo[rank].pop(0)
                instance.vote(rank, RoomKey(ROOM, generation), ok)
        elif what == 5:
            instance.tick()
        elif instance.network:
            instance.deliver()
    assert not any(todo), "the steps did not suffice"
    instance.settle()
    for n, life in enumerate(lives):
        outcomes = {instance.told[r][RoomKey(ROOM, generations[r][n])] for r in range(world)}
        assert outcomes == {all(life[:world])}
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


@given(
    st.integers(2, 3),
    st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 0.6]),
)
def test_an_id_works_again_after_lives_that_some_ranks_never_opened(
    world: int, there: list[set[int]], seed: int, drop: float
) -> None:
    """Whoever was there, and whatever the network did; ``silence_s`` lies between the lives."""
    instance = Instance(world, seed, drop, drop, Options(silence_s=5.0))
    for rank in range(1, world):
        instance.meet(rank)
    # Generations are each rank's own, and nobody else's.
    opened = [0] * world
    for some in (*there, {0, 1, 2}):
        ranks = sorted({rank % world for rank in some})
        fails = instance.random.choice(ranks) if len(ranks) < world else None
        scripts: list[list[Step]] = []
        for rank in ranks:
            opened[rank] += 1
            key = RoomKey(ROOM, Generation(opened[rank]))
            scripts.append([partial(instance.vote, rank, key, None), partial(instance.vote, rank, key, rank != fails)])
        instance.drop = instance.duplicate = drop
        # No more than four seconds.
        shuffled(instance, scripts, 40)
        while any(scripts):
            next(script for script in scripts if script).pop(0)()
        instance.settle()
        for rank in ranks:
            assert instance.told[rank][RoomKey(ROOM, Generation(opened[rank]))] is (fails is None)
        assert not any(one.undecided for one in instance.ranks)
