"""Clients go away at any moment, and a prefill instance is killed: no block is stranded, and no other answer changes.

A router asks both instances at once, or decode after prefill. A client that goes away ends its request on one side: the
other side has to notice by itself.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from .instances import PREFILL, EndedError, Instance, serve, transfer

pytestmark = pytest.mark.timeout(600)

COUNT = 24
IN_FLIGHT = 8
FREE_S = 30.0
"""Much more than ``claim_s`` and ``silence_s`` together."""

OPTIONS: dict[str, Any] = {"claim_s": 4.0, "silence_s": 6.0}
CONFIG: dict[str, Any] = {"args": {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 64}}
"""Prompts are computed in steps of 64 tokens. The blocks of 100 requests would not fit."""

TokensOf = Callable[[list[int], int], list[int]]
Params = Mapping[str, Any]


class Moment(Enum):
    """When a client goes away."""

    NEVER = "never"
    BEFORE_PREFILL = "before prefill begins"
    IN_PREFILL = "while prefill computes"
    UNASKED = "before decode is asked"
    AS_DECODE_BEGINS = "as decode begins to load"
    IN_LOAD = "while decode loads"
    IN_DECODE = "while decode computes"


FROM_PREFILL = (Moment.BEFORE_PREFILL, Moment.IN_PREFILL)
FROM_DECODE = (Moment.AS_DECODE_BEGINS, Moment.IN_LOAD, Moment.IN_DECODE)


@frozen
class Plan:
    """A request.

    Args:
        name: its own.
        tokens: the prompt.
        moment: when its client goes away.
        at_once: decode is asked before prefill, not after it.
        pause: seconds from the request until its client goes away.
        leave: the number of tokens with which its client goes away.
    """

    name: str
    tokens: list[int]
    moment: Moment
    at_once: bool
    pause: float
    leave: int

    @classmethod
    def drawn(cls, name: str, draw: random.Random) -> Plan:
        """A third of the clients stay."""
        moment = draw.choice([*Moment, Moment.NEVER, Moment.NEVER])
        tokens = [draw.randrange(3, 512) for _ in range(draw.randrange(20, 600))]
        at_once = {Moment.IN_LOAD: True, Moment.UNASKED: False, Moment.AS_DECODE_BEGINS: False}
        pause = 0.0 if moment is Moment.BEFORE_PREFILL else 0.3 * draw.random() ** 3
        leave = draw.randrange(1, COUNT // 2) if moment is Moment.IN_DECODE else 0
        return cls(name, tokens, moment, at_once.get(moment, draw.random() < 0.5), pause, leave)


@frozen
class Answers:
    """What both instances answered.

    Args:
        plan: the request.
        prefill: its reason; "ended": the instance is dead.
        decode: its reason; "unasked": it was not asked.
        tokens: of decode.
    """

    plan: Plan
    prefill: str
    decode: str = "unasked"
    tokens: Sequence[int] = ()


def served(plan: Plan, prefill: Instance, decode: Instance, source: Params) -> Answers:
    """Send a request, as a router and a client do."""
    name, at_once = plan.name, plan.at_once
    if at_once:
        begin(plan, decode, {"do_remote_prefill": True, "transfer_id": name, **source})
    params: Params = {}
    try:
        prefill.begin(f"p {name}", plan.tokens, 1, {**PREFILL, "transfer_id": name} if at_once else PREFILL)
        if plan.moment in (*FROM_PREFILL, Moment.IN_LOAD):
            time.sleep(plan.pause)
            decode.abort(f"d {name}") if plan.moment is Moment.IN_LOAD else prefill.abort(f"p {name}")
        first = prefill.answer(f"p {name}")
        reason, params = first["reason"], first.get("params") or {}
    except EndedError:
        reason = "ended"
    if not at_once:
        if not params or plan.moment is Moment.UNASKED:
            return Answers(plan, reason)
        begin(plan, decode, params)
        if plan.moment is Moment.AS_DECODE_BEGINS:
            decode.abort(f"d {name}")
    second = decode.answer(f"d {name}")
    return Answers(plan, reason, second["reason"], second["tokens"])


def begin(plan: Plan, decode: Instance, params: Params) -> None:
    """Ask decode."""
    decode.begin(f"d {plan.name}", plan.tokens, COUNT, params, plan.leave)


def check(answers: Answers, tokens_of: TokensOf, *, killed: bool = False) -> None:
    """Right tokens, as far as the client stayed; an error only where prefill has gone."""
    plan = answers.plan
    whole = (answers.prefill, answers.decode) == ("length", "length")
    assert whole or plan.moment is not Moment.NEVER or killed, answers
    assert answers.prefill != "abort" or plan.moment in FROM_PREFILL, answers
    assert answers.decode != "abort" or plan.moment in FROM_DECODE, answers
    assert answers.decode != "error" or answers.prefill == "abort" or killed, answers
    wanted = tokens_of(plan.tokens, COUNT) if answers.tokens else []
    got = list(answers.tokens)
    assert got == (wanted if answers.decode == "length" else wanted[: len(got)]), answers


def check_unused(*instances: Instance) -> None:
    """All blocks are free again, without any further request."""
    until = time.monotonic() + FREE_S
    for one in instances:
        while not one.unused():
            assert time.monotonic() < until, f"blocks are stranded: {one.log.read_text()[-4000:]}"
            time.sleep(0.2)


def source_of(prefill: Instance) -> Params:
    """As a router knows it, of the instance's first answer."""
    found = prefill.ask("first", [3] * 5, 1, PREFILL)["params"]
    return {key: found[key] for key in ("instance", "addresses")}


@pytest.fixture(scope="module")
def begun(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, Instance, Instance]]:
    """Two prefill instances and one of decode."""
    folder = tmp_path_factory.mktemp("aborts")
    roles = {"prefill": "kv_producer", "doomed": "kv_producer", "decode": "kv_consumer"}
    instances = [
        Instance(folder / f"{name}.log", model, transfer(role, **OPTIONS), **CONFIG) for name, role in roles.items()
    ]
    try:
        for one in instances:
            one.ready()
        yield instances[0], instances[1], instances[2]
    finally:
        for one in instances:
            one.close()


def test_no_block_is_stranded_by_clients_that_go_away_at_any_moment(
    begun: tuple[Instance, Instance, Instance], tokens_of: TokensOf
) -> None:
    """100 requests, eight of them at a time. Later ones have the right tokens."""
    prefill, _, decode = begun
    draw, source = random.Random(7), source_of(prefill)
    plans = [Plan.drawn(f"abort {number}", draw) for number in range(100)]
    with ThreadPoolExecutor(IN_FLIGHT) as clients:
        answers = list(clients.map(lambda plan: served(plan, prefill, decode, source), plans))
    for one in answers:
        check(one, tokens_of)
    went = Counter(one.plan.moment for one in answers if "abort" in (one.prefill, one.decode))
    assert min(went[moment] for moment in (*FROM_PREFILL, *FROM_DECODE)) >= 3, went
    check_unused(prefill, decode)
    for number, plan in enumerate(plans[:3]):
        later = serve(prefill, decode, f"later {number}", plan.tokens, COUNT)
        assert (later["reason"], later["tokens"]) == ("length", tokens_of(plan.tokens, COUNT))
    check_unused(prefill, decode)


def test_decode_goes_on_with_another_prefill_instance_when_one_is_killed(
    begun: tuple[Instance, Instance, Instance], tokens_of: TokensOf
) -> None:
    """The same requests to both instances of prefill. One dies amid them; those of the other have the right answers."""
    prefill, doomed, decode = begun
    draw = random.Random(8)
    sources = {one: source_of(one) for one in (prefill, doomed)}
    plans = [Plan.drawn(f"kill {number}", draw) for number in range(40)]
    asked = [doomed if number % 2 else prefill for number in range(len(plans))]
    with ThreadPoolExecutor(IN_FLIGHT) as clients:
        futures = [clients.submit(served, plan, of, decode, sources[of]) for plan, of in zip(plans, asked, strict=True)]
        futures[10].result()
        doomed.kill()
        answers = [one.result() for one in futures]
    for one, of in zip(answers, asked, strict=True):
        check(one, tokens_of, killed=of is doomed)
    ended = [one.prefill == "ended" for one in answers]
    assert 0 < sum(ended) < len(ended[1::2]), answers
    check_unused(prefill, decode)
    later = serve(prefill, decode, "later", plans[0].tokens, COUNT)
    assert (later["reason"], later["tokens"]) == ("length", tokens_of(plans[0].tokens, COUNT))
    check_unused(prefill, decode)
