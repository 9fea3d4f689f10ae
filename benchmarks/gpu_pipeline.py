"""Time to first token of a real model per chunk and in layer groups, against its bound; prints one JSON document.

One process computes prompts with a model of random weights and sends their caches to another one, on another GPU where
there are two. Time runs from the beginning of the forward pass until the rows and the first token, which travels as aux
data, are on the decode rank; decode runs no model. Real wire, and emulated ones of a chosen speed around it. Of every
case these take turns, and the medians are shown:

* ``compute_ms``: the forward pass alone, its rows going to pages (C);
* ``transfer_ms``: rows that are there already, handed over at once, grants in hand (T);
* ``per_chunk_ms``, ``pipelined_ms``: both together, with ``staged`` and with ``staged+layer_pipelined``.

``group_ms`` is what one more group costs with nothing to compute. ``bound_ms`` is the least over N of
max(C, T) + min(C, T) / N + N ``group_ms``; ``hidden`` the share of min(C, T) (1 - 1 / groups) by which
``pipelined_ms`` is below C + T. Bounds and ratios are those of a turn, and the median of them counts: what a host does
besides changes all four alike, if it does it for a whole turn. Where the model alone takes half as long again in one
pass as in the next, nothing can be said of a turn: so ``quiet`` has the lower quartile of each, and the bound of
those. The caches of a first and a last transfer are compared. A case that fails has its error
for a result. The longest prompts come first; the result has, after each case, all that there is.

    python -m benchmarks.gpu_pipeline --out benchmarks/results/h200_pipeline.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen

from disagg_kv.bench.machine import Machine, installed
from disagg_kv.bench.ranks import Ranks, running, within_one_process
from disagg_kv.errors import DisaggKVError, IntegrityError
from disagg_kv.memory import spread
from disagg_kv.planning import exposed_s

from .model_ranks import (
    COMPARED,
    MODELS,
    PAGE,
    PER_CHUNK,
    PIPELINED,
    SINGLY,
    TOGETHER,
    Came,
    Case,
    Sent,
    Setup,
    Staging,
    model_spec,
    serve,
)

PUBLISHED = {
    "source": "SGLang #23515: Qwen2.5-72B, TP 4, four 400 Gbit/s links; TTFT under load, so queueing is in it",
    "tokens": [256, 1024, 4096, 8192, 16384],
    "per_chunk_ms": [229, 696, 1192, 1234, 1070],
    "pipelined_ms": [269, 274, 378, 637, 922],
}

WARM, WARM_S = 5, 4.0
"""So many turns do not count: kernels are compiled, and the schedule learns how fast compute and wire are. After so
many seconds, two are enough."""

Row = Mapping[str, object]

LEAST = 3
"""Turns that count, however long they take."""

GROUP_TURNS = 7


@frozen
class Limits:
    """How much is measured.

    Args:
        repeats: turns of a case.
        all_s: seconds until the last case has to end; those that are left share what is left of them.
    """

    repeats: int
    all_s: float


class Pair:
    """The two ranks, while they serve one case."""

    def __init__(self, prefill: Ranks, decode: Ranks, case: Case) -> None:
        self._prefill, self._decode, self._case = prefill, decode, case
        self._number = 0
        decode.ask(type(None), "open", case)
        prefill.ask(type(None), "open", case)

    def close(self) -> None:
        """End the case's endpoints."""
        self._prefill.ask(type(None), "shut")
        self._decode.ask(type(None), "shut")

    def end(self, way: str) -> None:
        """End one way's endpoints."""
        self._prefill.ask(type(None), "end", way)
        self._decode.ask(type(None), "end", way)

    def computed(self) -> float:
        """Seconds of compute alone."""
        self._number += 1
        return self._prefill.ask(float, "compute", self._case.tokens, self._number)[0]

    def moved(self, way: str, how: str) -> tuple[float, Sent]:
        """Seconds of one room, which prefill handles by its method ``how``.

        Raises:
            IntegrityError: decode has another first token.
        """
        self._number += 1
        room, rows = f"{self._case.number} {self._number}".encode(), self._case.rows(way)
        self._decode.ask(type(None), "prepare", way, room, rows)
        self._prefill.ask(type(None), "prepare", way, room, rows)
        self._decode.tell("arrive")
        self._prefill.tell(how, self._number)
        (sent,), (came,) = self._prefill.answers(Sent), self._decode.answers(Came)
        if sent.token != came.token:
            raise IntegrityError(f"{way}: the first token is {sent.token} on prefill and {came.token} on decode")
        return came.ended - sent.began, sent

    def checked(self, way: str) -> None:
        """Run a prompt and compare what is in both pools.

        Raises:
            IntegrityError: they differ.
        """
        self._decode.ask(type(None), "poison", way)
        self.moved(way, "forward")
        rows = self._case.rows(way)
        (ours,), (theirs,) = self._prefill.ask(tuple, "digest", rows), self._decode.ask(tuple, "digest", way, rows)
        wrong = [number for number, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if wrong or not any(ours):
            raise IntegrityError(f"{way}: planes {wrong} of {len(ours)} differ after {rows} tokens")


def group_s(pair: Pair, layers: int) -> float:
    """Seconds that one more group costs."""
    took: dict[str, list[float]] = {TOGETHER: [], SINGLY: []}
    for turn in range(GROUP_TURNS + 1):
        for way, seconds in took.items():
            found, _ = pair.moved(way, "layers")
            if turn:
                seconds.append(found)
    return max(0.0, (statistics.median(took[SINGLY]) - statistics.median(took[TOGETHER])) / max(1, layers - 1))


def bounded(compute_s: float, wire_s: float, group: float, layers: int) -> tuple[float, int]:
    """The least that is exposed, and in how many groups."""
    return min((exposed_s(compute_s, wire_s, n, group), n) for n in range(1, layers + 1))


def quiet(took: Mapping[str, Sequence[float]], group: float, layers: int) -> dict[str, object]:
    """The lower quartiles, and what the pipelined one is over the bound of the others."""
    compute, wire, whole, grouped = (sorted(of)[(len(of) - 1) // 4] for of in took.values())
    bound, _ = bounded(compute, wire, group, layers)
    names = {"compute_ms": compute, "transfer_ms": wire, "per_chunk_ms": whole, "pipelined_ms": grouped}
    found: dict[str, object] = {name: ms(seconds) for name, seconds in names.items()}
    return {**found, "bound_ms": ms(bound), "over_bound": round(grouped / bound, 3)}


def turns(pair: Pair, repeats: int, until: float) -> tuple[dict[str, list[float]], Sent]:
    """Seconds of what is measured, turn by turn, and how the last pipelined one was sent."""
    took: dict[str, list[float]] = {"compute": [], "transfer": [], PER_CHUNK: [], PIPELINED: []}
    last: dict[str, Sent] = {}
    began, warm = time.monotonic(), 0
    while warm < 2 or (warm < WARM and time.monotonic() < began + WARM_S):
        warm += 1
        pair.moved(PIPELINED, "forward")
        pair.moved(PER_CHUNK, "forward")
        pair.moved(PER_CHUNK, "transfer")
    for turn in range(repeats):
        if turn >= LEAST and time.monotonic() > until:
            break
        took["compute"].append(pair.computed())
        took["transfer"].append(pair.moved(PER_CHUNK, "transfer")[0])
        for way in COMPARED if turn % 2 else reversed(COMPARED):
            seconds, last[way] = pair.moved(way, "forward")
            took[way].append(seconds)
    return took, last[PIPELINED]


def measured(pair: Pair, layers: int, repeats: int, until: float) -> dict[str, object]:
    """One line of the result."""
    for way in COMPARED:
        pair.checked(way)
    group = group_s(pair, layers)
    for way in (TOGETHER, SINGLY):
        pair.end(way)
    took, sent = turns(pair, repeats, until)
    groups, reason = sent.groups, sent.reason
    for way in COMPARED:
        pair.checked(way)
    compute, wire, whole, grouped = (statistics.median(of) for of in took.values())
    bounds = [bounded(c, t, group, layers) for c, t in zip(took["compute"], took["transfer"], strict=True)]
    bound, best = statistics.median(at for at, _ in bounds), statistics.median_low(n for _, n in bounds)
    could = min(compute, wire) * (1 - 1 / groups)
    return {
        "compute_ms": ms(compute),
        "transfer_ms": ms(wire),
        "per_chunk_ms": ms(whole),
        "pipelined_ms": ms(grouped),
        "groups": groups,
        "reason": reason,
        "group_ms": ms(group),
        "bound_ms": ms(bound),
        "bound_groups": best,
        "over_bound": round(statistics.median(b / a for (a, _), b in zip(bounds, took[PIPELINED], strict=True)), 3),
        "hidden": round((compute + wire - grouped) / could, 3) if could else None,
        "pipelined_over_per_chunk": round(
            statistics.median(b / a for a, b in zip(took[PER_CHUNK], took[PIPELINED], strict=True)), 3
        ),
        "turns": len(took["compute"]),
        "quiet": quiet(took, group, layers),
        "all_ms": {name: [ms(seconds) for seconds in of] for name, of in took.items()},
    }


def ms(seconds: float) -> float:
    """Rounded."""
    return round(seconds * 1e3, 3)


def run(
    setups: Sequence[Setup], cases: Sequence[Case], limits: Limits, told: Callable[[Sequence[Row]], None]
) -> Sequence[Row]:
    """A row for each case; after one that failed the others go on in new processes. ``told`` hears of each."""
    prefill, decode = setups
    began = time.monotonic()
    layers = len(model_spec(prefill.model).layers)
    threads = prefill.device == "cpu" and within_one_process(prefill.transport)
    rows: list[Row] = []
    while len(rows) < len(cases):
        here = len(rows)
        try:
            with running(
                serve, {"prefill": [prefill], "decode": [decode]}, prefill.timeout_s, threads=threads
            ) as ranks:
                for case in cases[here:]:
                    now, ends = time.monotonic(), began + limits.all_s
                    if now > ends:
                        rows.append({**_case(case), "error": f"not begun: {limits.all_s:g} s were over"})
                        told(rows)
                        continue
                    pair = Pair(*ranks, case)
                    until = now + (ends - now) / (len(cases) - len(rows))
                    row = {**_case(case), **measured(pair, layers, limits.repeats, until)}
                    pair.close()
                    rows.append(row)
                    told(rows)
        except DisaggKVError as error:
            if len(rows) < len(cases):
                rows.append({**_case(cases[len(rows)]), "error": f"{type(error).__name__}: {error}"})
                told(rows)
    return rows


def _case(case: Case) -> dict[str, object]:
    return {
        "wire_GB_per_s": None if case.wire_bytes_per_s is None else case.wire_bytes_per_s / 1e9,
        "tokens": case.tokens,
    }


def said(*command: str) -> str:
    """The first line that a command prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description="time to first token of a real model, per chunk and in layer groups")
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--transport", default="cuda_ipc")
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 1024, 4096, 16384])
    parser.add_argument("--wires", type=float, nargs="*", default=[0, 50, 5], help="GB/s; 0: as it is")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--slot-mib", type=int, default=128)
    parser.add_argument("--ring-mib", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--all-s", type=float, default=150.0, help="cases get shorter so that all end by then")
    parser.add_argument("--out", type=Path, help="a file for the result, whole after each case; else it is printed")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of one transfer, and of making the model")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    return parser.parse_args(given)


def described(given: argparse.Namespace, words: Sequence[str], devices: Sequence[str]) -> dict[str, object]:
    """What was measured, and on what."""
    cuda = given.device == "cuda"
    return {
        "command": " ".join(["python -m benchmarks.gpu_pipeline", *words]),
        "commit": given.commit or said("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "hardware": {"cpu": Machine.here().cpu, "cores": Machine.here().cores},
        "versions": {"torch": torch.__version__, **{name: installed(name) for name in ("triton", "transformers")}},
        "model": {"name": given.model, **MODELS[given.model], "dtype": "bfloat16", "attention": "sdpa"},
        "settings": {
            "transport": given.transport,
            "devices": devices,
            "tp": "1->1",
            "page": PAGE,
            "slots": given.slots,
            "slot_mib": given.slot_mib,
            "ring_mib": given.ring_mib,
        },
        "published": PUBLISHED,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print all cases, or write them to a file."""
    words = sys.argv[1:] if words is None else words
    given = arguments(words)
    places = ["cpu", "cpu"]
    if given.device == "cuda":
        # Asks the driver's management library: this process must not begin to use CUDA before its children have.
        (ours,), (theirs,) = spread(1, 1, torch.cuda.device_count())
        places = [f"cuda:{ours}", f"cuda:{theirs}"]
    staging = Staging(given.slots, given.slot_mib << 20, given.ring_mib << 20)
    speeds = [None if gb == 0 else gb * 1e9 for gb in given.wires]
    shown = [Case(n, *of) for n, of in enumerate((speed, tokens) for speed in speeds for tokens in given.tokens)]
    cases = sorted(shown, key=lambda case: -case.tokens)

    def document(rows: Sequence[Row]) -> str:
        found = {case.number: row for case, row in zip(cases, rows, strict=False)}
        in_order = [found[case.number] for case in shown if case.number in found]
        return json.dumps({**described(given, words, places), "cases": in_order}, indent=1) + "\n"

    def told(rows: Sequence[Row]) -> None:
        print(json.dumps({name: of for name, of in rows[-1].items() if name != "all_ms"}), file=sys.stderr, flush=True)
        if given.out is not None:
            given.out.write_text(document(rows))

    with tempfile.TemporaryDirectory(prefix="disagg-kv-bench-") as folder:
        common = (folder, given.model, given.transport, cases[0].tokens, staging, given.timeout_s)
        setups = [Setup("prefill", places[0], *common), Setup("decode", places[1], *common)]
        rows = run(setups, cases, Limits(given.repeats, given.all_s), told)
    if given.out is None:
        print(document(rows), end="")


if __name__ == "__main__":
    main()
