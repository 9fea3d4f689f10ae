"""Compares the speed of versions of the library: transfers of all in turns on one host; prints one JSON document.

Each version is a source tree (``--old``, ``--new``: directories that hold ``src/disagg_kv``). All start their ranks
once and stay up. A turn is ``--repeats`` transfers of one version. Its result is their median time, from the first rows
handed over until every decode rank knows that all have landed. Each time another version has the first turn. ``ratio``
is the median over all turns of a new one over the old one. ``low`` and ``high`` bound it with 95 % confidence, by order
statistics, without an assumption about the distribution. Bytes are checked after each transfer, outside its time.

    git worktree add /tmp/old COMMIT
    python benchmarks/pairs.py --old /tmp/old --new . --transports shm,nixl --pairs 30
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from math import comb
from pathlib import Path
from statistics import median
from typing import IO

WARM_UP = 5
"""Transfers of each version before the first turn."""


def interval(values: list[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least 95 % confidence."""
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    while k < n // 2 and outside + comb(n, k) / 2**n <= 0.025:
        outside += comb(n, k) / 2**n
        k += 1
    k = max(0, k - 1)
    return ordered[k], ordered[n - 1 - k]


class Version:
    """A process that runs transfers with one source tree."""

    def __init__(self, tree: Path, shape: dict[str, object]) -> None:
        paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, "--serve", json.dumps(shape)]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._ask: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        described = subprocess.run(
            ["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
        self.name = described.stdout.strip() or tree.name

    def turn(self, repeats: int) -> float:
        """Median seconds of a few transfers."""
        print(repeats, file=self._ask, flush=True)
        line = self._answers.readline()
        if not line:
            raise SystemExit("a version has ended; see its error above")
        seconds: list[float] = json.loads(line)
        return median(seconds)

    def close(self) -> None:
        """End the process and its ranks."""
        self._ask.close()
        self._process.wait(60)


def serve(shape: dict[str, object]) -> None:
    """Run as many transfers as each line of the input says, and print their seconds."""
    from bench import TransferShape
    from bench import transfer as bench
    from bench.ranks import started

    made = TransferShape(**shape)  # type: ignore[arg-type]
    name, explanation, number = made.strategies[0], made.explain(), 0
    with started(made, explanation) as (prefill, decode):
        for line in sys.stdin:
            runs = []
            for _ in range(int(line)):
                number += 1
                runs.append(bench._transfer(prefill, decode, name, number))
                bench._check(decode, name, explanation)
            print(json.dumps(bench._totals(runs)), flush=True)


def compare(given: argparse.Namespace, shape: dict[str, object]) -> list[dict[str, object]]:
    """All versions in turns; a row for each new one."""
    versions = [Version(tree, shape) for tree in (given.old, *given.new)]
    try:
        for one in versions:
            one.turn(WARM_UP)
        seconds: list[list[float]] = [[] for _ in versions]
        for turn in range(given.pairs):
            first = turn % len(versions)
            for which in (*range(first, len(versions)), *range(first)):
                seconds[which].append(versions[which].turn(given.repeats))
    finally:
        for one in versions:
            one.close()
    rows = []
    for version, of_new in zip(versions[1:], seconds[1:], strict=True):
        ratios = [new / old for old, new in zip(seconds[0], of_new, strict=True)]
        low, high = interval(ratios)
        rows.append(
            {
                **shape,
                "old": versions[0].name,
                "new": version.name,
                "old_ms": round(median(seconds[0]) * 1e3, 4),
                "new_ms": round(median(of_new) * 1e3, 4),
                "ratio": round(median(ratios), 4),
                "low": round(low, 4),
                "high": round(high, 4),
            }
        )
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=[Path()], nargs="+")
    parser.add_argument("--transports", default="shm", type=lambda text: text.split(","))
    parser.add_argument("--tp", default="1->1", type=lambda text: text.split(","))
    parser.add_argument("--tokens", default="64,1024", type=lambda text: list(map(int, text.split(","))))
    parser.add_argument("--layers", default=32, type=int)
    parser.add_argument("--strategy", default="staged")
    parser.add_argument("--pairs", default=30, type=int)
    parser.add_argument("--repeats", default=9, type=int, help="transfers of a turn")
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve)
        return
    if given.old is None:
        parser.error("--old is needed: the source tree to compare with")
    rows = []
    for transport, tp, tokens in product(given.transports, given.tp, given.tokens):
        prefill_tp, decode_tp = map(int, tp.split("->"))
        shape: dict[str, object] = {
            "transport": transport,
            "device": "cuda" if transport == "cuda_ipc" else "cpu",
            "strategies": [given.strategy],
            "prefill_tp": prefill_tp,
            "decode_tp": decode_tp,
            "tokens": tokens,
            "layers": given.layers,
        }
        for row in compare(given, shape):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({"pairs": given.pairs, "repeats": given.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
