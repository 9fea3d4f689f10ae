"""Ranks agree on the smallest number, whoever comes when, and leave nothing behind."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

# The classes of torch.distributed, which does not export them to type checkers.
from torch._C._distributed_c10d import HashStore, TCPStore

from disagg_kv.errors import ConfigurationError, LocalProtocolError, PeerLostError, RemoteProtocolError
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import StoreMinimum

CHILD = """
import sys, time
from torch.distributed import TCPStore
from disagg_kv.rendezvous import StoreMinimum
port, rank, world = map(int, sys.argv[1:])
ranks = StoreMinimum(TCPStore("127.0.0.1", port, is_master=False), "decode", rank, world)
answers = []
for turn in range(20):
    ranks.say(f"turn {turn}", 16 * ((rank + turn) % world) + turn)
    while (answer := ranks.agreed(f"turn {turn}")) is None:
        time.sleep(0.001)
    answers.append(answer)
print(answers)
"""


@given(
    numbers=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_all_ranks_get_the_smallest_number_in_whatever_order_they_come(
    numbers: list[int], order: random.Random
) -> None:
    """The store is as empty as before, however many questions there were."""
    store = HashStore()
    world = len(numbers)
    ranks = [StoreMinimum(store, "decode", Rank(rank), world) for rank in range(world)]
    turns = list(range(world))
    order.shuffle(turns)
    for said, rank in enumerate(turns):
        ranks[rank].say("room", numbers[rank])
        if said < world - 1:
            assert ranks[rank].agreed("room") is None
    assert [rank.agreed("room") for rank in ranks] == [min(numbers)] * world
    assert store.num_keys() == 0


def test_ranks_of_other_processes_agree_again_and_again() -> None:
    """Three processes, twenty questions, through a TCPStore that keeps nothing of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys()
    arguments = [sys.executable, "-c", CHILD, str(store.port)]
    children = [subprocess.Popen([*arguments, str(rank), "3"], stdout=subprocess.PIPE, text=True) for rank in range(3)]
    outputs = [child.communicate()[0].strip() for child in children]
    assert outputs == [str(list(range(20)))] * 3
    assert store.num_keys() == before


@given(
    told=st.lists(st.sampled_from(["asks", "drops", "drops at once"]), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_what_a_request_asked_that_ended_does_not_stay(told: list[str], order: random.Random) -> None:
    """Some ranks still get an answer, alike, the others drop the question; the store is as empty as before."""
    store = HashStore()
    ranks = [StoreMinimum(store, "decode", Rank(rank), len(told)) for rank in range(len(told))]
    for number, rank in enumerate(ranks):
        if told[number] != "drops at once":
            rank.say("room", 7 + number)
    answers, left = [], [number for number, does in enumerate(told) if does == "asks"]
    for number in order.sample(range(len(told)), len(told)):
        if told[number] != "asks":
            ranks[number].drop("room")
    for number in left:
        answers.append(ranks[number].agreed("room"))
    assert answers == [0 if "drops at once" in told else 7] * len(left)
    assert store.num_keys() == 0


@pytest.mark.parametrize("does", ["asks", "drops", "drops at once"])
def test_a_question_is_dropped_once(does: str) -> None:
    """To drop it again, or after its answer, writes nothing that nobody would clear away."""
    store = HashStore()
    ranks = [StoreMinimum(store, "decode", Rank(rank), 2) for rank in range(2)]
    ranks[1].say("room", 5)
    if does != "drops at once":
        ranks[0].say("room", 7)
    if does == "asks":
        assert ranks[0].agreed("room") == 5
    for _ in range(3):
        ranks[0].drop("room")
    assert ranks[1].agreed("room") == (0 if does == "drops at once" else 5)
    assert store.num_keys() == 0
    for rank in ranks:
        rank.drop("room")
        assert store.num_keys() == 0


def test_finished_questions_are_remembered_within_bounds() -> None:
    """Of many, the last ones."""
    ranks = StoreMinimum(HashStore(), "decode", Rank(0), 1)
    for number in range(4100):
        ranks.drop(f"{number}")
    assert list(ranks._finished) == [f"{number}" for number in range(4, 4100)]


def test_instances_and_questions_are_told_apart() -> None:
    """Two instances over one store, two questions at once."""
    store = HashStore()
    a, b = (StoreMinimum(store, name, Rank(0), 1) for name in ("a", "b"))
    a.say("one", 1)
    a.say("two", 2)
    b.say("one", 3)
    assert (b.agreed("one"), a.agreed("two"), a.agreed("one")) == (3, 2, 1)


def test_questions_out_of_order_are_refused() -> None:
    """Bad input: said twice, asked before it was said, asked after the answer, negative, a rank that is none."""
    ranks = StoreMinimum(HashStore(), "decode", Rank(0), 1)
    with pytest.raises(LocalProtocolError, match="our number is not published"):
        ranks.agreed("room")
    with pytest.raises(ConfigurationError, match="-1"):
        ranks.say("room", -1)
    ranks.say("room", 5)
    with pytest.raises(LocalProtocolError, match="our number 5 is published already"):
        ranks.say("room", 6)
    assert ranks.agreed("room") == 5
    with pytest.raises(LocalProtocolError, match="answered already"):
        ranks.agreed("room")
    with pytest.raises(ConfigurationError, match="rank 2 is not one of 2"):
        StoreMinimum(HashStore(), "decode", Rank(2), 2)


@pytest.mark.parametrize("value", ["", "x", "-1", "true", "1.5", "9" * 30, "[]"])
def test_a_strange_number_is_refused(value: str) -> None:
    """A store is open to everyone who reaches it."""
    store = HashStore()
    ranks = StoreMinimum(store, "decode", Rank(0), 2)
    ranks.say("room", 5)
    store.set('disagg_kv/minimum/["decode", "room", 1]', value)
    with pytest.raises(RemoteProtocolError, match="'room'"):
        ranks.agreed("room")


def test_a_store_that_went_away_is_a_lost_peer() -> None:
    """Every call says so; none waits."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=120))
    ranks = StoreMinimum(client, "decode", Rank(0), 2)
    ranks.say("room", 5)
    del store
    with pytest.raises(PeerLostError, match="'room'"):
        ranks.agreed("room")
    with pytest.raises(PeerLostError, match="'other'"):
        ranks.say("other", 5)


class Flaky:
    """A store of which a drawn share of operations fails, before it has happened or after it."""

    def __init__(self, chance: random.Random) -> None:
        self.store = HashStore()
        self.broken = True
        self._chance = chance

    def _reach(self) -> None:
        if self.broken and self._chance.random() < 0.3:
            raise RuntimeError("not reached")

    def set(self, key: str, value: str, /) -> None:
        """As the store."""
        self._reach()
        self.store.set(key, value)
        self._reach()

    def get(self, key: str, /) -> bytes:
        """As the store, which has the key."""
        self._reach()
        return bytes(self.store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """As the store."""
        self._reach()
        return bool(self.store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """As the store."""
        self._reach()
        stands = bytes(self.store.compare_set(key, expected, desired))
        self._reach()
        return stands

    def delete_key(self, key: str, /) -> bool:
        """As the store."""
        self._reach()
        there = self.store.delete_key(key)
        self._reach()
        return bool(there)


def said(ranks: StoreMinimum, number: int) -> None:
    """Say it until the store has taken it."""
    while True:
        try:
            return ranks.say("room", number)
        except PeerLostError:
            continue


@pytest.mark.parametrize("seed", range(20))
def test_whoever_tries_again_gets_the_answer(seed: int) -> None:
    """A store that fails in the middle of any call keeps no rank from the answer, nor anything itself."""
    chance = random.Random(seed)
    numbers = [chance.randrange(99) for _ in range(1 + seed % 4)]
    store = Flaky(chance)
    ranks = [StoreMinimum(store, "decode", Rank(rank), len(numbers)) for rank in range(len(numbers))]
    for rank, number in zip(ranks, numbers, strict=True):
        said(rank, number)
    answers: dict[int, int | None] = {}
    for turn in range(200):
        number = turn % len(ranks)
        store.broken = turn < 100
        if number not in answers:
            with suppress(PeerLostError):
                answers[number] = ranks[number].agreed("room")
    assert answers == dict.fromkeys(range(len(ranks)), min(numbers))
    assert store.store.num_keys() == 0


@pytest.mark.parametrize("seed", range(20))
def test_whoever_tries_again_to_drop_a_question_leaves_nothing(seed: int) -> None:
    """Drawn ranks say, ask and drop over a store that fails in any call; none is told another number."""
    chance = random.Random(seed)
    store = Flaky(chance)
    ranks = [StoreMinimum(store, "decode", Rank(rank), 1 + seed % 4) for rank in range(1 + seed % 4)]
    numbers = [chance.randrange(1, 99) for _ in ranks]
    silent = {number for number in range(len(ranks)) if chance.random() < 0.3}
    dropping = silent | {number for number in range(len(ranks)) if chance.random() < 0.3}
    for number in sorted(set(range(len(ranks))) - silent):
        said(ranks[number], numbers[number])
    answers: dict[int, int] = {}
    left = set(range(len(ranks)))
    for turn in range(300):
        number = turn % len(ranks)
        store.broken = turn < 150
        if number not in left:
            continue
        with suppress(PeerLostError):
            if number in dropping:
                ranks[number].drop("room")
                left.discard(number)
            elif (answer := ranks[number].agreed("room")) is not None:
                answers[number] = answer
                left.discard(number)
    told = set(answers.values())
    assert told <= {0 if silent else min(numbers)}
    assert not left
    assert store.store.num_keys() == 0
