"""Instances of vLLM serve through the connector: the tokens are those of one instance, or there is a named error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Start
from .instances import PREFILL, Instance, serve, transfer

pytestmark = pytest.mark.timeout(900)

LENGTHS = (5, 32, 33, 150, 400)
COUNT = 12

TokensOf = Callable[[list[int], int], list[int]]


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 512) for _ in range(length)]


def both(start: Start, prefill: dict[str, object], decode: dict[str, object]) -> tuple[Instance, Instance]:
    instances = start("prefill", **prefill), start("decode", **decode)
    return instances[0].ready(), instances[1].ready()


def logged(instance: Instance, text: str) -> bool:
    return text in instance.log.read_text()


@pytest.mark.parametrize(
    ("strategy", "carrier"),
    [("auto", "shm"), ("staged+layer_pipelined", "shm"), ("auto", "nixl"), ("auto", "mooncake")],
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1)])
def test_tokens_are_those_of_one_instance(
    start: Start, tokens_of: TokensOf, prefill_tp: int, decode_tp: int, strategy: str, carrier: str
) -> None:
    """Chunked prefill of 64 tokens, and a checksum of every byte."""
    options = {"strategy": strategy, "transport": carrier, "verify": "full"}
    wanted = {length: tokens_of(prompt(length), COUNT) for length in LENGTHS}
    prefill, decode = both(
        start,
        {"kv": transfer("kv_producer", **options), "tp": prefill_tp, "args": {"max_num_batched_tokens": 64}},
        {"kv": transfer("kv_consumer", **options), "tp": decode_tp},
    )
    for length in LENGTHS:
        answer = serve(prefill, decode, str(length), prompt(length), COUNT)
        assert (answer["reason"], answer["tokens"]) == ("length", wanted[length]), length
    assert decode.metric("vllm:disagg_kv_loaded_total") == len(LENGTHS) * decode_tp
    assert decode.metric("vllm:disagg_kv_load_failed_total") == 0
    assert decode.prompt_tokens("local_compute") <= len(LENGTHS)  # the last token of each


def test_decode_keeps_another_dtype(start: Start) -> None:
    """Prefill's cache is float32, decode's float16: half the bytes, and checksums compare them with the conversion."""
    options = {"description": "common", "verify": "full"}
    prefill, decode = both(
        start,
        {"kv": transfer("kv_producer", **options)},
        {"kv": transfer("kv_consumer", **options), "dtype": "float16"},
    )
    for length in LENGTHS:
        answer = serve(prefill, decode, str(length), prompt(length), COUNT)
        assert (answer["reason"], len(answer["tokens"])) == ("length", COUNT)
    assert decode.metric("vllm:disagg_kv_loaded_total") == len(LENGTHS)
    assert decode.metric("vllm:disagg_kv_load_failed_total") == 0
    per_row = 4 * 2 * 4 * 32 * 2  # layers, K and V, heads, elements, bytes
    assert decode.metric("vllm:disagg_kv_loaded_bytes_sum") == sum(LENGTHS) * per_row


def test_swapped_heads_give_other_tokens(start: Start, tokens_of: TokensOf) -> None:
    """The comparison above can fail."""
    wrong = {
        **transfer("kv_consumer"),
        "kv_connector": "SwappedHeads",
        "kv_connector_module_path": "tests.engines.swapped",
    }
    prefill, decode = both(start, {"kv": transfer("kv_producer")}, {"kv": wrong})
    answer = serve(prefill, decode, "swapped", prompt(150), COUNT)
    assert answer["reason"] == "length"
    assert answer["tokens"] != tokens_of(prompt(150), COUNT)


def test_rows_in_the_prefix_cache_of_decode_are_not_sent_again(start: Start, tokens_of: TokensOf) -> None:
    prefill, decode = both(
        start,
        {"kv": transfer("kv_producer"), "prefix_caching": True},
        {"kv": transfer("kv_consumer"), "prefix_caching": True},
    )
    first, second = prompt(300), [*prompt(300)[:256], *prompt(60, seed=1)]
    assert serve(prefill, decode, "first", first, COUNT)["tokens"] == tokens_of(first, COUNT)
    whole = decode.metric("vllm:disagg_kv_loaded_bytes_sum")
    assert serve(prefill, decode, "second", second, COUNT)["tokens"] == tokens_of(second, COUNT)
    assert decode.metric("vllm:disagg_kv_loaded_bytes_sum") - whole < whole / 2


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_another_block_size_is_refused_by_name(start: Start, tokens_of: TokensOf, policy: str) -> None:
    """VLLM's own connector gives wrong tokens here."""
    prefill, decode = both(
        start,
        {"kv": transfer("kv_producer"), "block_size": 32},
        {"kv": transfer("kv_consumer", policy), "block_size": 64},
    )
    answer = serve(prefill, decode, "blocks", prompt(150), COUNT)
    if policy == "fail":
        assert answer["reason"] == "error"
    else:
        assert answer["tokens"] == tokens_of(prompt(150), COUNT)
    assert logged(decode, "tokens_per_row")


def test_rows_of_another_request_are_refused_by_name(start: Start, tokens_of: TokensOf) -> None:
    """VLLM's own connector gives wrong tokens here, too. The other request keeps its rows."""
    prefill, decode = both(start, {"kv": transfer("kv_producer")}, {"kv": transfer("kv_consumer", "recompute")})
    mine, other = prompt(150), prompt(150, seed=1)
    theirs = prefill.ask("p-other", other, 1, PREFILL)["params"]
    prefill.ask("p-mine", mine, 1, PREFILL)
    assert decode.ask("d-mine", mine, COUNT, theirs)["tokens"] == tokens_of(mine, COUNT)
    assert logged(decode, "tag")


@pytest.mark.parametrize(
    "tampered",
    [
        {"transfer_id": 7},
        {"transfer_id": "there is none"},
        {"addresses": "unix:///nowhere"},
        {"addresses": ["unix:///nowhere/at/all.sock"]},
        {"instance": ""},
        {"instance": "another"},
    ],
)
def test_tampered_parameters_end_in_an_error(pair: tuple[Instance, Instance], tampered: dict[str, object]) -> None:
    prefill, decode = pair
    params = prefill.ask(f"p {tampered}", prompt(50), 1, PREFILL)["params"]
    answer = decode.ask(f"d {tampered}", prompt(50), COUNT, {**params, **tampered})
    assert answer["reason"] == "error"


@pytest.fixture(scope="module")
def pair(model: object, tmp_path_factory: pytest.TempPathFactory) -> object:
    """A prefill and a decode instance for many tests."""
    folder = tmp_path_factory.mktemp("pair")
    instances = [
        Instance(folder / f"{role}.log", model, transfer(f"kv_{role}", silence_s=5.0))  # type: ignore[arg-type]
        for role in ("producer", "consumer")
    ]
    for one in instances:
        one.ready()
    yield tuple(instances)
    for one in instances:
        one.close()


def test_decode_goes_on_when_prefill_is_killed(start: Start, tokens_of: TokensOf) -> None:
    """The first request may wait until the loss is noticed; later ones fail at once. Another instance serves on."""
    doomed, other = start("doomed", transfer("kv_producer")), start("other", transfer("kv_producer"))
    decode = start("decode", transfer("kv_consumer")).ready()
    doomed.ready(), other.ready()
    assert serve(doomed, decode, "before", prompt(50), COUNT)["tokens"] == tokens_of(prompt(50), COUNT)
    params = [doomed.ask(f"p{n}", prompt(50, seed=n), 1, PREFILL)["params"] for n in range(4)]
    doomed.kill()
    for number, one in enumerate(params):
        began = time.monotonic()
        assert decode.ask(f"d{number}", prompt(50, seed=number), COUNT, one)["reason"] == "error"
        assert number == 0 or time.monotonic() - began < 3.0
    assert serve(other, decode, "after", prompt(50), COUNT)["tokens"] == tokens_of(prompt(50), COUNT)


def test_an_instance_that_does_both(start: Start, tokens_of: TokensOf) -> None:
    """Rows cross in both directions."""
    one, two = both(start, {"kv": transfer("kv_both")}, {"kv": transfer("kv_both")})
    assert serve(one, two, "there", prompt(100), COUNT)["tokens"] == tokens_of(prompt(100), COUNT)
    assert serve(two, one, "back", prompt(101), COUNT)["tokens"] == tokens_of(prompt(101), COUNT)


def test_requests_in_flight_together(pair: tuple[Instance, Instance], tokens_of: TokensOf) -> None:
    prefill, decode = pair
    lengths = range(20, 180, 20)
    for length in lengths:
        prefill.begin(f"p-many {length}", prompt(length), 1, PREFILL)
    for length in lengths:
        decode.begin(f"d-many {length}", prompt(length), COUNT, prefill.answer(f"p-many {length}")["params"])
    for length in lengths:
        assert decode.answer(f"d-many {length}")["tokens"] == tokens_of(prompt(length), COUNT)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stratgy": "auto"}, "stratgy"), ({"channel": "pigeon"}, "pigeon"), ({"silence_s": -1}, "silence_s")],
)
def test_a_wrong_option_is_named_at_the_start(start: Start, options: dict[str, Any], message: str) -> None:
    instance = start("wrong", transfer("kv_producer", **options))
    with pytest.raises(AssertionError, match="has ended"):
        instance.ready()
    assert logged(instance, message)
