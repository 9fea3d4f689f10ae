"""Decode is asked at once, before prefill has run: what fails ends by name, and no block is held for ever.

The instances are shared by all tests. ``fails`` and ``recomputes`` are decode instances, after their policy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from .instances import PREFILL, Instance, transfer

pytestmark = pytest.mark.timeout(900)

CLAIM_S = 8.0
COUNT = 12
OPTIONS: dict[str, Any] = {"claim_s": CLAIM_S, "silence_s": 10.0}
FEW: dict[str, object] = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 2048}
"""2,016 tokens."""


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 512) for _ in range(length)]


@frozen
class Fleet:
    """Two prefill instances, one of which can be killed, and two decode instances."""

    prefill: Instance
    doomed: Instance
    fails: Instance
    recomputes: Instance


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Started together: most of a start is imports."""
    folder = tmp_path_factory.mktemp("fleet")
    deadly = {"kv_connector": "Deadly", "kv_connector_module_path": "tests.engines.deadly"}
    made = {
        "prefill": transfer("kv_producer", **OPTIONS),
        "doomed": {**transfer("kv_producer", **OPTIONS), **deadly},
        "fails": transfer("kv_consumer", **OPTIONS),
        "recomputes": transfer("kv_consumer", "recompute", **OPTIONS),
    }
    args: dict[str, dict[str, object]] = {"prefill": FEW, "fails": FEW, "doomed": {"max_num_batched_tokens": 64}}
    instances = {
        name: Instance(folder / f"{name}.log", model, kv, max_model_len=1984, args=args.get(name, {}))
        for name, kv in made.items()
    }
    try:
        for one in instances.values():
            one.ready()
        yield Fleet(**instances)
    finally:
        for one in instances.values():
            one.close()


ORIGINS: dict[int, dict[str, Any]] = {}


def origin(prefill: Instance) -> dict[str, Any]:
    """As a router knows it: of the instance's first answer. Nothing asks for that request's rows."""
    if id(prefill) not in ORIGINS:
        found = prefill.ask("origin", prompt(5), 1, PREFILL)["params"]
        ORIGINS[id(prefill)] = {key: found[key] for key in ("instance", "addresses")}
    return ORIGINS[id(prefill)]


def begin(prefill: Instance, decode: Instance, name: str, tokens: list[int], transfer_id: str = "") -> None:
    """Both get a request at once; decode first."""
    await_rows(prefill, decode, name, tokens, transfer_id)
    prefill.begin(f"p {name}", tokens, 1, {**PREFILL, "transfer_id": transfer_id or name})


def await_rows(prefill: Instance, decode: Instance, name: str, tokens: list[int], transfer_id: str = "") -> None:
    """Decode alone gets it."""
    params = {"do_remote_prefill": True, "transfer_id": transfer_id or name, **origin(prefill)}
    decode.begin(f"d {name}", tokens, COUNT, params)


def serve(prefill: Instance, decode: Instance, name: str, tokens: list[int]) -> dict[str, Any]:
    """The answer of decode."""
    begin(prefill, decode, name, tokens)
    return decode.answer(f"d {name}")


def alone(decode: Instance, tokens: list[int]) -> list[int]:
    """What the instance answers if it computes the prompt itself."""
    name = f"alone {hash(tuple(tokens))} {random.random()}"
    return list(decode.ask(name, tokens, COUNT)["tokens"])


@contextmanager
def full(instance: Instance) -> Iterator[None]:
    """Its cache is full of other requests: no two have room together, so each begins once the one before has ended."""
    names = [f"busy {number} {random.random()}" for number in range(10)]
    for number, name in enumerate(names):
        instance.begin(name, prompt(1020, number), 900)
    try:
        yield
    finally:
        for name in names:
            instance.abort(name)


def check_quiet(*instances: Instance) -> None:
    """All blocks are free again, at the latest once each time of the tests is over."""
    for one in instances:
        for number in range(60):
            if one.metric("vllm:kv_cache_usage_perc") == 0:
                break
            one.ask(f"step {number} {random.random()}", prompt(5), 1)
            one.answer("pause", 0.5, {})
        else:
            raise AssertionError(f"blocks are stranded: {one.log.read_text()[-4000:]}")


def logged(instance: Instance, *texts: str) -> bool:
    """Whether one line of its log has them all."""
    return any(all(text in line for text in texts) for line in instance.log.read_text().splitlines())


def test_tokens_are_those_of_an_instance_alone(fleet: Fleet) -> None:
    for length in (5, 33, 150, 900):
        answer = serve(fleet.prefill, fleet.fails, f"equal {length}", prompt(length))
        assert (answer["reason"], answer["tokens"]) == ("length", alone(fleet.fails, prompt(length)))
    assert fleet.fails.metric("vllm:disagg_kv_loaded_total") == 4
    check_quiet(fleet.prefill, fleet.fails)


def test_a_request_that_prefill_never_gets_ends_by_name_and_may_be_retried(fleet: Fleet) -> None:
    """Its router lost the connection to prefill, and does not abort decode's request either."""
    tokens = prompt(60, 1)
    await_rows(fleet.prefill, fleet.fails, "lost", tokens)
    await_rows(fleet.prefill, fleet.recomputes, "lost too", tokens)
    assert fleet.fails.answer("d lost")["reason"] == "error"
    assert logged(fleet.fails, "was not loaded", "lost", "(claim_s)")
    assert fleet.recomputes.answer("d lost too")["tokens"] == alone(fleet.recomputes, tokens)
    check_quiet(fleet.fails)
    assert serve(fleet.prefill, fleet.fails, "retry", tokens)["tokens"] == alone(fleet.fails, tokens)


def test_a_request_that_prefill_refuses_ends_as_the_router_ends_it(fleet: Fleet) -> None:
    """It is too long for prefill; the router aborts decode's request."""
    loaded = fleet.fails.metric("vllm:disagg_kv_load_failed_total")
    await_rows(fleet.prefill, fleet.fails, "refused", prompt(1500))
    refusal = fleet.prefill.ask("p refused", prompt(3000), 1, {**PREFILL, "transfer_id": "refused"})
    assert (refusal["reason"], "max" in refusal["error"]) == ("error", True)
    fleet.fails.abort("d refused")
    assert fleet.fails.answer("d refused")["reason"] == "abort"
    until = time.monotonic() + 10  # vLLM's front end answers, and counts, at times of its own
    while fleet.fails.metric("vllm:disagg_kv_load_failed_total") == loaded and time.monotonic() < until:
        time.sleep(0.1)
    assert fleet.fails.metric("vllm:disagg_kv_load_failed_total") == loaded + 1
    assert logged(fleet.fails, "was not loaded", "refused", "the engine has ended the request")
    check_quiet(fleet.fails, fleet.prefill)


def test_clients_that_go_away_at_any_time_leave_no_block(fleet: Fleet) -> None:
    """The router ends both requests, in either order."""
    draw = random.Random(3)
    for number in range(20):
        name = f"gone {number}"
        begin(fleet.prefill, fleet.fails, name, prompt(draw.randrange(20, 600), number))
        fleet.fails.answer("pause", draw.uniform(0.001, 0.06), {})
        ends = [(fleet.prefill, f"p {name}"), (fleet.fails, f"d {name}")]
        draw.shuffle(ends)
        for one, request in ends:
            one.abort(request)
        for one, request in ends:
            assert one.answer(request)["reason"] in ("abort", "length")
    check_quiet(fleet.prefill, fleet.fails)


LONG_S = 1.5 * CLAIM_S


def test_a_request_that_decode_queues_for_longer_than_claim_s_is_served(fleet: Fleet) -> None:
    """Prefill has finished it, and keeps its blocks. One that is aborted in the queue ends on both sides."""
    with full(fleet.fails):
        begin(fleet.prefill, fleet.fails, "queued", prompt(150, 2))
        begin(fleet.prefill, fleet.fails, "queued and gone", prompt(150, 3))
        fleet.prefill.answer("p queued"), fleet.prefill.answer("p queued and gone")
        assert fleet.fails.answer("d queued", LONG_S, {}) == {}
        assert fleet.prefill.metric("vllm:kv_cache_usage_perc") > 0
        fleet.fails.abort("d queued and gone")
    answer = fleet.fails.answer("d queued")
    assert (answer["reason"], answer["tokens"]) == ("length", alone(fleet.fails, prompt(150, 2)))
    check_quiet(fleet.prefill, fleet.fails)


def test_a_request_that_prefill_queues_for_longer_than_claim_s_is_served(fleet: Fleet) -> None:
    """Decode has its blocks, and waits. One that is aborted in the queue ends on both sides."""
    with full(fleet.prefill):
        begin(fleet.prefill, fleet.fails, "waits", prompt(150, 4))
        begin(fleet.prefill, fleet.fails, "waits and goes", prompt(150, 5))
        assert fleet.fails.answer("d waits", LONG_S, {}) == {}
        fleet.prefill.abort("p waits and goes")
        assert fleet.fails.answer("d waits and goes")["reason"] == "error"
    answer = fleet.fails.answer("d waits")
    assert (answer["reason"], answer["tokens"]) == ("length", alone(fleet.fails, prompt(150, 4)))
    check_quiet(fleet.prefill, fleet.fails)


@pytest.mark.parametrize("over", [False, True], ids=["live", "over"])
def test_a_transfer_id_that_a_router_uses_again_gives_no_wrong_tokens(fleet: Fleet, over: bool) -> None:
    """For another prompt, on one decode instance or on another."""
    first, second = prompt(400, 10 + over), prompt(420, 20 + over)
    name = f"twice {over}"
    begin(fleet.prefill, fleet.recomputes, name, first)
    if over:
        assert fleet.recomputes.answer(f"d {name}")["tokens"] == alone(fleet.recomputes, first)
    begin(fleet.prefill, fleet.recomputes, f"{name} again", second, name)
    await_rows(fleet.prefill, fleet.fails, f"{name} elsewhere", second, name)
    if not over:
        assert fleet.recomputes.answer(f"d {name}")["tokens"] == alone(fleet.recomputes, first)
    assert fleet.recomputes.answer(f"d {name} again")["tokens"] == alone(fleet.recomputes, second)
    assert fleet.fails.answer(f"d {name} elsewhere")["reason"] == "error"
    check_quiet(fleet.prefill, fleet.recomputes, fleet.fails)


def test_prefill_that_is_killed_in_a_prompt_ends_requests_by_the_policy_of_decode(fleet: Fleet) -> None:
    """The next requests go through another prefill instance."""
    tokens = prompt(800, 5)
    begin(fleet.doomed, fleet.recomputes, "deadly", tokens)
    begin(fleet.doomed, fleet.fails, "beside", prompt(900, 6))
    assert fleet.recomputes.answer("d deadly")["tokens"] == alone(fleet.recomputes, tokens)
    assert fleet.fails.answer("d beside")["reason"] == "error"
    assert logged(fleet.fails, "was not loaded", "beside")
    for decode in (fleet.fails, fleet.recomputes):
        answer = serve(fleet.prefill, decode, f"after {id(decode)}", tokens)
        assert (answer["reason"], answer["tokens"]) == ("length", alone(decode, tokens))
    check_quiet(fleet.fails, fleet.recomputes, fleet.prefill)
