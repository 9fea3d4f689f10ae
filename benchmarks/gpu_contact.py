"""First contact of two endpoints whose kernels were never compiled; prints one JSON document.

Two processes, each with an empty cache of Triton's, and each on its own GPU where there are two. ``constructor_s`` is
what each endpoint's constructor took, and ``kernels`` what it compiled. ``requests_s`` are requests of 1,024 tokens one
after another, until the later side has released it: the first one connects the ranks, and with ``mapped`` waits for all
that this takes. ``compiled_later`` are kernels that were compiled after the constructors had returned: 0 is promised.

    python -m benchmarks.gpu_contact > benchmarks/results/h200_contact.json

``--device cpu --transport shm`` does the same with NumPy, which compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.engine import between_polls, wait_until
from bench.machine import commit, installed
from disagg_kv import CacheSpec, DecodeEndpoint, Expectation, PagedPool, PageTable, PrefillEndpoint, shard
from disagg_kv.channels import UnixChannel
from disagg_kv.endpoints.handle import RoomHandle
from disagg_kv.ids import GroupId, RoomId
from disagg_kv.rendezvous import Source, StaticRendezvous
from disagg_kv.transports import between_processes

TOKENS, PAGE, REQUESTS = 1024, 16, 5
ROLES = "prefill", "decode"
SPEC = CacheSpec.kv(32, 8, 128, "bfloat16")


def opened(end: PrefillEndpoint | DecodeEndpoint, room: RoomId) -> RoomHandle:
    """A request of all pages, on either side."""
    pages = [PageTable(GroupId("kv"), list(range(TOKENS // PAGE)))]
    if isinstance(end, DecodeEndpoint):
        came = end.open(room, Source("prefill"))
        came.expect(Expectation(TOKENS, pages))
        return came
    sent = end.open(room)
    sent.send_chunk(TOKENS, pages)
    sent.finish(TOKENS)
    return sent


def side(role: str, pipe: Connection, folder: str, device: str, carrier: str, path: str) -> None:
    """Be one side. Answers: the constructor's seconds and the kernels so far, then both after each request."""
    os.environ["TRITON_CACHE_DIR"] = cache = f"{folder}/{role}-cache"
    transports = between_processes(carrier, device)
    pages, there = TOKENS // PAGE, {one: [f"unix://{folder}/{one}"] for one in ROLES}
    # Memory first: CUDA's own start is no part of the constructor.
    pool = PagedPool.allocate(
        SPEC, shard(SPEC), pages=pages, page_size=PAGE, device=device, allocator=transports.allocator
    )
    channel, where = UnixChannel(there[role][0]), StaticRendezvous(there)
    make = PrefillEndpoint if role == "prefill" else DecodeEndpoint
    began = time.monotonic()
    end = make(pool, transport=transports, channel=channel, rendezvous=where, instance=role, strategy=path)
    for number in range(REQUESTS + 1):
        if number:
            began = pipe.recv()
            handle = opened(end, RoomId(b"request %d" % number))
            wait_until(end.poll, partial(getattr, handle, "released"), handle, 120.0, between_polls(busy=False))
        pipe.send((time.monotonic() - began, len([*Path(cache).rglob("*.cubin")])))
    end.close(1.0)


def main() -> None:
    """Start both sides, and make the requests."""
    parser = argparse.ArgumentParser(description="first contact with nothing compiled")
    for name, default in (("device", "cuda"), ("transport", "cuda_ipc"), ("path", "mapped")):
        parser.add_argument(f"--{name}", default=default)
    given = parser.parse_args()
    devices = ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"] if given.device == "cuda" else ["cpu"] * 2
    context, pipes, answers = multiprocessing.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for role, device in zip(ROLES, devices, strict=True):
            mine, theirs = context.Pipe()
            args = role, theirs, folder, device, given.transport, given.path
            context.Process(target=side, args=args, daemon=True).start()
            theirs.close()
            pipes.append(mine)
        for number in range(REQUESTS + 1):
            for pipe in pipes if number else ():
                pipe.send(time.monotonic())
            answers.append([pipe.recv() for pipe in pipes])
        for child in multiprocessing.active_children():
            child.join()
    document = {
        "asked": vars(given),
        "commit": commit(Path(__file__)),
        "gpus": [torch.cuda.get_device_name(device) for device in devices if device != "cpu"],
        "versions": {name: installed(name) for name in ("torch", "triton")},
        "constructor_s": {role: round(one[0], 3) for role, one in zip(ROLES, answers[0], strict=True)},
        "kernels": {role: one[1] for role, one in zip(ROLES, answers[0], strict=True)},
        "requests_s": [round(max(seconds for seconds, _ in pair), 4) for pair in answers[1:]],
        "compiled_later": sum(end[1] - start[1] for start, end in zip(answers[0], answers[-1], strict=True)),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
