"""Hunt every bug, several at a time, and say which seed found it and what that cost: ``nox -s mutants``.

``--json FILE`` writes all of it, too: ``benchmarks/results/mutants.json`` is what docs/results.md shows. The same
without nox, on a machine that has no more than the library's own dependencies and pytest::

    PYTHONPATH=src python -m tests.mutants --json FILE --commit COMMIT
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from .bugs import BUGS
from .hunt import LIMIT, Hunt, Tally, timed
from .planting import Mutant


def main(args: Sequence[str] | None = None, bugs: Sequence[Mutant] = BUGS) -> int:
    """The number of survivors is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="hunt every planted bug")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, and what it cost")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args(args)
    into: Path | None = given.json
    hunts: list[Hunt] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for one in pool.map(timed, bugs):
            hunts.append(one)
            cost = f"{one.cpu_s:7.1f} CPU s"
            if one.kill is None:
                print(f"SURVIVES {LIMIT:,} seeds  {cost} {one.mutant.name}", flush=True)
            else:
                found = f"killed by seed {one.kill.seed:5} {one.kill.rule:4}"
                print(f"{found} {cost} {one.mutant.name}", flush=True)
    tally = Tally(hunts, _cpu_s())
    print(f"{tally.killed} of {len(hunts)} planted bugs were found")
    print(f"planted bugs killed per CPU minute: {tally.killed_per_cpu_minute:.1f} ({tally.cpu_s:,.0f} CPU seconds)")
    if into is not None:
        into.write_text(json.dumps(tally.record(given.commit), indent=1) + "\n")
    return min(len(hunts) - tally.killed, 100)


def _cpu_s() -> float:
    """Of this process and of its children that have ended: the pool's all have."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    sys.exit(main())
