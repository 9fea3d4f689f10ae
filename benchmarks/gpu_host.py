"""What a launch costs the host on a thread that was at work (``hot_us``), and on one that has slept (``cold_us``).

Prints one JSON document: the calls of CUDA that a launch makes, through torch and through the driver alone; gather and
scatter calls of 1,024 tokens; the same where they were prepared before, and before the sleep, which an endpoint does
while rows are computed or bytes are on the way: what is prepared is not in their times; and how long another thread or
process takes to answer. Medians, in microseconds.

    python -m benchmarks.gpu_host > benchmarks/results/h200_host.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import zmq

from bench.machine import installed
from disagg_kv.kernels.cuda_queue import CudaQueue
from disagg_kv.kernels.triton_kernels import OPS
from disagg_kv.kernels.triton_launch import Launcher

from .gpu_kernels import CASES, Bench, _said

HOT, COLD, SLEEP_S, WORDS = 300, 60, 0.01, 1024


def timed(call: Callable[[], object], before: Callable[[], object] | None = None) -> dict[str, float]:
    """Of calls in a row, and of calls after a sleep; what has to be done ``before`` each of them does not count."""
    found = {}
    for name, number, pause_s in (("hot_us", HOT, 0.0), ("cold_us", COLD, SLEEP_S)):
        seconds = []
        for _ in range(number + 10):
            if before is not None:
                before()
            if pause_s:
                time.sleep(pause_s)
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        found[name] = round(statistics.median(seconds[10:]) * 1e6, 1)
    return found


def calls() -> dict[str, Callable[[], object]]:
    """What a launch does besides launching."""
    pinned = torch.empty(WORDS, dtype=torch.int64, pin_memory=True)
    device = torch.empty(WORDS, dtype=torch.int64, device="cuda")
    stream, event, queue = torch.cuda.Stream(), torch.cuda.Event(), CudaQueue(0)
    event.record(stream)
    on, known = stream.cuda_stream, event.cuda_event

    def by_torch() -> None:
        with torch.cuda.stream(stream):
            device.copy_(pinned, non_blocking=True)
            stream.wait_event(event)
            torch.cuda.Event().record(stream)

    def by_driver() -> None:
        with queue:
            queue.upload(on, device.data_ptr(), pinned.data_ptr(), WORDS * 8)
            queue.wait(on, known)
            queue.record(on)

    return {"upload, wait and record by torch": by_torch, "upload, wait and record by the driver": by_driver}


def launches(number: int) -> dict[str, Callable[[], object]]:
    """A case of ``gpu_kernels``, until the call returns and until its result is there."""
    case = CASES[number]
    bench, launcher = Bench(case, 48, "cuda"), Launcher(OPS[case.op])

    def ended() -> None:
        event = bench.call(launcher)
        assert event is not None
        event.synchronize()

    ended()
    return {f"{case.op}, returned": lambda: bench.call(launcher), f"{case.op}, ended": ended}


def prepared(number: int) -> dict[str, dict[str, float]]:
    """The same case, of which only the launch is left."""
    case = CASES[number]
    bench, launcher = Bench(case, 48, "cuda"), Launcher(OPS[case.op])
    bench.check(launcher)
    prepare, launch = bench.halves(launcher)

    def ended() -> None:
        event = launch()
        assert event is not None
        event.synchronize()

    return {
        f"{case.op} prepared, returned": timed(launch, prepare),
        f"{case.op} prepared, ended": timed(ended, prepare),
    }


def echo(folder: str) -> None:
    """Be another process that answers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    came, back = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    came.bind(f"ipc://{folder}/there")
    back.connect(f"ipc://{folder}/here")
    while True:
        back.send(came.recv())


def answers(folder: str) -> dict[str, Callable[[], object]]:
    """A thread and a process, asked and waited for."""
    here, there = socket.socketpair()

    def thread() -> None:
        while True:
            there.send(there.recv(16))

    threading.Thread(target=thread, daemon=True).start()
    multiprocessing.get_context("spawn").Process(target=echo, args=(folder,), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    came, out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    came.bind(f"ipc://{folder}/here")
    out.connect(f"ipc://{folder}/there")
    return {
        "a thread answers": lambda: (here.send(b"?"), here.recv(16)),
        "a process answers over ZeroMQ": lambda: (out.send(b"?"), came.recv()),
    }


def main() -> None:
    """Print every case."""
    parser = argparse.ArgumentParser(description="host time of launches")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        of = {name: timed(call) for name, call in {**calls(), **launches(12), **launches(13)}.items()}
        of |= {**prepared(12), **prepared(13)}
        of |= {name: timed(call) for name, call in answers(folder).items()}
        document = {
            "command": "python -m benchmarks.gpu_host",
            "commit": given.commit or _said("git", "rev-parse", "HEAD"),
            "gpu": torch.cuda.get_device_name(),
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "versions": {name: installed(name) for name in ("torch", "triton", "pyzmq")},
            "cases": [{"what": name, **found} for name, found in of.items()],
        }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
