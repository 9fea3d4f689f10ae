"""The first token of each turn of a conversation, between vLLM instances: one-way, and both ways.

    python -m benchmarks.engines_gpu.turns --model MODEL --block 64 --out FOLDER
    python -m benchmarks.engines_gpu.turns --cpu --model TINY_MODEL --block 32 --context 300 --new 64 --out FOLDER

Two GPUs: the prefill instances share the first, decode has the second; with one, all share it. Decode keeps a prefix
cache in all modes, so prefill sends what it lacks. Modes:

* ``no cache``: prefill has no prefix cache. It computes each prompt from its first token.
* ``another instance``: two prefill instances with prefix caches take turns.
* ``both ways``: the same, and each loads the rows that it lacks from decode.
* ``same instance``: one prefill instance has all turns, and a prefix cache. It lacks the answer, and the new words.

The first prompt has ``--context`` tokens, and each further one the answer before and ``--new`` tokens more. Both
instances are asked at once; a time is from then to decode's first token. ``cached`` are the tokens that prefill did not
compute. The exit code is 1 if a request failed, or prefill computed other tokens than the mode says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from benchmarks.tables import table

from .__main__ import Gpus, header, settings
from .cases import FIRST_PORT, PAIRS, SOURCE, Spec, engine_args, environment, transfer
from .engines import PREFILL_PARAMS, Instance, RequestError
from .figures import quantile
from .instance import prompt

TURNS = 4
HOLD_S = 60.0
START_S = 300.0

PROGRAM = (sys.executable, "-m", "benchmarks.engines_gpu.instance")

CPU_ARGS: Mapping[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
CPU_ENVIRONMENT: Mapping[str, str] = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


@frozen
class Mode:
    """How a conversation is served.

    Args:
        name: in results.
        prefills: which prefill instances take turns.
        back: rows go both ways.
    """

    name: str
    prefills: Sequence[str]
    back: bool = False


MODES = (
    Mode("no cache", ("plain",)),
    Mode("another instance", ("one", "two")),
    Mode("both ways", ("one", "two"), back=True),
    Mode("same instance", ("one",)),
)
DECODE = "decode"
INSTANCES = ("plain", "one", "two", DECODE)


@frozen
class Turn:
    """One of a conversation: milliseconds to the first token, tokens of the prompt, and those that prefill had."""

    ttft: float
    tokens: int
    cached: int


def specs(given: argparse.Namespace, gpus: int = 2) -> list[Spec]:
    """The instances to start. All of them could do both; prefix caches are on but for ``plain``."""
    made = []
    for number, name in enumerate(INSTANCES):
        args: dict[str, Any] = {**engine_args(given.block, 1), "enable_prefix_caching": name != "plain"}
        env = environment(FIRST_PORT + 20 * number, [int(name == DECODE and gpus > 1)], SOURCE)
        kv = {**transfer(PAIRS["ours"], "kv_both"), "engine_id": name}
        if given.cpu:
            args = {**CPU_ARGS, **{key: args[key] for key in ("block_size", "enable_prefix_caching")}}
            env |= CPU_ENVIRONMENT
            kv["kv_connector_extra_config"] = {}
        made.append(Spec(name, {"model": str(given.model), "args": args, "kv": kv}, env))
    return made


@define(eq=False)
class Run:
    """Instances that run, and what they have answered."""

    given: argparse.Namespace
    program: Sequence[str] = PROGRAM
    gpus: int = 2
    instances: dict[str, Instance] = field(factory=dict)
    found: dict[str, list[list[Turn]]] = field(factory=dict)
    red: list[str] = field(factory=list)
    _origins: dict[str, dict[str, Any]] = field(factory=dict)
    _asked: int = 0

    async def all(self) -> None:
        """Start, warm up, measure; kill all instances whatever happens."""
        self.given.out.mkdir(parents=True, exist_ok=True)
        try:
            for spec in specs(self.given, self.gpus):
                self.instances[spec.name] = await Instance.start(spec, self.program, self.given.out)
            await asyncio.gather(*(one.ready(START_S) for one in self.instances.values()))
            print("all instances have started", flush=True)
            for rep in range(-1, self.given.reps):
                for number, mode in enumerate(MODES):
                    turns = await self._conversation(mode, 1000 * (rep + 2) + number)
                    print(f"{rep:3} {mode.name}: {' '.join(f'{one.ttft:.0f}' for one in turns)} ms", flush=True)
                    if rep >= 0:
                        self.found.setdefault(mode.name, []).append(turns)
                        self._check(mode, turns)
        except RequestError as exc:
            self.red.append(str(exc))
        finally:
            await asyncio.gather(*(one.close() for one in self.instances.values()))

    async def _conversation(self, mode: Mode, seed: int) -> list[Turn]:
        tokens, turns = prompt(seed, self.given.context), []
        earlier: Mapping[str, Any] = {}
        for number in range(TURNS):
            prefill = mode.prefills[number % len(mode.prefills)]
            hold = {"hold_s": HOLD_S} if mode.back and number < TURNS - 1 else {}
            began = time.monotonic()
            first, second = await self._ask(prefill, tokens, earlier, hold)
            turns.append(Turn((second["t1"] - began) * 1e3, len(tokens), first["cached"]))
            earlier = {"earlier": second["params"]["earlier"]} if hold else {}
            tokens = [*tokens, *second["tokens"], *prompt(seed + 100 + number, self.given.new)]
        return turns

    async def _ask(
        self, prefill: str, tokens: list[int], earlier: Mapping[str, Any], hold: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answers of both: asked at once, if the prefill instance is known from an earlier answer."""
        self._asked += 1
        name, decode = f"request {self._asked}", self.instances[DECODE]
        asked = {"id": name, "prompt": tokens, "new": 1}
        params = {**PREFILL_PARAMS, "transfer_id": name, **earlier}
        first = self.instances[prefill].ask({**asked, "params": params})
        origin = self._origins.get(prefill)
        if origin is None:
            answer = await first
            self._origins[prefill] = {key: answer["params"][key] for key in ("instance", "addresses")}
            second = decode.ask({**asked, "new": self.given.answer, "params": {**answer["params"], **hold}})
            return answer, await second
        own = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, **origin, **hold}
        one, two = await asyncio.gather(first, decode.ask({**asked, "new": self.given.answer, "params": own}))
        return one, two

    def _check(self, mode: Mode, turns: Sequence[Turn]) -> None:
        """Prefill has the rows that the mode is about; whole blocks of its own, and all that it has loaded."""
        for number, one in enumerate(turns):
            if mode.back and number:
                most = one.tokens - self.given.new - 1
            elif mode.name == "no cache" or number < len(mode.prefills):
                most = 0
            else:
                most = turns[number - len(mode.prefills)].tokens // self.given.block * self.given.block
            if one.cached != most:
                self.red.append(f"{mode.name}, turn {number + 1}: prefill had {one.cached} tokens, not {most}")


def document(run: Run, gpus: Gpus | None) -> dict[str, Any]:
    """The results, for JSON."""
    given = run.given
    return {
        **header("turns", given.commit, gpus),
        "settings": {**settings("vllm"), "block": given.block, "context": given.context, "new": given.new},
        "answer": given.answer,
        "ok": not run.red,
        "red": run.red,
        "modes": {
            name: {
                "ttft_ms": [[round(one.ttft, 3) for one in turns] for turns in every],
                "tokens": [one.tokens for one in every[0]],
                "cached": [one.cached for one in every[0]],
            }
            for name, every in run.found.items()
        },
    }


def shown(found: Mapping[str, Any]) -> str:
    """A row of each mode."""
    rows = [["first token, ms, p50 / p90", *(f"turn {number + 1}" for number in range(TURNS)), "prefill had, tokens"]]
    for name, mode in found["modes"].items():
        turns = zip(*mode["ttft_ms"], strict=True)
        cells = (f"{quantile(one, 0.5):.1f} / {quantile(one, 0.9):.1f}" for one in turns)
        rows.append([name, *cells, ", ".join(f"{one:,}" for one in mode["cached"])])
    return table(rows)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """What this command and others of this folder have in common."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "llama"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the document and the instances' logs")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block")
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    return parser


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=int, default=12_000, help="tokens of the first prompt")
    parser.add_argument("--new", type=int, default=1000, help="new tokens of each further prompt beside the answer")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--reps", type=int, default=5, help="conversations of each mode, after one that warms up")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    given = arguments(argv)
    gpus = None if given.cpu else Gpus.here()
    run = Run(given, gpus=2 if gpus is None else len(gpus.names))
    asyncio.run(run.all())
    found = document(run, gpus)
    (given.out / "turns.json").write_text(json.dumps(found) + "\n")
    print(shown(found), *run.red, sep="\n", flush=True)
    return 1 if run.red else 0


if __name__ == "__main__":
    sys.exit(main())
