"""A cache that becomes float8 on the way against one that stays bfloat16, through one emulated wire.

Prints one JSON document. Both are whole transfers by ``staged``, in turns; the bytes are checked first, as in
``python -m bench transfer``. ``ratio`` is the median time with the conversion over the one without it. A wire that is
slower than the kernels halves the time, as half the bytes cross.

    python -m benchmarks.convert --wire 0.25 1 > benchmarks/results/cpu_convert.json
    python -m benchmarks.convert --device cuda --tokens 4096 --wire 50 > benchmarks/results/h100_convert.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator

import torch
from attrs import asdict, evolve

from bench import TransferShape, run_transfer
from bench.machine import Machine
from disagg_kv.kernels import kernels_for

INTO = "float8_e4m3fn"


def rows(shape: TransferShape, wires: list[float], turns: int) -> Iterator[dict[str, object]]:
    """One for each speed of the wire, in GB/s of a prefill rank."""
    for wire in wires:
        plain = evolve(shape, wire_bytes_per_s=wire * 1e9)
        shapes = {"bfloat16": plain, INTO: evolve(plain, decode_dtype=INTO)}
        found: dict[str, list[float]] = {name: [] for name in shapes}
        sent = {}
        for _ in range(turns):
            for name, one in shapes.items():
                report = run_transfer(one)
                found[name].append(report.strategies["staged"].phases["total"].p50)
                sent[name] = report.nbytes
        ms = {name: round(statistics.median(of) * 1e3, 3) for name, of in found.items()}
        yield {"wire_GB_per_s": wire, "bytes": sent, "ms": ms, "ratio": round(ms[INTO] / ms["bfloat16"], 3)}


def on_gpu(device: str) -> dict[str, str]:
    """The GPU of a measurement on one."""
    if device == "cpu":
        return {}
    from .gpu_kernels import _said  # imports triton

    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {"gpu": torch.cuda.get_device_name(), "driver": driver}


def main() -> None:
    """Every wire."""
    parser = argparse.ArgumentParser(description="a conversion on the way, through an emulated wire")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--wire", type=float, nargs="+", required=True, help="GB/s of a prefill rank")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    shape = TransferShape(
        transport="shm" if given.device == "cpu" else "cuda_ipc",
        device=given.device,
        strategies=("staged",),
        prefill_tp=1,
        tokens=given.tokens,
        layers=given.layers,
        announced=True,
        repeats=given.repeats,
    )
    found = list(rows(shape, given.wire, given.turns))
    print(
        json.dumps(
            {
                "command": " ".join(["python -m benchmarks.convert", *sys.argv[1:]]),
                "machine": asdict(Machine.here()),
                "kernels": kernels_for(given.device).name,
                **on_gpu(given.device),
                **({"commit": given.commit} if given.commit else {}),
                "shape": {"tokens": given.tokens, "layers": given.layers, "heads": 8, "head_dim": 128, "tp": "1->1"},
                "rows": found,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
