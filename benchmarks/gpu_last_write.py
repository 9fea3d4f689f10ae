"""How long after a killed writer's exit its kernels still write through a mapping; prints one JSON document.

A child process maps this process' memory over ``cuda_ipc`` and launches kernels that fill it with one value after
another, hundreds of them ahead. It is killed (SIGKILL) meanwhile. From the moment at which this process knows of the
exit, it compares the whole memory with its last contents, over and over. ``last_write_ms`` is the last difference that
it saw, from the exit on; 0: none. ``Capabilities.drain_s`` of the transport must be longer.

    python -m benchmarks.gpu_last_write > benchmarks/results/h100_last_write.json

``--device cpu --transport shm`` does the same with NumPy, for which the kernel promises 0.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection

import torch

from bench.machine import installed
from disagg_kv.kernels.tensors import tensor_of
from disagg_kv.memory import new_buffer
from disagg_kv.transports import SupportsAllocate, SupportsMapping, between_processes

AHEAD = 200
"""Kernels that are launched before the child says so; then it goes on."""

WATCHED_S = 3.0


def write(pipe: Connection, name: str, device: str) -> None:
    """In the child: fill the peer's memory until killed."""
    (transport,) = between_processes(name, device)
    assert isinstance(transport, SupportsMapping)
    peer = transport.connect(pipe.recv_bytes(), 60.0)
    target = tensor_of(transport.map(peer, pipe.recv(), device))
    source = torch.zeros_like(target, device=device)
    number = 0
    while True:
        torch.add(source, number % 251, out=target)
        number += 1
        if number == AHEAD:
            pipe.send("writing")


def killed_once(name: str, device: str, nbytes: int, after_s: float) -> tuple[float, int]:
    """Milliseconds from the exit to the last difference, and the number of differences before the kill was known."""
    context = multiprocessing.get_context("spawn")
    (transport,) = between_processes(name, device)
    buffer = transport.allocate(nbytes) if isinstance(transport, SupportsAllocate) else new_buffer(nbytes, device)
    mine, theirs = context.Pipe()
    try:
        (region,) = transport.register([buffer])
        child = context.Process(target=write, args=(theirs, name, device), daemon=True)
        child.start()
        mine.send_bytes(transport.local_descriptor())
        mine.send(region)
        assert mine.poll(120.0), "the child does not write"
        assert mine.recv() == "writing"
        memory, alive = tensor_of(buffer), 0
        seen = memory.clone()
        until = time.monotonic() + after_s
        while time.monotonic() < until:
            alive += _changed(memory, seen)
        child.kill()
        child.join()
        gone, last = time.monotonic(), 0.0
        _changed(memory, seen)  # what was written before the exit
        while (now := time.monotonic()) < gone + WATCHED_S:
            if _changed(memory, seen):
                last = now - gone
        return last * 1e3, alive
    finally:
        transport.close(0.0)


def _changed(memory: torch.Tensor, seen: torch.Tensor) -> bool:
    """Whether the memory differs from what was seen, which it then replaces."""
    if torch.equal(memory, seen):
        return False
    seen.copy_(memory)
    return True


def main() -> None:
    """Kill as many writers as asked for."""
    parser = argparse.ArgumentParser(description="the last write after a writer's exit")
    parser.add_argument("--transport", default="cuda_ipc")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    draw = random.Random(0)
    found = [
        killed_once(given.transport, given.device, given.mib << 20, draw.uniform(0.0, 0.2)) for _ in range(given.kills)
    ]
    assert all(alive for _, alive in found), "a writer that wrote nothing proves nothing"
    last = sorted(ms for ms, _ in found)
    where = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
    print(
        json.dumps(
            {
                "command": "python -m benchmarks.gpu_last_write",
                "gpu": where,
                "torch": installed("torch"),
                "commit": given.commit,
                "transport": given.transport,
                "bytes": given.mib << 20,
                "kernels_ahead": AHEAD,
                "kills": given.kills,
                "last_write_ms": {"median": round(last[len(last) // 2], 2), "most": round(last[-1], 2)},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
