"""Gather, scatter and checksum of a head slice against a plain copy of as many bytes, on one thread; prints JSON.

8,192 tokens, bfloat16, K and V of one layer, 2 of 8 heads of 128: what one rank of tensor-parallel size 4 exchanges
with a rank that holds every head. Bytes and sums are checked before anything is timed; the runs of the four are
interleaved, and their clock is the CPU time of the one thread, to which other processes on the host add only what they
take of caches and memory bandwidth. Ratios are of medians.

    python benchmarks/kernels.py > benchmarks/results/cpu_kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import attrs
import numpy as np
import torch

from bench.machine import Machine
from disagg_kv.geometry import I32, CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId
from disagg_kv.kernels import CpuKernels, Move, ReferenceKernels
from disagg_kv.memory import Buffer, Layout, PagedPool, bytes_of
from disagg_kv.planning import StagedLayout

TOKENS, HEADS, SLICE, FIRST, DIM = 8192, 8, 2, 2, 128
KV = GroupId("kv")
LIMITS = {"gather": 2.0, "scatter": 4.0, "checksum": 8.0}


def _move(pages: I32) -> Move:
    """K then V of one layer, heads 2 and 3 of 8."""
    plane_bytes = TOKENS * SLICE * DIM * 2
    layout = StagedLayout(
        np.array([0, 1], np.int32),
        np.array([FIRST, FIRST], np.int32),
        np.array([SLICE, SLICE], np.int32),
        np.array([0, 0], np.int64),
        np.array([TOKENS, TOKENS], np.int64),
        np.array([0, plane_bytes], np.int64),
        2 * plane_bytes,
    )
    return Move(layout, {KV: PageTable(KV, pages)}, 0)


def _buffer(nbytes: int) -> Buffer:
    memory = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return Buffer(memory.ctypes.data, nbytes, owner=memory)


def _medians(timed: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(runs):
        for name, run in timed.items():
            start = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _measure(layout: Layout, page_size: int, shuffled: bool, runs: int) -> dict[str, object]:
    spec = CacheSpec.kv(1, HEADS, DIM, "bfloat16")
    count = TOKENS // page_size
    pool, other = (
        PagedPool.allocate(spec, shard(spec), pages=count, page_size=page_size, layout=layout, allocator=_buffer)
        for _ in range(2)
    )
    pages = np.random.default_rng(0).permutation(count) if shuffled else np.arange(count)
    move = _move(pages.astype(np.int32))
    staging, expected = _buffer(move.layout.nbytes), _buffer(move.layout.nbytes + 1)
    cpu, reference = CpuKernels(), ReferenceKernels()

    cpu.gather(pool, [move], staging, None)
    reference.gather(pool, [move], expected, None)
    same = np.array_equal(bytes_of(staging), bytes_of(expected)[:-1])
    bytes_of(staging)[:] = np.random.default_rng(1).integers(0, 256, staging.nbytes, np.uint8)
    cpu.scatter(pool, [move], staging)
    reference.scatter(other, [move], staging)
    sums = [kernels.checksum(pool, [move], None).read()[0].tolist() for kernels in (cpu, reference)]
    if sums[0] != sums[1]:
        sys.exit(f"wrong sums: {layout}, pages of {page_size}")
    if not same or not np.array_equal(bytes_of(pool.buffers[0]), bytes_of(other.buffers[0])):
        sys.exit(f"wrong bytes: {layout}, pages of {page_size}")

    source = torch.from_numpy(bytes_of(_buffer(staging.nbytes)))
    target = torch.from_numpy(bytes_of(_buffer(staging.nbytes)))
    median = _medians(
        {
            "copy_": lambda: target.copy_(source),
            "gather": lambda: cpu.gather(pool, [move], staging, None),
            "scatter": lambda: cpu.scatter(pool, [move], staging),
            "checksum": lambda: cpu.checksum(pool, [move], None),
        },
        runs,
    )
    return {
        "layout": layout,
        "page_size": page_size,
        "pages": "shuffled" if shuffled else "in order",
        "bytes": staging.nbytes,
        "copy_GB_per_s": round(staging.nbytes / median["copy_"] / 1e9, 2),
        "checksum_GB_per_s": round(staging.nbytes / median["checksum"] / 1e9, 2),
        **{f"{name}_ratio": round(median[name] / median["copy_"], 2) for name in LIMITS},
    }


def main() -> None:
    """Print the ratios for every layout, page size and order of pages."""
    parser = argparse.ArgumentParser(description="gather, scatter and checksum against copy_")
    parser.add_argument("--runs", type=int, default=101, help="interleaved runs per case")
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    cases = [
        _measure(layout, page_size, shuffled, runs)
        for layout in ("NHD", "HND")
        for page_size in (1, 16, 64)
        for shuffled in (False, True)
    ]
    worst = {name: max(float(str(case[f"{name}_ratio"])) for case in cases) for name in LIMITS}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": attrs.asdict(Machine.here()),
        "threads": 1,
        "shape": {"tokens": TOKENS, "heads": HEADS, "heads_moved": SLICE, "head_dim": DIM, "dtype": "bfloat16"},
        "runs": runs,
        "limits": LIMITS,
        "worst": worst,
        "cases": cases,
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
