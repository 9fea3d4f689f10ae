"""All ranks of an instance come to the same end, whatever the network does to ballots and verdicts."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from disagg_kv.ids import Epoch, Generation, Rank, RoomId
from disagg_kv.protocol import Agreement, AnyFrame, Codec, Options, Outcome, RoomKey, Send
from disagg_kv.protocol.frames import Ballot, Verdict

ROOM = RoomId(b"r")
CODEC = Codec()


class Instance:
    """Some ranks, a network between them, and what each was told of each life of one room."""

    def __init__(self, world: int, seed: int, drop: float, duplicate: float) -> None:
        self.random = random.Random(seed)
        self.drop, self.duplicate = drop, duplicate
        self.now = 0.0
        self.epochs = [Epoch(bytes([r] * 16)) for r in range(world)]
        self.ranks = [Agreement(Rank(r), world, e, Options()) for r, e in enumerate(self.epochs)]
        self.network: list[tuple[int, AnyFrame]] = []
        self.told: list[dict[Generation, bool]] = [{} for _ in range(world)]

    def meet(self, rank: int) -> None:
        if rank:
            self.act(0, list(self.ranks[0].joined(self.epochs[rank], Rank(rank), self.now)))
            self.act(rank, list(self.ranks[rank].joined(self.epochs[0], Rank(0), self.now)))

    def vote(self, rank: int, generation: Generation, ok: bool | None) -> None:
        self.act(rank, self.ranks[rank].vote(RoomKey(ROOM, generation), ok, f"rank {rank}", self.now))

    def act(self, rank: int, effects: list[Send | Outcome]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                frame = CODEC.decode(CODEC.encode(effect.frame))
                self.network += [(self.epochs.index(effect.to), frame)] * (1 + (self.random.random() < self.duplicate))
            else:
                ok = effect.decided.ok
                assert self.told[rank].setdefault(effect.key.generation, ok) is ok, "an outcome changed"

    def deliver(self) -> None:
        to, frame = self.network.pop(self.random.randrange(len(self.network)))
        if self.random.random() < self.drop:
            return
        one = self.ranks[to]
        if isinstance(frame, Ballot):
            self.act(to, one.on_ballot(frame))
        else:
            assert isinstance(frame, Verdict)
            self.act(to, one.on_verdict(frame))

    def tick(self) -> None:
        self.now += 0.5
        for rank, one in enumerate(self.ranks):
            self.act(rank, list(one.tick(self.now)))

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
    """C8, E16, E11: ballots lost, repeated and out of order; lives of one room id; ranks that meet late."""
    instance = Instance(world, seed, drop, duplicate)
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
            if ok is not None or all(g in instance.told[rank] for g in earlier):
                todo[rank].pop(0)
                if generation not in instance.told[rank]:
                    instance.vote(rank, generation, ok)
        elif what == 5:
            instance.tick()
        elif instance.network:
            instance.deliver()
    assert not any(todo), "the steps did not suffice"
    instance.settle()
    for n, life in enumerate(lives):
        outcomes = {instance.told[r][generations[r][n]] for r in range(world)}
        assert outcomes == {all(life[:world])}
    assert not any(one.undecided for one in instance.ranks)
