"""The time to decode's first token in SGLang: the plug-in beside SGLang's own backend ``mooncake_tcp``.

Each backend has a prefill and a decode server of its own; all stay up, and take turns of a few requests. SGLang's
schedulers never sleep, so the servers whose turn it is not are stopped (``SIGSTOP``). A request goes to both servers at
once, as a router sends it. The time is taken at the client, from then until decode has answered with two tokens:
the first is prefill's, the second is the first that decode has computed from the rows that it got. It includes both
computations, which the backends share. ``ratio`` is the median over all pairs of ours over SGLang's, with a 95 %
interval by order statistics.

    python -m benchmarks.sglang_latency --model DIRECTORY --tp 1->1,2->1,1->2 --requests 30

Runs in the environment of ``nox -s engines_sglang``. Without ``--model`` a small random one is made.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.machine import Machine
from benchmarks.vllm_latency import compared, prompts
from tests.engines.instances import small_model
from tests.engines.sglang_servers import Server

BACKENDS = ("disagg_kv", "mooncake_tcp")
WARM_UP = 3
TURN = 5
"""Requests of one backend before the other has its turn."""
TOKENS = 2
ROOMS = 1 << 20


def request(pair: tuple[Server, Server], room: int, tokens: list[int]) -> float:
    """Seconds until decode's first token."""
    prefill, decode = pair
    began = time.monotonic()
    first = prefill.begin(tokens, 1, prefill, room)
    answer = decode.begin(tokens, TOKENS, prefill, room).result()
    seconds = time.monotonic() - began
    assert len(answer.get("output_ids", ())) == TOKENS, answer
    first.result()
    return seconds


def measure(model: Path, tp: str, tokens: int, requests: int) -> dict[str, Any]:
    """One pair of TP sizes."""
    sizes = dict(zip(("prefill", "decode"), map(int, tp.split("->")), strict=True))
    started: dict[str, tuple[Server, Server]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        for name in BACKENDS:
            bootstrap, made = None, []
            for role, size in sizes.items():
                log = Path(folder) / f"{name} {role}.log"
                made.append(Server(log, model, role, backend=name, bootstrap=bootstrap, tp_size=size))
                bootstrap = made[0].bootstrap
                ends.callback(made[-1].close)
            started[name] = made[0].ready(), made[1].ready()
            for server in made:
                server.pause()
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        given = prompts(tokens, requests + WARM_UP)
        for turn, at in enumerate(range(0, len(given), TURN)):
            for name in sorted(BACKENDS, reverse=bool(turn % 2)):
                for server in started[name]:
                    server.go_on()
                for number in range(at, min(at + TURN, len(given))):
                    times[name].append(request(started[name], ROOMS + number, given[number]))
                for server in started[name]:
                    server.pause()
    ours, theirs = (times[name][WARM_UP:] for name in BACKENDS)
    return {
        "tp": tp, "tokens": tokens, "requests": requests, **compared(ours, theirs),
        **{
            f"{name}_ms": {"p50": round(median(of) * 1e3, 2), "p95": round(quantiles(of, n=20)[-1] * 1e3, 2)}
            for name, of in zip(BACKENDS, (ours, theirs), strict=True)
        },
    }  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tp", default="1->1,2->1,1->2", type=lambda text: text.split(","))
    parser.add_argument("--tokens", default=150, type=int)
    parser.add_argument("--requests", default=30, type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or small_model(Path(folder))
        rows = []
        for tp in given.tp:
            rows.append(measure(model, tp, given.tokens, given.requests))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    here = Machine.here()
    names = ("sglang", "mooncake-transfer-engine-non-cuda")
    versions = {**here.versions, **{name: version(name) for name in names}}
    machine = {"cpu": here.cpu, "cores": here.cores}
    print(json.dumps({"commit": here.commit, "machine": machine, "versions": versions, "latency": rows}, indent=1))


if __name__ == "__main__":
    main()
