"""Hunt every bug, several at a time, and say which seed found it: ``nox -s mutants``."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .bugs import BUGS
from .hunt import LIMIT, hunt


def main() -> int:
    """The number of survivors is the exit code."""
    survivors = 0
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for mutant, kill in zip(BUGS, pool.map(hunt, BUGS), strict=True):
            if kill is None:
                survivors += 1
                print(f"SURVIVES {LIMIT:,} seeds  {mutant.item:4} {mutant.name}", flush=True)
            else:
                print(f"killed by seed {kill.seed:5} {kill.rule:4} {mutant.item:4} {mutant.name}", flush=True)
    print(f"{len(BUGS) - survivors} of {len(BUGS)} planted bugs were found")
    return min(survivors, 100)


if __name__ == "__main__":
    sys.exit(main())
