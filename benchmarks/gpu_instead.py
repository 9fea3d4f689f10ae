"""What a user would take instead on one host: the same pages through NIXL as vLLM uses it, and through NCCL.

Prints one JSON document. 32 layers, 8 heads of 128, bf16: 128 KiB a token, in pages in random order. Medians:

* ``mapped_us``, ``staged_us``: ``python -m bench transfer`` over ``cuda_ipc``, from ``send_chunk`` until decode's
  engine sees the room released.
* ``nixl_us``: the decode process reads with one descriptor per page and layer, which both sides have prepared
  (``prep_xfer_dlist``), as vLLM's NixlConnector does: from ``make_prepped_xfer`` until the state is DONE.
* ``nccl_us``: ``index_select`` of each layer into one buffer, ``send`` and ``recv``, ``index_copy_`` into each layer,
  from the order to send until the pages are there. It needs two GPUs; NCCL takes no two ranks on one.

What tells the other side that a request is ready is in ours, and in none of the others. Bytes are compared.

    python -m benchmarks.gpu_instead > benchmarks/results/h200_instead.json

``--device cpu`` runs the same over ``shm``, DRAM and gloo.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from attrs import frozen
from torch import distributed

from bench import TransferShape, run_transfer
from bench.machine import installed
from disagg_kv.transports.nixl_library import load

LAYERS, TOKEN_BYTES = 32, 4096
"""And the bytes of a token in one layer."""

Layers = Sequence[torch.Tensor]
"""``[pages, bytes of a page]`` uint8 each."""


@frozen
class Case:
    """What both sides know.

    Args:
        tokens, page: of the request, and of a page.
        devices: of prefill and of decode.
        nccl: whether both take part in a process group.
        folder: where they meet.
        repeats: measured transfers.
    """

    tokens: int
    page: int
    devices: tuple[str, str]
    nccl: bool
    folder: str
    repeats: int

    @property
    def pages(self) -> int:
        """Of each side; half of them are not of the request."""
        return 2 * (self.tokens // self.page)

    def ids(self, side: int) -> list[int]:
        """The request's pages on a side, in random order."""
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(side))
        return [int(page) for page in order[: self.pages // 2]]

    def layers(self, side: int) -> Layers:
        """Memory with content that the other side can compute (0: prefill), or with zeros (1: decode)."""
        draw = torch.Generator(self.devices[side]).manual_seed(7)
        shape, device = (self.pages, self.page * TOKEN_BYTES), self.devices[side]
        if side:
            return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        return [torch.randint(256, shape, generator=draw, dtype=torch.uint8, device=device) for _ in range(LAYERS)]

    def check(self, found: Layers) -> None:
        """Compare decode's pages with prefill's, and clear them."""
        here, there = self.ids(1), self.ids(0)
        again = torch.Generator(self.devices[1]).manual_seed(7)
        for layer in found:
            want = torch.randint(256, layer.shape, generator=again, dtype=torch.uint8, device=layer.device)
            assert torch.equal(layer[here], want[there]), "wrong bytes"
            layer.zero_()


class Agent:
    """NIXL over a side's memory, with its progress thread, as vLLM starts it."""

    def __init__(self, side: str, layers: Layers) -> None:
        module = load().module
        self.kind = "DRAM" if layers[0].device.type == "cpu" else "VRAM"
        self._gpu = layers[0].device.index or 0
        self.agent: Any = module.nixl_agent(side, module.nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(t.data_ptr(), t.nbytes, self._gpu, "") for t in layers], self.kind)
        step = layers[0].stride(0)
        self.pages = [(t.data_ptr() + page * step, step, self._gpu) for t in layers for page in range(len(t))]


def prefill(pipe: Connection, case: Case) -> None:
    """The child that holds the pages."""
    _start(case, 0)
    layers = case.layers(0)
    agent = Agent("prefill", layers)
    pipe.send((agent.agent.get_agent_metadata(), agent.pages))
    ids = torch.tensor(case.ids(0), device=case.devices[0])
    sent = torch.empty(LAYERS, len(ids), layers[0].shape[1], dtype=torch.uint8, device=case.devices[0])
    while pipe.recv() == "send":
        for number, layer in enumerate(layers):
            torch.index_select(layer, 0, ids, out=sent[number])
        distributed.send(sent, 1)


def decode(pipe: Connection, case: Case) -> None:
    """The child that wants them; sends the times of each way, in microseconds."""
    _start(case, 1)
    layers = case.layers(1)
    mine = Agent("decode", layers)
    metadata, theirs = pipe.recv()
    agent, name = mine.agent, mine.agent.add_remote_agent(metadata).decode()
    local = agent.prep_xfer_dlist("", mine.pages, mine.kind)
    remote = agent.prep_xfer_dlist(name, theirs, mine.kind)
    ours, others = ([at * case.pages + page for at in range(LAYERS) for page in case.ids(side)] for side in (1, 0))

    def nixl() -> None:
        handle = agent.make_prepped_xfer("READ", local, ours, remote, others)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()

    ids = torch.tensor(case.ids(1), device=case.devices[1])
    got = torch.empty(LAYERS, len(ids), layers[0].shape[1], dtype=torch.uint8, device=case.devices[1])

    def nccl() -> None:
        pipe.send("send")
        distributed.recv(got, 0)
        for number, layer in enumerate(layers):
            layer.index_copy_(0, ids, got[number])
        _wait(case.devices[1])

    found = {"nixl_us": _timed(nixl, case, layers)}
    if case.nccl:
        found["nccl_us"] = _timed(nccl, case, layers)
    pipe.send(found)


def _start(case: Case, rank: int) -> None:
    device = case.devices[rank]
    if device != "cpu":
        torch.cuda.set_device(device)
    if case.nccl:
        backend = "gloo" if device == "cpu" else "nccl"
        distributed.init_process_group(backend, f"file://{case.folder}/group", rank=rank, world_size=2)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _timed(call: Callable[[], None], case: Case, layers: Layers) -> float:
    times = []
    for number in range(case.repeats + 3):
        _wait(case.devices[1])
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        if number >= 3:
            times.append(took)
        _wait(case.devices[1])
    case.check(layers)
    return round(statistics.median(times) * 1e6, 1)


def others(case: Case) -> dict[str, float]:
    """The ways that are not ours."""
    context = multiprocessing.get_context("spawn")
    (here, theirs), (there, mine) = context.Pipe(), context.Pipe()
    children = [
        context.Process(target=prefill, args=(theirs, case), daemon=True),
        context.Process(target=decode, args=(mine, case), daemon=True),
    ]
    for child in children:
        child.start()
    there.send(here.recv())
    while (found := there.recv()) == "send":
        here.send(found)
    here.send("stop")
    for child in children:
        child.join(60.0)
    return dict(found)


def measure(tokens: int, page: int, gpus: int, device: str, repeats: int) -> dict[str, object]:
    """One row."""
    devices = ("cpu", "cpu") if device == "cpu" else ("cuda:0", f"cuda:{gpus - 1}")
    with tempfile.TemporaryDirectory() as folder:
        instead = others(Case(tokens, page, devices, device == "cpu" or gpus > 1, folder, repeats))
    shape = TransferShape(
        device="cpu" if device == "cpu" else "cuda",
        transport="shm" if device == "cpu" else "cuda_ipc",
        strategies=("staged", "mapped"),
        prefill_tp=1,
        decode_tp=1,
        tokens=tokens,
        layers=LAYERS,
        page_size=page,
        announced=True,
        repeats=repeats,
    )
    report = run_transfer(shape)
    names = {"staged": "staged_us", "mapped": "mapped_us"}
    mine = {said: round(report.strategies[name].phases["total"].p50 * 1e6, 1) for name, said in names.items()}
    plain = round(report.ceiling.total.p50 * 1e6, 1)
    return {"tokens": tokens, "page": page, "bytes": report.nbytes, "copy_us": plain, **mine, **instead}


def main() -> None:
    """Every number of tokens with every page size."""
    parser = argparse.ArgumentParser(description="the same pages through NIXL and NCCL")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 1024, 2048, 8192])
    parser.add_argument("--pages", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    asked = "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    seen = (
        subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
        if given.device == "cuda"
        else []
    )
    rows = [
        measure(tokens, page, len(seen), given.device, given.repeats) for tokens in given.tokens for page in given.pages
    ]
    print(
        json.dumps(
            {
                "command": "python -m benchmarks.gpu_instead",
                "gpu": seen[0].split(",")[0] if seen else None,
                "gpus": [line.split(",")[0] for line in seen],
                "driver": seen[0].split(",")[1].strip() if seen else "none",
                "commit": given.commit,
                "versions": {name: installed(name) for name in ("torch", "triton", "pyzmq", "nixl-cu13")},
                "repeats": given.repeats,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
