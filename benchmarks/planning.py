"""Planning a request of 128K tokens, 64 layers, TP 8 -> 4, staged: every step that one writer and one target take.

Then the election among replicas: every rank of an instance holds the same latent, as with MLA.

The plan is checked first: its segments tile the rows, and its bytes are those of the box. Limits: 10 ms in all, and at
least 1,000 times fewer writes than one per token and head slice for 8,192 tokens, TP 4 -> 1. The clock is the thread's
CPU time, to which other processes on the host add only what they take of caches and memory bandwidth.

    python benchmarks/planning.py > benchmarks/results/cpu_planning.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise

import attrs

from bench.machine import Machine
from disagg_kv.geometry import CacheSpec, shard
from disagg_kv.ids import Rank
from disagg_kv.planning import Limits, PartView, RankPlan, Segment, plain_site
from disagg_kv.strategies import explain

TOKENS, LAYERS, HEADS, DIM, PAGE = 128 * 1024, 64, 8, 128, 64
SLOT, LEASE = 64 << 20, 512 << 20
RUNS = 30
REPLICAS = (8, 64, 512, 4096)
"""Ranks of an instance; the last number is the most that there may be."""

LIMIT_MS = 10.0
LIMIT_RATIO = 1000


def _plan(spec: CacheSpec) -> tuple[list[Segment], int, dict[str, float]]:
    """What one writer of 8 and one target of 4 compute for a request; bytes that the writer sends; seconds per step."""
    clock = time.thread_time
    writers = [shard(spec, tp=8, rank=rank) for rank in range(8)]
    target = shard(spec, tp=4, rank=0)
    site = plain_site(spec, writers[0], TOKENS, PAGE)
    times = [clock()]
    rank_plan = RankPlan.build(spec, writers, target)
    times.append(clock())
    segments = rank_plan.cut(0, TOKENS, range(LAYERS), Limits(SLOT, LEASE, PAGE))
    times.append(clock())
    leases = [rank_plan.lease(segment) for segment in segments]
    times.append(clock())
    view = PartView(site, rank_plan.parts[0])
    layouts = [view.layout(segment) for segment in segments]
    times.append(clock())
    sent = sum(layout.nbytes for layout in layouts)
    assert sent == sum(places[Rank(0)][1] for places, _ in leases)
    steps = ("elect", "cut", "leases", "layouts")
    return segments, sent, dict(zip(steps, (b - a for a, b in pairwise(times)), strict=True))


def _elect(ranks: int) -> float:
    """Milliseconds to find out what each of some replicas sends; the least of three times."""
    spec = CacheSpec.kv(LAYERS, 1, 4 * DIM, "bfloat16")
    writers, target = [shard(spec, tp=ranks, rank=rank) for rank in range(ranks)], shard(spec)
    took = []
    for rotation in range(3):
        began = time.thread_time()
        rank_plan = RankPlan.build(spec, writers, target, rotation)
        took.append(time.thread_time() - began)
        assert all(rank_plan.parts), "a replica sends nothing"
    return 1e3 * min(took)


def main() -> int:
    """Check, measure, print; 1 if a limit is broken."""
    spec = CacheSpec.kv(LAYERS, HEADS, DIM, "bfloat16")
    segments, sent, _ = _plan(spec)
    rows = [(s.start, s.stop) for s in segments]
    if rows[0][0] != 0 or rows[-1][1] != TOKENS or any(a[1] != b[0] for a, b in pairwise(rows)):
        sys.exit("the segments do not tile the rows")
    if sent != TOKENS * LAYERS * 2 * DIM * 2:
        sys.exit(f"the writer sends {sent} bytes, not one head of K and V")
    runs = [_plan(spec)[2] for _ in range(RUNS)]
    median = {step: statistics.median(run[step] for run in runs) * 1e3 for step in runs[0]}
    total = statistics.median(sum(run.values()) for run in runs) * 1e3
    prefill = [shard(spec, tp=4, rank=rank) for rank in range(4)]
    counted = explain(spec, prefill, [shard(spec)], 8192, (PAGE, PAGE)).descriptors
    ratio = counted["slice"] / counted["staged"]
    print(
        json.dumps(
            {
                "command": "python benchmarks/planning.py",
                "shape": f"{TOKENS} tokens, {LAYERS} layers, {HEADS} KV heads of {DIM}, bfloat16, TP 8 -> 4, staged",
                "segments": len(segments),
                "median_ms": {step: round(ms, 3) for step, ms in median.items()},
                "total_ms": round(total, 3),
                "limit_ms": LIMIT_MS,
                "descriptors_8192_tokens_tp4_to_1": dict(counted),
                "slice_over_staged": ratio,
                "limit_ratio": LIMIT_RATIO,
                "elect_ms_by_replicas": {str(ranks): round(_elect(ranks), 3) for ranks in REPLICAS},
                "runs": RUNS,
                "machine": attrs.asdict(Machine.here()),
            },
            indent=1,
        )
    )
    return 0 if total <= LIMIT_MS and ratio >= LIMIT_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
