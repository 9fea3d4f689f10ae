"""What the connector costs in vLLM: decode's first token beside NixlConnector's; an engine that transfers nothing.

Latency: each connector has a prefill and a decode instance of its own; all stay up, and take turns. A request goes to
prefill first. The time is taken in the decode instance, from the request with prefill's answer to the first token. It
includes the computation of that token, which both connectors share. ``ratio`` is the median over all pairs of ours over
vLLM's, with a 95 % interval by order statistics; ``stalled`` counts requests of vLLM's own connector that had no answer
after 15 s. ``load_ms`` is the part of ours from the load's begin until all rows are in their blocks, on average.
``alone_ms`` is the first token after a prompt of one token, which needs no transfer. The rows with ``busy`` are taken
while prefill computes another long prompt.

NIXL's Python API starts a progress thread that never sleeps, one for each worker. On a host with as many cores as
instances the engines starve, and a request takes seconds. ``NixlConnector`` is measured without that thread, which is
faster (``tests/engines/quiet_nixl.py``); ``--progress-thread`` leaves it on. Workers poll for a second after each step:
a pause before each request keeps the idle pair out of the other's figures.

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

from bench.machine import Machine
from benchmarks.pairs import interval
from tests.engines.instances import PREFILL, Instance, nixl, small_model, transfer

WARM_UP = 2
BATCH = 8
PAUSE_S = 1.2
STALLED_S = 15.0
"""A request without an answer after this time counts as this time."""
BLOCKS: dict[str, Any] = {"args": {"num_gpu_blocks_override": 256}}


def prompts(length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Different ones, so that no prefix cache helps."""
    draw = random.Random(f"{length} {seed}")
    return [[draw.randrange(3, 512) for _ in range(length)] for _ in range(count)]


def request(pair: tuple[Instance, Instance], name: str, tokens: list[int], busy: list[int] | None) -> float:
    """Seconds from the request to decode until its first token; at most ``STALLED_S``."""
    prefill, decode = pair
    time.sleep(PAUSE_S)
    params = prefill.ask(f"p-{name}", tokens, 1, PREFILL)["params"]
    if busy is not None:
        prefill.begin(f"b-{name}", busy, 1)
    decode.begin(f"d-{name}", tokens, 1, params)
    answer = decode.answer(f"d-{name}", STALLED_S, {"first_s": STALLED_S, "reason": "length"})
    assert answer["reason"] == "length", answer
    if busy is not None:
        prefill.answer(f"b-{name}")
    return min(float(answer["first_s"]), STALLED_S)


Pairs = dict[str, tuple[Instance, Instance]]


def start(model: Path, tp: str, port: int, progress_thread: bool, folder: Path, ends: ExitStack) -> Pairs:
    """A prefill and a decode instance for each connector. With one rank each has a core of its own."""
    started: Pairs = {}
    for name in ("disagg_kv", "NixlConnector"):
        made = []
        for core, (role, size) in enumerate(zip(("kv_producer", "kv_consumer"), tp.split("->"), strict=True)):
            port += 10
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
            kv = transfer(role) if name == "disagg_kv" else nixl(role, progress_thread)
            made.append(Instance(folder / f"{name} {role}.log", model, kv, tp=int(size), **BLOCKS))
            ends.callback(made[-1].close)
        started[name] = made[0], made[1]
    for pair in started.values():
        for instance in pair:
            instance.ready()
    return started


def measure(started: Pairs, tokens: int, requests: int, busy: bool) -> dict[str, Any]:
    """A row: requests to both connectors in turns."""
    times: dict[str, list[float]] = {name: [] for name in (*started, "alone")}
    other = prompts(900, 1)[0] if busy else None
    decode = started["disagg_kv"][1]
    before = _loads(decode)
    for number, prompt in enumerate(prompts(tokens, requests + WARM_UP, seed=busy)):
        taken: dict[str, float] = {}
        for name in sorted(started, reverse=bool(number % 2)):
            taken[name] = request(started[name], f"{name} {busy} {number}", prompt, other)
            if name == "disagg_kv":
                taken["alone"] = float(decode.ask(f"alone {busy} {number}", prompt[:1], 1)["first_s"])
        if number >= WARM_UP:
            for name, seconds in taken.items():
                times[name].append(seconds)
    loads, seconds = (now - then for now, then in zip(_loads(decode), before, strict=True))
    return {
        "tokens": tokens, "requests": requests, "busy": busy,
        "stalled": sum(seconds >= STALLED_S for seconds in times["NixlConnector"]),
        **compared(times["disagg_kv"], times["NixlConnector"]), "load_ms": round(seconds / loads * 1e3, 2),
        **{f"{name}_ms": _milliseconds(values) for name, values in times.items()},
    }  # fmt: skip


def pairs(model: Path, tp: str, tokens: int, requests: int, port: int, progress_thread: bool) -> list[dict[str, Any]]:
    """One pair of TP sizes: a row without and one with another prompt under way."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        started = start(model, tp, port, progress_thread, Path(folder), ends)
        rows = []
        for busy in (False, True):
            rows.append({"tp": tp, **measure(started, tokens, requests, busy)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _loads(decode: Instance) -> tuple[float, float]:
    """How many ranks' loads have ended, and their seconds."""
    return decode.metric("vllm:disagg_kv_loaded_total"), decode.metric("vllm:disagg_kv_load_seconds_sum")


def compared(ones: list[float], others: list[float]) -> dict[str, float]:
    """The median ratio of pairs, and its bounds."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, high = interval(ratios)
    return {"ratio": round(median(ratios), 3), "low": round(low, 3), "high": round(high, 3)}


def unused(model: Path, turns: int) -> dict[str, Any]:
    """Seconds of a batch in an instance with the connector over those in one without."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        instances = {
            name: Instance(Path(folder) / f"{name}.log", model, kv, **BLOCKS)
            for name, kv in (("with", transfer("kv_both")), ("without", None))
        }
        for one in instances.values():
            ends.callback(one.close)
        for one in instances.values():
            one.ready()
        times: dict[str, list[float]] = {name: [] for name in instances}
        for turn in range(turns + WARM_UP):
            for name in sorted(instances, reverse=bool(turn % 2)):
                time.sleep(PAUSE_S)
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
    parser.add_argument("--progress-thread", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or small_model(Path(folder))
        latency = [
            row
            for number, tp in enumerate(given.tp)
            for row in pairs(model, tp, given.tokens, given.requests, 5600 + 100 * number, given.progress_thread)
        ]
        loaded = unused(model, given.turns)
    here = Machine.here()
    versions = {**here.versions, **{name: version(name) for name in ("vllm-cpu", "nixl")}}
    machine = {"cpu": here.cpu, "cores": here.cores}
    results = {"latency": latency, "unused": loaded}
    print(json.dumps({"commit": here.commit, "machine": machine, "versions": versions, **results}, indent=1))


if __name__ == "__main__":
    main()
