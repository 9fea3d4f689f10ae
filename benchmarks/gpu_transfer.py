"""Whole transfers between GPUs against concurrent peer copies of the same bytes; prints one JSON document.

TP 1->1, 2->1, 1->2 and 2->2 with pages in shuffled order, through each transport, 256 MiB and 1 GiB a pair of ranks: 32
layers, 8 heads of 128, bf16. What is measured, and how, is ``python -m bench transfer``'s matter: bytes are checked
first, transfers and plain copies take turns, and ``share`` is the copies' median time over ours until each decode rank
has its rows in its pages (``share_until_known``: until each knows that all have; ``share_until_released``: until each
engine sees its pages released). Rows are announced before they are handed over, and that happens while the GPU still
computes for ``--queued-ms``, as engines' hosts run ahead; time counts from when it is done, for the plain copies too.
The last part holds ``staged`` against ``slice`` over NIXL: 1,024 tokens, final when they are handed over.

    python benchmarks/gpu_transfer.py > benchmarks/results/h200_transfer.json

``mapped`` beside ``staged``, from pages of 64 into pages of 16 tokens, where the sizes are of the whole request:

    python benchmarks/gpu_transfer.py --transports cuda_ipc --tp "1->1" "1->2" "1->4" --strategies staged mapped \
        --pages 64 16 --whole --mib 32 128 256 1024 --ring-mib 1024 --slots 8 --slice-repeats 0

``--busy`` lets the engine's threads compute in Python meanwhile. ``--decode-load`` lets decode ranks run decode-like
steps, whose times are in the result, p50 and p95. ``--programs`` bounds what a copy into mapped pages takes of the GPU.
``--wire`` emulates a network of a chosen speed, for the transfers alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

import torch

from bench import TransferReport, TransferShape, run_transfer
from disagg_kv.errors import DisaggKVError

PAIRS = ("1->1", "2->1", "1->2", "2->2")
TOKEN_KIB = 128
"""Of all layers and heads."""


def shapes(given: argparse.Namespace) -> Iterator[TransferShape]:
    """What is asked for on the command line, one after another."""
    for transport in given.transports:
        for prefill_tp, decode_tp in (tuple(map(int, tp.split("->"))) for tp in given.tp):
            for mib in given.mib:
                pairs = 1 if given.whole else max(prefill_tp, decode_tp)
                yield TransferShape(
                    transport=transport,
                    device="cuda",
                    strategies=tuple(given.strategies),
                    prefill_tp=prefill_tp,
                    decode_tp=decode_tp,
                    tokens=mib * 1024 * pairs // TOKEN_KIB,
                    page_size=given.pages[0],
                    decode_page_size=given.pages[1],
                    announced=True,
                    queued_s=given.queued_ms / 1e3,
                    slots=given.slots,
                    slot_bytes=given.slot_mib << 20,
                    ring_bytes=given.ring_mib << 20,
                    repeats=given.repeats,
                    busy=given.busy,
                    decode_load=given.decode_load,
                    programs=given.programs,
                    wire_bytes_per_s=None if given.wire is None else given.wire * 1e9,
                )


def row(report: TransferReport, strategy: str) -> dict[str, object]:
    """One line of the result."""
    shape, found = report.shape, report.strategies[strategy]
    host = found.phases["plan"].p50 + found.phases["gather"].p50
    return {
        "transport": shape.transport,
        "tp": f"{shape.prefill_tp}->{shape.decode_tp}",
        "strategy": strategy,
        "wire_GB_per_s": None if shape.wire_bytes_per_s is None else shape.wire_bytes_per_s / 1e9,
        "programs": shape.programs,
        "busy": shape.busy,
        **{
            f"{name}_us": [round(of.p50 * 1e6, 1), round(of.p95 * 1e6, 1)]
            for name, of in (("decode_step", found.decode_step), ("decode_step_alone", found.decode_step_alone))
            if of is not None
        },
        "tokens": shape.tokens,
        "bytes": report.nbytes,
        "writes": found.descriptors,
        "segments": found.segments,
        "placed_us": round(found.phases["placed"].p50 * 1e6, 1),
        "placed_p95_us": round(found.phases["placed"].p95 * 1e6, 1),
        "known_us": round(found.phases["known"].p50 * 1e6, 1),
        "known_p95_us": round(found.phases["known"].p95 * 1e6, 1),
        "total_us": round(found.phases["total"].p50 * 1e6, 1),
        "total_p95_us": round(found.phases["total"].p95 * 1e6, 1),
        "copies_us": round(report.ceiling.total.p50 * 1e6, 1),
        "copies_p95_us": round(report.ceiling.total.p95 * 1e6, 1),
        "GB_per_s": round(found.gb_per_s, 1),
        "copies_GB_per_s": round(report.ceiling.gb_per_s, 1),
        "share": round(report.ceiling.total.p50 / found.phases["placed"].p50, 3),
        "share_until_known": round(report.ceiling.total.p50 / found.phases["known"].p50, 3),
        "share_until_released": round(report.ceiling.total.p50 / found.phases["total"].p50, 3),
        "share_of_wire": round(found.share_of_ceiling, 3),
        "host_us_per_gather": round(host * 1e6 * shape.prefill_tp / max(found.segments, 1), 1),
        "phases_us": {name: round(q.p50 * 1e6, 1) for name, q in found.phases.items()},
    }


def said(*command: str) -> str:
    """The first line that a command prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> None:
    """Print every case; one that fails has its error for a result."""
    parser = argparse.ArgumentParser(description="transfers between GPUs against peer copies")
    parser.add_argument("--transports", nargs="*", default=["cuda_ipc", "nixl", "mooncake"])
    parser.add_argument("--tp", nargs="*", default=PAIRS, help="ranks of prefill and of decode")
    parser.add_argument("--mib", type=int, nargs="*", default=[256, 1024], help="of a pair of ranks")
    parser.add_argument("--whole", action="store_true", help="sizes are of the request, not of a pair of ranks")
    parser.add_argument("--strategies", nargs="*", default=["staged"])
    parser.add_argument("--pages", type=int, nargs=2, default=[64, 64], help="tokens of a page, on either side")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--slot-mib", type=int, default=64)
    parser.add_argument("--ring-mib", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--queued-ms", type=float, default=3.0, help="that the engine's host is ahead of its GPU")
    parser.add_argument("--busy", action="store_true", help="engines' threads run Python code meanwhile")
    parser.add_argument("--decode-load", action="store_true", help="decode ranks run decode-like steps meanwhile")
    parser.add_argument("--programs", type=int, help="most of a copy into mapped pages")
    parser.add_argument("--wire", type=float, help="GB/s of an emulated wire")
    parser.add_argument("--slice-repeats", type=int, default=3, help="0: leave that part out")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    cases = list(shapes(given))
    if given.slice_repeats:
        cases.append(
            TransferShape(transport="nixl", device="cuda", prefill_tp=2, announced=True, repeats=given.slice_repeats)
        )
    rows: list[dict[str, object]] = []
    for shape in cases:
        try:
            report = run_transfer(shape)
            rows += [row(report, name) for name in (*shape.strategies, *shape.again)]
        except DisaggKVError as error:
            tp = f"{shape.prefill_tp}->{shape.decode_tp}"
            rows.append({"transport": shape.transport, "tp": tp, "tokens": shape.tokens, "error": str(error)})
        print(json.dumps(rows[-len(shape.runs) :]), file=sys.stderr, flush=True)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "commit": given.commit or said("git", "rev-parse", "HEAD"),
        "ranks_per_gpu": "one where there are as many GPUs, else each side's ranks share its own",
        "gpu": torch.cuda.get_device_name(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {
            "torch": torch.__version__,
            "triton": said(sys.executable, "-c", "import triton; print(triton.__version__)"),
        },
        "queued_ms": given.queued_ms,
        "pages": given.pages,
        "settings": {"slots": given.slots, "slot_mib": given.slot_mib, "repeats": given.repeats},
        "cases": rows,
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
