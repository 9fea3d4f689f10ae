"""Compares the speed of two versions of the library: transfers of both in turns on one host; prints one JSON document.

Each version is a source tree (``--old``, ``--new``: directories that hold ``src/disagg_kv``). Both start their ranks
once and stay up. A turn is ``--repeats`` transfers of one version. Its result is their median time, from the first rows
handed over until every decode rank knows that all have landed. Old and new alternate, and so does their order.
``ratio`` is the median over all pairs of new over old. ``low`` and ``high`` bound it with 95 % confidence, by order
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
        self.commit = subprocess.run(
            ["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        ).stdout.strip()

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
    from disagg_kv.bench import TransferShape
    from disagg_kv.bench import transfer as bench
    from disagg_kv.bench.ranks import started

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


def compare(given: argparse.Namespace, shape: dict[str, object]) -> dict[str, object]:
    """Both versions in turns."""
    versions = [Version(given.old, shape), Version(given.new, shape)]
    try:
        for one in versions:
            one.turn(WARM_UP)
        seconds: list[tuple[float, float]] = []
        for pair in range(given.pairs):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            took = {which: versions[which].turn(given.repeats) for which in order}
            seconds.append((took[0], took[1]))
    finally:
        for one in versions:
            one.close()
    ratios = [new / old for old, new in seconds]
    low, high = interval(ratios)
    old_s, new_s = (median(column) for column in zip(*seconds, strict=True))
    return {
        **shape,
        "old": versions[0].commit,
        "new": versions[1].commit,
        "old_ms": round(old_s * 1e3, 4),
        "new_ms": round(new_s * 1e3, 4),
        "ratio": round(median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path())
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
        rows.append(compare(given, shape))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"pairs": given.pairs, "repeats": given.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
