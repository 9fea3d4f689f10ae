"""Gaps, first tokens and throughput of prefill -> decode between instances of vLLM or SGLang, all pairs live at once.

    python -m benchmarks.engines_gpu run --topology 1to1 --block 64 --model MODEL --out DIR
    python -m benchmarks.engines_gpu merge FILES... > benchmarks/results/NAME.json
    python -m benchmarks.engines_gpu firsts FILES...
    python -m benchmarks.engines_gpu table FILES...
    python -m benchmarks.engines_gpu plot FILES... OUT.svg

``run`` needs the engine, NIXL, GPUs, and the model of ``benchmarks.engines_gpu.model``. It ends by itself within its
limit, writes one JSON document, and prints its tables. The exit code is 1 if an instance did not start, a request
failed, or tokens are not those of the engine's own NIXL connector; SGLang's other backends may fail, and are left out.
``go.sh`` does all of this on a host without a package index.

The gap is the time from prefill's answer to decode's first token. TTFT counts from the request's arrival at the router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from . import sglang
from .cases import BLOCKS, CACHE_TOKENS, LENGTHS, SOURCE, TOPOLOGIES, engine_args, modes_of, pairs_of, specs
from .measure import Plan, Run, results
from .model import Shape
from .plot import plot
from .sglang_tables import first_requests
from .tables import merged, of_run, runs, whole

VERSIONS = ("torch", "triton", "vllm", "sglang", "nixl", "mooncake-transfer-engine-cuda13")


@frozen
class Gpus:
    """The GPUs of this host."""

    names: Sequence[str]
    driver: str

    @classmethod
    def here(cls) -> Gpus:
        """As ``nvidia-smi`` lists them."""
        query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().splitlines()
        names, drivers = zip(*(line.rsplit(", ", 1) for line in lines), strict=True)
        return cls(names, drivers[0])


def software(commit: str | None) -> dict[str, Any]:
    """Versions, and the commit: as given, or that of this checkout."""
    from bench import machine

    versions = {"python": platform.python_version(), **{name: machine.installed(name) for name in VERSIONS}}
    return {"commit": commit or machine.commit(Path(__file__)), "versions": versions}


def header(command: str, commit: str | None, gpus: Gpus | None) -> dict[str, Any]:
    """What each result says first; without ``gpus`` it is a trial run on a CPU."""
    return {
        "command": f"python -m benchmarks.engines_gpu.{command}",
        **software(commit),
        "gpus": [] if gpus is None else list(gpus.names),
        "driver": "" if gpus is None else gpus.driver,
    }


def measure(given: argparse.Namespace, gpus: Gpus, program: Sequence[str]) -> int:
    """Run, write the document, print its tables; the exit code."""
    names = given.pairs.split(",") if given.pairs else []
    if given.engine == "sglang":
        pairs = sglang.pairs_of(given.topology, names, given.other)
        started = sglang.specs(
            pairs, given.topology, given.block, len(gpus.names), given.model, json.loads(given.args or "{}"),
            share=given.share,
        )  # fmt: skip
    else:
        pairs = pairs_of(given.topology, names, given.other)
        started = specs(pairs, given.topology, given.block, len(gpus.names), given.model)
    given.out.mkdir(parents=True, exist_ok=True)
    logs = given.logs or given.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        pairs=pairs,
        specs=started,
        program=program,
        logs=logs,
        limit_s=given.limit_s,
        reps=given.reps,
        rounds=given.rounds,
        lengths=given.lengths,
    )
    if given.engine == "sglang":
        alone, (prefill, decode) = f"{sglang.ALONE}, at once", given.topology.split("to")
        plan = evolve(plan, oracle=sglang.ORACLE, alone=alone, peers_may_fail=True)
        if prefill != decode:
            plan = evolve(plan, rounds_otherwise=alone)
    about = {
        "command": "python -m benchmarks.engines_gpu run",
        **software(given.commit),
        "gpus": list(gpus.names),
        "driver": gpus.driver,
        "engine": given.engine,
        "settings": settings(given.engine),
        "topology": given.topology,
        "block": given.block,
        "pairs": [pair.name for pair in pairs],
        "gpu_of": {one.name: one.env["CUDA_VISIBLE_DEVICES"] for all_of in started.values() for one in all_of},
        "limit_s": given.limit_s,
        "share": given.share,
    }
    name = "sglang" if given.engine == "sglang" else "engines"
    file = given.out / f"{name}_{given.topology}_{given.block}.json"
    run = Run(plan)
    run.note(f"{given.topology}, blocks of {given.block}: {', '.join(mode.name for mode in modes_of(pairs))}")
    try:
        asyncio.run(run.all())
    finally:
        document = {**about, **results(run)}
        file.write_text(json.dumps(document) + "\n")
    print(f"{of_run(document)}\n\n{file.name}: {file.stat().st_size:,} bytes", flush=True)
    return 0 if document["ok"] else 1


def settings(engine: str) -> Mapping[str, Any]:
    """What all runs share: the model, and the engine's arguments but for block size and tensor parallelism."""
    given = sglang.engine_args(0, 1) if engine == "sglang" else engine_args(0, 1)
    own = ("block_size", "tensor_parallel_size", "kv_cache_memory_bytes", "page_size", "tp_size")
    args = {name: value for name, value in given.items() if name not in own}
    return {"model": Shape().config(), "cache_tokens": CACHE_TOKENS, "args": args}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure one topology and block size")
    run.add_argument("--topology", choices=list(TOPOLOGIES), required=True)
    run.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    run.add_argument("--block", type=int, choices=sorted({*BLOCKS, *sglang.PAGES}), required=True, help="or page size")
    run.add_argument("--share", action="store_true", help="all ranks of SGLang on one GPU, see one_gpu.py")
    run.add_argument("--args", help="JSON: more arguments of SGLang's instances")
    run.add_argument("--out", type=Path, required=True, help="folder of the document")
    run.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "llama"))
    run.add_argument("--limit-s", type=float, default=150.0, help="seconds of the whole run")
    run.add_argument("--reps", type=int, default=10, help="at most, of each prompt length")
    run.add_argument("--rounds", type=int, default=2, help="at most, of each load")
    run.add_argument("--pairs", help="names with commas; all that can run")
    run.add_argument("--lengths", type=_numbers, default=LENGTHS, help="tokens of prompts that are alone, with commas")
    run.add_argument("--other", type=Path, help=f"another source tree like {SOURCE.name}: the pair 'other'")
    run.add_argument("--logs", type=Path, help="folder of the instances' logs; by itself in --out")
    run.add_argument("--commit", help="of this checkout, where git cannot say")
    said_of = {
        "merge": "one document of several runs",
        "firsts": "one document of SGLang's first requests, also of runs that were cut off",
        "table": "Markdown",
    }
    for name, said in said_of.items():
        commands.add_parser(name, help=said).add_argument("files", type=Path, nargs="+")
    drawn = commands.add_parser("plot", help="SVG of the gaps")
    drawn.add_argument("files", type=Path, nargs="+")
    drawn.add_argument("svg", type=Path)
    drawn.add_argument("--topology", choices=list(TOPOLOGIES), default="1to1")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    given = arguments(argv)
    if given.command == "run":
        module = "sglang_instance" if given.engine == "sglang" else "instance"
        return measure(given, Gpus.here(), (sys.executable, "-m", f"benchmarks.engines_gpu.{module}"))
    documents = [json.loads(file.read_text()) for file in given.files]
    if given.command == "merge":
        print(json.dumps(merged(documents)))
    elif given.command == "firsts":
        print(json.dumps(first_requests(documents)))
    elif given.command == "table":
        print("\n\n".join(map(whole, documents)))
    else:
        every = {"runs": [run for document in documents for run in runs(document)]}
        given.svg.write_text(plot(every, given.topology).svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
