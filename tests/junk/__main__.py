"""``python -m tests.junk``: every public call with junk, a line for each; the exit code says whether all is well."""

from __future__ import annotations

import logging
import sys
from collections import Counter

from .bench import Bench, Verdict, attempt
from .calls import CALLS, discovered
from .values import JUNK


def missing() -> list[str]:
    """Public calls, and arguments of them, that have no entry in the table."""
    import inspect

    found: list[str] = []
    for name, function in discovered():
        if name not in CALLS:
            found.append(name)
            continue
        parameters = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.name not in ("self", "cls") and p.kind is not p.VAR_KEYWORD
        ]
        found += [f"{name}({parameter})" for parameter in parameters if parameter not in CALLS[name].kinds]
    return found


def run(names: list[str]) -> int:
    """Try the named calls, or all of them; the number of things that are wrong."""
    logging.getLogger("disagg_kv").setLevel(logging.CRITICAL)
    wrong = 0
    for name in missing():
        wrong += 1
        print(f"not covered: {name}")
    bench = Bench()
    total: Counter[str] = Counter()
    for name, call in CALLS.items():
        if names and not any(one in name for one in names):
            continue
        of: list[Verdict] = []
        try:
            with bench.innocent():
                of = [attempt(bench, call, argument, junk) for argument in call.kinds for junk in JUNK]
        except Exception as exc:
            wrong += 1
            print(f"{name}: HARMED OTHERS: {type(exc).__name__}: {exc}")
            bench = Bench()
        refused = Counter(type(v.error).__name__ for v in of if v.error is not None)
        errors = ", ".join(f"{number} {kind}" for kind, number in sorted(refused.items()))
        print(f"{name:40} {len(of):5} calls, {sum(v.error is None for v in of):4} accepted; {errors}", flush=True)
        for verdict in of:
            if verdict.wrong:
                wrong += 1
                print(f"    {verdict.argument}={verdict.junk}: {verdict.wrong}")
        total.update(refused)
        total["calls"] += len(of)
    bench.close()
    print(f"{total['calls']} calls with junk, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if run(sys.argv[1:]) else 0)
