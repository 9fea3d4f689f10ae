"""What transfers cost the requests that decode computes meanwhile, in vLLM.

    python -m benchmarks.engines_gpu.beside --model MODEL --block 64 --out FOLDER
    python -m benchmarks.engines_gpu.beside --cpu --model TINY_MODEL --block 32 --tokens 300 --answer 32 --out FOLDER

Prefill has the first GPU, decode the last. Decode computes ``--running`` requests of its own at once, which take no
transfer: once alone, and once while it loads ``--loads`` other requests a second from prefill, of which it computes one
token each. The two take turns, and so do this library and vLLM's own connectors, whose instances live all the time. A
result is the median time between two tokens of the running requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from attrs import define, evolve, field

from benchmarks.tables import Found, table

from .__main__ import Gpus, header, settings
from .cases import LOAD_TOKENS, PAIRS, Mode, Spec
from .cases import specs as specs_of
from .engines import Instance, Live, RequestError
from .figures import quantile, ratio
from .turns import CPU_ARGS, CPU_ENVIRONMENT, PROGRAM, START_S, parser_of

SHORT = 64
"""Tokens of a running request's prompt, which decode computes itself."""


MODES = (Mode("ours", "at once"), Mode("nixl", "after prefill"), Mode("push", "at once"))


def specs(given: argparse.Namespace, gpus: int, modes: Sequence[Mode]) -> dict[str, list[Spec]]:
    """Prefill and decode of each pair."""
    pairs = [PAIRS[mode.pair] for mode in modes]
    made = specs_of(pairs, "1to1", given.block, max(2, gpus), given.model)
    return {name: [_on_cpu(one) for one in both] if given.cpu else list(both) for name, both in made.items()}


def _on_cpu(spec: Spec) -> Spec:
    args = {**CPU_ARGS, **{name: spec.config["args"][name] for name in ("block_size", "enable_prefix_caching")}}
    config = {**spec.config, "args": args, "kv": {**spec.config["kv"], "kv_connector_extra_config": {}}}
    return evolve(spec, config=config, env={**spec.env, **CPU_ENVIRONMENT})


@define(eq=False)
class Run:
    """What was asked, and what came of it: seconds between tokens in each turn, by mode."""

    given: argparse.Namespace
    gpus: int
    program: Sequence[str] = PROGRAM
    modes: Sequence[Mode] = MODES
    alone: dict[str, list[float]] = field(factory=dict)
    beside: dict[str, list[float]] = field(factory=dict)
    red: list[str] = field(factory=list)
    _asked: int = 0

    async def all(self) -> None:
        """Start, warm up, measure; kill the instances whatever happens."""
        self.given.out.mkdir(parents=True, exist_ok=True)
        started: dict[str, list[Instance]] = {}
        try:
            for name, both in specs(self.given, self.gpus, self.modes).items():
                started[name] = [await Instance.start(spec, self.program, self.given.out) for spec in both]
            await asyncio.gather(*(one.ready(START_S) for both in started.values() for one in both))
            live = {name: Live(PAIRS[name], *both) for name, both in started.items()}  # type: ignore[arg-type]
            for name, one in live.items():
                await one.ask(Mode(name, "after prefill"), 1, self.given.tokens, 1)
            for number in range(-1, 2 * self.given.reps):
                for mode in self.modes:
                    loads = number % 4 in (1, 2)
                    between = await self._turn(live[mode.pair], mode, loads=loads)
                    print(f"{number:3} {mode.name}: {between * 1e3:.3f} ms", "beside" if loads else "", flush=True)
                    if number >= 0:
                        (self.beside if loads else self.alone).setdefault(mode.name, []).append(between)
        except* RequestError as failed:
            self.red += map(str, failed.exceptions)
        finally:
            await asyncio.gather(*(one.close() for both in started.values() for one in both))

    async def _turn(self, live: Live, mode: Mode, *, loads: bool) -> float:
        """Seconds between tokens of the running requests."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run(live)) for _ in range(self.given.running)]
            while loads and not all(one.done() for one in running):
                self._asked += 1
                tasks.create_task(live.ask(mode, self._asked, self.given.tokens, 1))
                await asyncio.wait(running, timeout=1 / self.given.loads)
        return median(one.result() for one in running)

    async def _run(self, live: Live) -> float:
        self._asked += 1
        answer = await live.decode.ask(
            {"id": f"own {self._asked}", "seed": self._asked, "length": SHORT, "new": self.given.answer, "params": None}
        )
        took: float = answer["t2"] - answer["t1"]
        return took / (int(self.given.answer) - 1)


def document(run: Run, gpus: Gpus | None) -> dict[str, Any]:
    """The results, for JSON."""
    given = run.given
    return {
        **header("beside", given.commit, gpus),
        "settings": {**settings("vllm"), "block": given.block},
        "tokens": given.tokens,
        "running": given.running,
        "answer": given.answer,
        "ok": not run.red,
        "red": run.red,
        "loads_per_s": given.loads,
        "alone_ms": _ms(run.alone),
        "beside_ms": _ms(run.beside),
    }


def _ms(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(1e3 * one, 4) for one in of] for name, of in seconds.items()}


def shown(found: Found) -> str:
    """Both of each mode, and the ratio."""
    rows = [["between tokens, ms, p50 / p90", "alone", "while others are loaded", "ratio, 95% interval"]]
    for mode, alone in found["alone_ms"].items():
        beside = found["beside_ms"][mode]
        cells = (f"{quantile(one, 0.5):.2f} / {quantile(one, 0.9):.2f}" for one in (alone, beside))
        rows.append([mode, *cells, f"**{ratio(beside, alone)}**"])
    return table(rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=LOAD_TOKENS, help="of a prompt that is loaded")
    parser.add_argument("--running", type=int, default=6, help="requests that decode computes at once")
    parser.add_argument("--loads", type=float, default=10.0, help="requests that are loaded in a second")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each request that decode computes")
    parser.add_argument("--reps", type=int, default=8, help="turns of each kind")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    given = arguments(argv)
    gpus = None if given.cpu else Gpus.here()
    run = Run(given, 2 if gpus is None else len(gpus.names), modes=MODES[:1] if given.cpu else MODES)
    asyncio.run(run.all())
    found = document(run, gpus)
    (given.out / "beside.json").write_text(json.dumps(found) + "\n")
    print(*([] if run.red else [shown(found)]), *run.red, sep="\n", flush=True)
    return 1 if run.red else 0


if __name__ == "__main__":
    sys.exit(main())
