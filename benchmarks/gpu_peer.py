"""Gather and scatter beside those of SGLang's staging buffer, in one process; prints one JSON document.

Takes the file ``sglang/srt/disaggregation/common/staging_buffer.py`` and ``sglang/kernels/ops/memory/ptr_table.py`` of
an unpacked wheel of sglang 0.5.23, which is no part of this repository; what they import from the rest of that package
is stood in for. 1,024 tokens, where launching is what takes the time. Bytes are compared first. ``call_us`` is from the
call until its result is there, as the host sees it, and ``ratio`` our time over theirs: medians of calls in turn. An
endpoint prepares gathers while their rows are computed, and scatters while their bytes are on the way:
``ours_prepared_us`` is from the launch of what was prepared, and what was done before is not in it.

    python -m benchmarks.gpu_peer STAGING_BUFFER PTR_TABLE > benchmarks/results/h200_peer.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.machine import installed
from disagg_kv.kernels.tensors import plane_of, tensor_of
from disagg_kv.kernels.triton_kernels import OPS
from disagg_kv.kernels.triton_launch import Launcher

from .gpu_kernels import CASES, Bench, _said

LAYERS, CALLS = 48, 200


def peer(staging_buffer: str, ptr_table: str) -> Any:
    """Their module, with stand-ins for the three things that it imports from its package."""
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.memory", "sglang.srt"):
        sys.modules[name] = types.ModuleType(name)
    environ, utils = types.ModuleType("sglang.srt.environ"), types.ModuleType("sglang.srt.utils")
    switch = types.SimpleNamespace(get=lambda: False)
    environ.envs = types.SimpleNamespace(SGLANG_STAGING_USE_TORCH=switch)  # type: ignore[attr-defined]
    utils.create_device_stream = torch.cuda.Stream  # type: ignore[attr-defined]
    utils.device_stream_context = torch.cuda.stream  # type: ignore[attr-defined]
    sys.modules |= {"sglang.srt.environ": environ, "sglang.srt.utils": utils}
    load("sglang.kernels.ops.memory.ptr_table", ptr_table)
    return load("sglang_staging_buffer", staging_buffer)


def load(name: str, file: str) -> types.ModuleType:
    """A module from a file."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(calls: dict[str, Callable[[], object]], before: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds until each call's result is there; the calls take turns. What is ``before`` is not in it."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(CALLS + 10):
        for name, call in calls.items():
            if name in before:
                before[name]()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            if number >= 10:
                seconds[name].append(took)
    return {name: round(statistics.median(of) * 1e6, 1) for name, of in seconds.items()}


def measure(theirs: Any, number: int) -> dict[str, object]:
    """One case of ``gpu_kernels``."""
    case = CASES[number]
    bench, launcher = Bench(case, LAYERS, "cuda"), Launcher(OPS[case.op])
    bench.check(launcher)
    planes = [plane_of(bench.pools[0], i).view(torch.bfloat16).flatten(0, 1) for i in bench._order]
    keys, values = planes[:LAYERS], planes[LAYERS:]
    pages: Any = np.asarray(bench.moves[0].tables[next(iter(bench.moves[0].tables))].pages)
    ours = bench.staging[0]
    stream = torch.cuda.Stream()
    other = torch.empty_like(tensor_of(ours))
    buffer = types.SimpleNamespace(
        buffer=other,
        device=other.device,
        device_module=torch.cuda,
        get_gather_stream=lambda: stream,
        producer_stream=torch.cuda.current_stream,
    )

    def we() -> None:
        event = bench.call(launcher)
        assert event is not None
        event.synchronize()

    prepare, launch = bench.halves(launcher)

    def we_prepared() -> None:
        event = launch()
        assert event is not None
        event.synchronize()

    calls: dict[str, Callable[[], object]] = {"ours_us": we, "ours_prepared_us": we_prepared}
    if case.op == "gather":

        def they() -> None:
            theirs._gather_all_layers_triton(keys, values, pages, buffer, 0, case.heads, case.page_size)

        they()
        for name, call in calls.items():
            if call is we_prepared:
                prepare()
            tensor_of(ours).random_(0, 256)
            torch.cuda.synchronize()  # our kernels run on streams of their own
            call()
            if not torch.equal(tensor_of(ours), other):
                sys.exit(f"their gather and ours differ: {name}")
    else:
        other.copy_(tensor_of(ours))

        def they() -> None:
            ids = torch.from_numpy(pages.astype(np.int64)).to("cuda")
            theirs._scatter_staging_to_kv_triton(other, keys, values, ids, case.page_size, case.parts, 1, 0, case.heads)
            torch.cuda.current_stream().synchronize()

        they()
        there = [plane_of(bench.pools[0], i)[torch.from_numpy(pages).long().cuda()].clone() for i in bench._order]
        for name, call in calls.items():
            if call is we_prepared:
                prepare()
            tensor_of(bench.pools[0].buffers[0]).random_(0, 256)
            torch.cuda.synchronize()  # our kernels run on streams of their own
            call()
            again = [plane_of(bench.pools[0], i)[torch.from_numpy(pages).long().cuda()] for i in bench._order]
            if not all(map(torch.equal, there, again)):
                sys.exit(f"their scatter and ours differ: {name}")
    calls["theirs_us"] = they
    found = timed(calls, {"ours_prepared_us": prepare})
    return {
        "op": case.op,
        "tp": case.tp,
        "tokens": case.tokens,
        "bytes": bench.nbytes,
        **found,
        "ratio": round(found["ours_us"] / found["theirs_us"], 3),
    }


def main() -> None:
    """Print both cases."""
    parser = argparse.ArgumentParser(description="gather and scatter beside SGLang's")
    parser.add_argument("staging_buffer", help="the file, from a wheel of sglang 0.5.23")
    parser.add_argument("ptr_table", help="the same")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    theirs = peer(given.staging_buffer, given.ptr_table)
    document = {
        "command": "python -m benchmarks.gpu_peer STAGING_BUFFER PTR_TABLE",
        "peer": "sglang 0.5.23",
        "commit": given.commit or _said("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {name: installed(name) for name in ("torch", "triton")},
        "calls": CALLS,
        "cases": [measure(theirs, number) for number in (12, 13)],
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
