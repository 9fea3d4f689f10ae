"""Where the host's time of a copy into mapped pages goes, from its moves to its launch; prints one JSON document.

Each part of a launch is timed on the thread that launches: hot, after a sleep (cold), and beside another thread that
computes in Python. The same parts are timed where Triton's launcher launches the kernel, which gives the interpreter
away. Medians and 95th percentiles, in microseconds.

    python -m benchmarks.gpu_launch
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from bench.machine import installed
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId
from disagg_kv.kernels import PageMove, Pages
from disagg_kv.kernels.triton_copy_launch import CopyLauncher
from disagg_kv.kernels.triton_entry import DriverEntry, TritonEntry
from disagg_kv.kernels.triton_kernels import ELEMENTS
from disagg_kv.kernels.triton_launch import behind
from disagg_kv.memory import PagedPool
from disagg_kv.planning import PageCopy, StagedLayout

from .gpu_kernels import _said

TIMES, COLD, SLEEP_S, LAYERS, ROWS = 300, 100, 0.005, 32, 1024
KV, DEVICE = GroupId("kv"), "cuda:0"


class Clock:
    """Notes when each part ends."""

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}
        self._at = 0

    def begin(self) -> None:
        """Of a launch."""
        self._at = time.perf_counter_ns()

    def end(self, part: str) -> None:
        """Of a part; what this takes itself is in the next one."""
        now = time.perf_counter_ns()
        self.parts.setdefault(part, []).append(now - self._at)
        self._at = time.perf_counter_ns()

    def report(self) -> dict[str, dict[str, float]]:
        """All parts, and their sum."""
        columns = {name: np.array(values) / 1e3 for name, values in self.parts.items()}
        if len(columns) > 1:
            columns["sum"] = np.sum(list(columns.values()), axis=0)
        return {name: _percentiles(values) for name, values in columns.items()}


def _percentiles(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 95)}


class Scene:
    """One copy of a request's rows between two pools of one GPU."""

    def __init__(self) -> None:
        spec = CacheSpec.kv(LAYERS, 8, 128, "bfloat16")
        pools = [PagedPool.allocate(spec, shard(spec), pages=128, page_size=16, device=DEVICE) for _ in "ab"]
        pages = np.random.default_rng(0).permutation(128)[: ROWS // 16].astype(np.int32)
        number = np.arange(2 * LAYERS, dtype=np.int32)
        none = np.zeros(len(number), np.int64)
        sizes = np.full(len(number), ROWS * 8 * 256, np.int64)
        layout = StagedLayout(
            number, 0 * number, 0 * number + 8, none, none + ROWS, np.cumsum(sizes) - sizes, int(sizes.sum())
        )
        ends = [Pages(pool, {KV: PageTable(KV, pages)}) for pool in pools]
        self.moves = [PageMove(PageCopy(layout, layout), *ends)]
        self.launcher = CopyLauncher(programs=32)
        self.launcher.warm(pools[0], pools[1])
        self.engine = torch.cuda.Stream()

    def ready(self) -> torch.cuda.Event:
        """The engine's event of some rows."""
        event = torch.cuda.Event()
        event.record(self.engine)
        return event


def in_parts(by_triton: bool, scene: Scene, clock: Clock) -> Callable[[], None]:
    """As :meth:`CopyLauncher.__call__` does, part by part."""
    launcher, moves = scene.launcher, scene.moves
    part = "Triton's launcher" if by_triton else "the driver's call"

    def launch() -> None:
        after = scene.ready()
        pause()
        clock.begin()
        device = launcher._device_of(moves)
        assert device is not None
        context = launcher._context(device)
        clock.end("look up the device")
        call = launcher._written(context, moves, ())
        assert call is not None
        clock.end("choose a stream, write the call's table")
        on, queue = call.stream.cuda_stream, context.queue
        entry = context.entries[call.shape.constants]
        assert isinstance(entry, DriverEntry), "this driver does not tell a kernel's parameters"
        chosen = TritonEntry(entry.compiled) if by_triton else entry
        counts = call.shape.tiles, call.entries * call.shape.tiles
        rest = ELEMENTS[call.shape.element_bytes], *call.shape.constants
        clock.end("look up the kernel, build its arguments")
        queue.__enter__()
        clock.end("push the context")
        call.upload()
        clock.end("upload the call's table")
        behind(queue, on, after)
        clock.end("wait for the engine's event")
        chosen(queue, on, call.programs, (call.slot.addr, *counts), rest)
        clock.end(part)
        mark = queue.record(on)
        clock.end("record the end")
        queue.__exit__()
        clock.end("pop the context")
        context.slots.give(call.slot, mark)
        clock.end("give the slot back")
        mark.synchronize()

    return launch


def whole(scene: Scene, clock: Clock) -> Callable[[], None]:
    """All of :meth:`CopyLauncher.__call__`."""

    def launch() -> None:
        after = scene.ready()
        pause()
        clock.begin()
        end = scene.launcher(scene.moves, after)
        clock.end("CopyLauncher")
        assert end is not None
        end.synchronize()

    return launch


pause: Callable[[], None] = lambda: None  # noqa: E731


def beside(work: str) -> Callable[[], None]:
    """Start what runs beside the launches; returns what ends it."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(200))

    def wakes() -> None:
        while not over.is_set():
            time.sleep(50e-6)
            sum(range(1000))

    if work == "alone":
        return over.set
    thread = threading.Thread(target={"a computing thread": compute, "a thread that wakes": wakes}[work])
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def main() -> None:
    """Measure."""
    global pause
    parser = argparse.ArgumentParser(description="the parts of a launch")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    scene, cases = Scene(), []
    by_triton, by_driver = partial(in_parts, True), partial(in_parts, False)
    for name, make in (("whole", whole), ("in parts", by_driver), ("in parts, by Triton's launcher", by_triton)):
        for work in ("alone", "a thread that wakes", "a computing thread"):
            for cold in (False, True):
                pause = (lambda: time.sleep(SLEEP_S)) if cold else (lambda: None)
                one, end = make(scene, Clock()), beside(work)
                for _ in range(10):
                    one()
                clock = Clock()
                one = make(scene, clock)
                for _ in range(COLD if cold or work != "alone" else TIMES):
                    one()
                end()
                cases.append({"what": name, "beside": work, "cold": cold, "us": clock.report()})
    document = {
        "command": "python -m benchmarks.gpu_launch",
        "commit": given.commit or _said("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {name: installed(name) for name in ("torch", "triton")},
        "switch_interval_ms": 1e3 * sys.getswitchinterval(),
        "cases": cases,
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
