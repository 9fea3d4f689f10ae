"""The connector under other settings of vLLM: inside ``MultiConnector``, with its schedulers, with data parallelism."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Start
from .instances import PREFILL, serve, transfer

pytestmark = pytest.mark.timeout(900)

COUNT = 12

TokensOf = Callable[[list[int], int], list[int]]


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, 512) for _ in range(length)]


def inside_multi(role: str, folder: Path) -> dict[str, Any]:
    """The connector beside one of vLLM's own, which stores blocks in files."""
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [transfer(role), files]},
    }


def test_inside_multi_connector(start: Start, tokens_of: TokensOf, tmp_path: Path) -> None:
    prefill = start("prefill", inside_multi("kv_producer", tmp_path / "p"))
    decode = start("decode", inside_multi("kv_consumer", tmp_path / "d"))
    prefill.ready(), decode.ready()
    for length in (33, 150):
        answer = serve(prefill, decode, str(length), prompt(length), COUNT)
        assert (answer["reason"], answer["tokens"]) == ("length", tokens_of(prompt(length), COUNT))


@pytest.mark.parametrize("ahead", [False, True])
def test_async_scheduling(start: Start, tokens_of: TokensOf, ahead: bool) -> None:
    """Whether vLLM schedules a step before it knows the last one's results."""
    args = {"async_scheduling": ahead, "max_num_batched_tokens": 64}
    prefill = start("prefill", transfer("kv_producer", strategy="staged+layer_pipelined"), args=args)
    decode = start("decode", transfer("kv_consumer", verify="full"), args=args)
    prefill.ready(), decode.ready()
    names = [str(length) for length in (20, 100, 180)]
    for name in names:
        prefill.begin(f"p{name}", prompt(int(name)), 1, PREFILL)
    for name in names:
        decode.begin(f"d{name}", prompt(int(name)), COUNT, prefill.answer(f"p{name}")["params"])
    for name in names:
        assert decode.answer(f"d{name}")["tokens"] == tokens_of(prompt(int(name)), COUNT)


def test_data_parallel_ranks(start: Start, tokens_of: TokensOf) -> None:
    """Each is an instance of its own: decode finds the one that has computed the prompt."""
    prefill = start("prefill", transfer("kv_producer"), args={"data_parallel_size": 2})
    decode = start("decode", transfer("kv_consumer")).ready()
    prefill.ready()
    names = [str(length) for length in (20, 40, 60, 80)]
    for name in names:
        prefill.begin(f"p{name}", prompt(int(name)), 1, PREFILL)
    params = {name: prefill.answer(f"p{name}")["params"] for name in names}
    assert len({one["instance"] for one in params.values()}) == 2
    for name in names:
        assert decode.ask(f"d{name}", prompt(int(name)), COUNT, params[name])["tokens"] == tokens_of(
            prompt(int(name)), COUNT
        )


def test_requests_that_vllm_preempts(start: Start, tokens_of: TokensOf) -> None:
    """Neither side has blocks for all requests: vLLM takes them away, on prefill between two chunks of a prompt."""
    few = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 128, "scheduler_reserve_full_isl": False}
    prefill, decode = (
        start(role, transfer(role, verify="full"), args=few, max_model_len=512)
        for role in ("kv_producer", "kv_consumer")
    )
    prefill.ready(), decode.ready()
    wanted, count = {str(length): prompt(length) for length in (160, 224, 256, 288)}, 150
    for name, tokens in wanted.items():
        prefill.begin(f"p{name}", tokens, 1, PREFILL)
    for name, tokens in wanted.items():
        answer = prefill.answer(f"p{name}")
        decode.begin(f"d{name}", tokens, count, answer["params"])
    for name, tokens in wanted.items():
        answer = decode.answer(f"d{name}")
        assert (answer["reason"], answer["tokens"]) == ("length", tokens_of(tokens, count)), name
    assert prefill.metric("vllm:num_preemptions_total") > 0
    assert decode.metric("vllm:num_preemptions_total") > 0
    assert decode.metric("vllm:disagg_kv_load_failed_total") == 0


def test_rows_cross_while_prefill_computes(
    start: Start, tokens_of: TokensOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode is asked first: the first rows are in its cache before the last ones are computed."""
    monkeypatch.setenv("WATCHED", str(tmp_path / "times"))
    options = {"strategy": "staged+layer_pipelined"}
    prefill, decode = (
        start(
            role,
            {
                **transfer(role, **options),
                "kv_connector": "Watched",
                "kv_connector_module_path": "tests.engines.watched",
            },
            args={"max_num_batched_tokens": 64},
        )
        for role in ("kv_producer", "kv_consumer")
    )
    prefill.ready(), decode.ready()
    origin = prefill.ask("p", prompt(20), 1, PREFILL)["params"]
    decode.ask("d", prompt(20), 1, origin)
    (tmp_path / "times").write_text("")
    decode.begin("e", prompt(900), COUNT, {**origin, "transfer_id": "named by the router"})
    prefill.begin("q", prompt(900), 1, {**PREFILL, "transfer_id": "named by the router"})
    assert decode.answer("e")["tokens"] == tokens_of(prompt(900), COUNT)
    times = dict(json.loads(line) for line in (tmp_path / "times").read_text().splitlines())
    assert times["landed"] < times["computed"]
