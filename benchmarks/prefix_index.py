"""The prefix index: match and insert of a prompt of 128K tokens at pages of 64, and bytes per page.

The answers are checked first: nothing is found before the insert and every page after it. Limits: 10 ms for a match
that finds nothing and the insert that follows, and for a match that finds everything; 400 bytes a page beside the
token ids, whether pages form one chain or every one begins a prefix of its own. The clock is the thread's CPU time, to
which other processes on the host add only what they take of caches and memory bandwidth.

    python benchmarks/prefix_index.py > benchmarks/results/cpu_prefix_index.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import tracemalloc

import attrs
import numpy as np
import numpy.typing as npt

from bench.machine import Machine
from disagg_kv.prefix import HashPrefixIndex

TOKENS, PAGE = 128 * 1024, 64
PAGES = TOKENS // PAGE
MANY = 32 * PAGES
RUNS = 30
LIMIT_MS = 10.0
LIMIT_BYTES = 400


def _once(tokens: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Milliseconds of a miss with its insert, and of a hit."""
    index = HashPrefixIndex(PAGE, PAGES, b"model")
    pages = np.arange(PAGES, dtype=np.int32)
    clock = time.thread_time
    began = clock()
    lock = index.match(tokens)
    found = lock.rows
    spare = index.insert(lock, tokens, pages)
    inserted = clock()
    hit = index.match(tokens)
    ended = clock()
    if found or len(spare) or hit.rows != TOKENS:
        sys.exit(f"the index found {found} rows before the insert and {hit.rows} after it")
    index.check_integrity()
    return (inserted - began) * 1e3, (ended - inserted) * 1e3


def _bytes_per_page(chains: int) -> float:
    """Of an index with so many unheld chains, without the token ids themselves."""
    rng = np.random.default_rng(0)
    each = MANY // chains
    tracemalloc.start()
    index = HashPrefixIndex(PAGE, MANY, b"model")
    for chain in range(chains):
        tokens = rng.integers(0, 128_000, each * PAGE)
        lock = index.match(tokens)
        index.insert(lock, tokens, np.arange(chain * each, (chain + 1) * each, dtype=np.int32))
        index.unlock(lock)
        del tokens, lock
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if len(index) != MANY:
        sys.exit(f"the index has {len(index)} of {MANY} pages")
    return used / MANY - 4 * PAGE


def main() -> int:
    """Check, measure, print; 1 if a limit is broken."""
    tokens = np.random.default_rng(0).integers(0, 128_000, TOKENS)
    runs = [_once(tokens) for _ in range(RUNS)]
    miss, hit = (statistics.median(run[i] for run in runs) for i in range(2))
    sizes = {"one chain": _bytes_per_page(1), "every page alone": _bytes_per_page(MANY)}
    print(
        json.dumps(
            {
                "command": "python benchmarks/prefix_index.py",
                "shape": f"{TOKENS} tokens, pages of {PAGE}; memory: {MANY} pages",
                "miss_and_insert_ms": round(miss, 3),
                "hit_ms": round(hit, 3),
                "limit_ms": LIMIT_MS,
                "bytes_per_page": {name: round(size, 1) for name, size in sizes.items()},
                "limit_bytes": LIMIT_BYTES,
                "runs": RUNS,
                "machine": attrs.asdict(Machine.here()),
            },
            indent=1,
        )
    )
    return 0 if max(miss, hit) <= LIMIT_MS and max(sizes.values()) < LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
