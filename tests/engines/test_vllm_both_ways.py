"""Rows go both ways between instances of vLLM: the tokens are those of one instance, and blocks return."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field, frozen

from .conftest import Start
from .instances import PREFILL, Instance, transfer

pytestmark = pytest.mark.timeout(1800)

COUNT = 12
BLOCK = 32
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4
"""Layers, K and V, heads, elements, bytes: of all ranks."""

TURNS = (150, 70, 33, 90)
"""New tokens of each prompt."""

OPTIONS: dict[str, Any] = {"claim_s": 8.0, "silence_s": 10.0}
HOLD_S = 60.0

TokensOf = Callable[[list[int], int], list[int]]


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 512) for _ in range(length)]


def logged(instance: Instance, *texts: str) -> bool:
    """Whether one line of its log has them all."""
    return any(all(text in line for text in texts) for line in instance.log.read_text().splitlines())


def check_quiet(*instances: Instance) -> None:
    """All blocks are free again."""
    for one in instances:
        for number in range(120):
            if one.metric("vllm:kv_cache_usage_perc") == 0:
                break
            one.ask(f"step {number} {random.random()}", prompt(5), 1)
            one.answer("pause", 0.5, {})
        else:
            raise AssertionError(f"blocks are stranded: {one.log.read_text()[-4000:]}")


@define
class Chat:
    """A conversation, as a router serves it.

    Args:
        decode: its decode instance.
        tokens: the prompt of the turn.
        params: those of the last answer.
        name: of its requests.
    """

    decode: Instance
    tokens: list[int]
    name: str
    params: dict[str, Any] | None = None
    number: int = 0
    prompted: dict[str, Any] = field(factory=dict)

    def ask_prefill(self, prefill: Instance, **other: Any) -> dict[str, Any]:
        """What prefill answers; it may load rows of the answer before."""
        self.number += 1
        self.prompted = prefill.ask(
            f"p {self.name} {self.number}", self.tokens, 1, {**PREFILL, **(self.params or {}), **other}
        )
        return self.prompted

    def turn(self, prefill: Instance, hold_s: float = HOLD_S) -> dict[str, Any]:
        """What decode answers, whose rows it holds then."""
        first = self.ask_prefill(prefill)
        assert first["reason"] == "length", first
        answer = self.decode.ask(
            f"d {self.name} {self.number}", self.tokens, COUNT, {**first["params"], "hold_s": hold_s}
        )
        self.params = answer["params"]
        return answer

    def go_on(self, answer: dict[str, Any], count: int) -> None:
        """The next prompt: all before, and the client's new words."""
        self.tokens = [*self.tokens, *answer["tokens"], *prompt(count, self.number)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_four_turns_between_two_prefill_instances_and_one_decode_instance(
    start: Start, tokens_of: TokensOf, prefill_tp: int, decode_tp: int
) -> None:
    """In turns; each loads the rows that it lacks beside its own prefix cache, and no more."""
    kv, cached = transfer("kv_both", verify="full", **OPTIONS), {"prefix_caching": True}
    prefills = [start(name, kv, tp=prefill_tp, **cached) for name in ("one", "two")]
    decode = start("decode", kv, tp=decode_tp, **cached)
    for one in (*prefills, decode):
        one.ready()
    chat = Chat(decode, prompt(TURNS[0]), "chat")
    has = [0, 0]
    for number, more in enumerate((*TURNS[1:], 0)):
        prefill = prefills[number % 2]
        before = prefill.metric("vllm:disagg_kv_loaded_bytes_sum")
        last = not more
        answer = chat.turn(prefill, 3.0 if last else HOLD_S)
        assert (answer["reason"], answer["tokens"]) == ("length", tokens_of(chat.tokens, COUNT)), number
        held = len(chat.tokens) - sum(TURNS[number : number + 1]) - 1 if number else 0
        lacked = -(-held // BLOCK) - has[number % 2] // BLOCK if number else 0
        loaded = prefill.metric("vllm:disagg_kv_loaded_bytes_sum") - before
        print(f"turn {number}: {len(chat.tokens)} tokens, {lacked} blocks lacked, {loaded:.0f} bytes loaded")
        assert loaded == lacked * BLOCK * TOKEN_BYTES
        has[number % 2] = len(chat.tokens)
        assert chat.params is not None
        assert chat.params["earlier"]["tokens"] == len(chat.tokens) + COUNT - 1
        chat.go_on(answer, more)
    for one in (*prefills, decode):
        assert one.metric("vllm:disagg_kv_load_failed_total") == 0
        assert one.metric("vllm:disagg_kv_sent_failed_total") == 0
    check_quiet(*prefills, decode)


@frozen
class Fleet:
    """Instances that do both but the last two; ``few``: it has 64 blocks."""

    fails: Instance
    recomputes: Instance
    few: Instance
    producer: Instance
    consumer: Instance


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Started together."""
    folder = tmp_path_factory.mktemp("fleet")
    made = {
        "fails": transfer("kv_both", **OPTIONS),
        "recomputes": transfer("kv_both", "recompute", **OPTIONS),
        "few": transfer("kv_both", **OPTIONS),
        "producer": transfer("kv_producer", **OPTIONS),
        "consumer": transfer("kv_consumer", **OPTIONS),
    }
    few = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 2048}
    instances = {
        name: Instance(folder / f"{name}.log", model, kv, args=few if name == "few" else {}, max_model_len=1984)
        for name, kv in made.items()
    }
    try:
        for one in instances.values():
            one.ready()
        yield Fleet(**instances)
    finally:
        for one in instances.values():
            one.close()


def begun(fleet: Fleet, name: str, decode: Instance | None = None, hold_s: float = HOLD_S) -> Chat:
    """A conversation whose first turn is over; the second prompt is there."""
    chat = Chat(decode or fleet.few, prompt(150, hash(name) % 1000), name)
    answer = chat.turn(fleet.fails, hold_s)
    assert answer["reason"] == "length", answer
    chat.go_on(answer, 40)
    return chat


def ends_right(chat: Chat, prefill: Instance, tokens_of: TokensOf) -> None:
    """The turn goes on to the right tokens. The instance to compare with may have to start, so it is asked last."""
    found = chat.turn(prefill, 1.0)["tokens"]
    assert found == tokens_of(chat.tokens, COUNT)


def changed(chat: Chat, **other: Any) -> Chat:
    """With another reference."""
    assert chat.params is not None
    chat.params["earlier"] |= other
    return chat


def test_a_reference_whose_time_is_over(fleet: Fleet, tokens_of: TokensOf) -> None:
    """Prefill computes the prompt. If the clocks differ, the load ends by name, or the prompt is computed."""
    chat, late, later = (begun(fleet, f"stale {number}", hold_s=1.0) for number in range(3))
    check_quiet(fleet.few)
    ends_right(chat, fleet.fails, tokens_of)
    assert logged(fleet.fails, "stale 0 2", "decode has given them up")
    assert changed(late, until=time.time() + 60).ask_prefill(fleet.fails)["reason"] == "error"
    assert logged(fleet.fails, "stale 1 2", "was not loaded")
    ends_right(changed(later, until=time.time() + 60), fleet.recomputes, tokens_of)
    assert logged(fleet.recomputes, "stale 2 2", "was not loaded")
    check_quiet(fleet.fails, fleet.recomputes, fleet.few)


def test_the_reference_of_another_conversation(fleet: Fleet, tokens_of: TokensOf) -> None:
    """As it is, or put together from two."""
    one, two, three = (begun(fleet, f"foreign {number}") for number in range(3))
    mine, theirs = one.params, two.params
    assert mine is not None
    assert theirs is not None
    one.params = theirs
    ends_right(one, fleet.fails, tokens_of)
    assert logged(fleet.fails, "foreign 0 2", "not of the tokens with which this prompt begins")
    two.params = mine
    changed(two, **{key: theirs["earlier"][key] for key in ("tag", "tokens")})
    assert two.ask_prefill(fleet.fails)["reason"] == "error"
    assert logged(fleet.fails, "foreign 1 2", "was not loaded", "tag")
    ends_right(changed(three, transfer_id=mine["earlier"]["transfer_id"]), fleet.recomputes, tokens_of)
    assert logged(fleet.recomputes, "foreign 2 2", "was not loaded")
    for extra in (one, two, three):
        begun(fleet, f"after {extra.name}", hold_s=1.0)


def test_rows_that_nobody_has(fleet: Fleet, tokens_of: TokensOf) -> None:
    """An unknown transfer ends by name within seconds."""
    chat = changed(begun(fleet, "unknown"), transfer_id="unknown")
    began = time.monotonic()
    ends_right(chat, fleet.recomputes, tokens_of)
    assert time.monotonic() - began < 30
    assert logged(fleet.recomputes, "unknown 2", "was not loaded", "(claim_s)")
    nowhere = changed(begun(fleet, "nowhere"), addresses=["unix:///nowhere/at/all.sock"])
    assert nowhere.ask_prefill(fleet.fails)["reason"] == "error"
    assert changed(begun(fleet, "changed"), tokens=-1).ask_prefill(fleet.fails)["reason"] == "length"


def test_rows_that_decode_has_given_up_for_lack_of_blocks(fleet: Fleet, tokens_of: TokensOf) -> None:
    """Other requests need the blocks of 64 that it has."""
    chats = [begun(fleet, f"evicted {number}", hold_s=HOLD_S) for number in range(2)]
    busy = Chat(fleet.few, prompt(1700, 4), "busy")
    wanted = fleet.recomputes.ask("busy alone", busy.tokens, COUNT)["tokens"]
    assert busy.turn(fleet.fails, 1.0)["tokens"] == wanted
    assert logged(fleet.few, "not held any more", "decode needs the blocks")
    ends_right(chats[0], fleet.recomputes, tokens_of)
    assert logged(fleet.recomputes, "evicted 0 2", "was not loaded", "decode needs the blocks of its answer")
    check_quiet(fleet.fails, fleet.recomputes)


def test_two_instances_that_load_the_same_rows_from_each_other(fleet: Fleet, tokens_of: TokensOf) -> None:
    tokens = prompt(200, 77)
    sides = [(fleet.fails, fleet.recomputes), (fleet.recomputes, fleet.fails)]
    chats = [Chat(decode, tokens, f"each {number}") for number, (_, decode) in enumerate(sides)]
    for chat, (prefill, _) in zip(chats, sides, strict=True):
        chat.go_on(chat.turn(prefill), 40)
    wanted = tokens_of(chats[0].tokens, COUNT)
    for number, (chat, (prefill, _)) in enumerate(zip(chats, sides, strict=True)):
        prefill.begin(f"p both {number}", chat.tokens, 1, {**PREFILL, **(chat.params or {})})
    for number, (chat, (prefill, decode)) in enumerate(zip(chats, sides, strict=True)):
        first = prefill.answer(f"p both {number}")
        assert first["cached"] >= 211, "it has loaded them"
        assert decode.ask(f"d both {number}", chat.tokens, COUNT, first["params"])["tokens"] == wanted
    check_quiet(fleet.fails, fleet.recomputes)


def test_instances_of_one_way(fleet: Fleet, tokens_of: TokensOf) -> None:
    """Prefill ignores the reference, and decode gives none."""
    chat = begun(fleet, "one way", hold_s=3.0)
    ends_right(chat, fleet.producer, tokens_of)
    assert logged(fleet.producer, "one way 2", "its kv_role is not kv_both")
    plain = Chat(fleet.consumer, prompt(90), "plain")
    assert plain.turn(fleet.fails)["tokens"] == tokens_of(plain.tokens, COUNT)
    assert plain.params is None
    check_quiet(fleet.few, fleet.fails, fleet.producer, fleet.consumer)


def test_a_client_that_goes_away_while_its_prompt_is_loaded(fleet: Fleet) -> None:
    """At any time: each block returns on both sides."""
    draw = random.Random(8)
    for number in range(12):
        chat = begun(fleet, f"gone {number}", hold_s=5.0)
        name = f"p gone {number} again"
        fleet.fails.begin(name, chat.tokens, 1, {**PREFILL, **(chat.params or {})})
        time.sleep(draw.uniform(0.0, 0.03))
        fleet.fails.abort(name)
        assert fleet.fails.answer(name)["reason"] in ("abort", "length")
    check_quiet(fleet.fails, fleet.few)
