"""Time to first token of a real model per chunk and in layer groups, against its bound; prints one JSON document.

One process computes prompts with a model of random weights and sends their caches to another one, on another GPU where
there are two. Time runs from the beginning of the forward pass until the rows and the first token, which travels as aux
data, are on the decode rank; decode runs no model. Real wire, and emulated ones of a chosen speed around it. Of every
case these take turns, and the medians are shown:

* ``compute_ms``: the forward pass alone, its rows going to pages (C);
* ``transfer_ms``: rows that are there already, handed over at once, grants in hand (T);
* ``per_chunk_ms``, ``pipelined_ms``: both together, with the path alone and with ``+layer_pipelined``;
* ``model_ms``, ``model_pipelined_ms``: of these, until the first token was computed. ``model_over_first`` is the latter
  over that of the first of the ``--paths``, turn by turn: what a path costs the model more than the first one does.

``group_ms`` is what one more group costs with nothing to compute. ``bound_ms`` is the least over N of
max(C, T) + min(C, T) / N + N ``group_ms``; ``hidden`` the share of min(C, T) (1 - 1 / groups) by which
``pipelined_ms`` is below C + T. Bounds and ratios are those of a turn, and the median of them counts: what a host does
besides changes all four alike, if it does it for a whole turn. Where the model alone takes half as long again in one
pass as in the next, nothing can be said of a turn: so ``quiet`` has the lower quartile of each, and the bound of
those. Paths take turns, too; an emulated wire has no mappings, so ``mapped`` is left out over one. The caches of a
first and a last transfer are compared. A case that fails has its error for a result. The longest prompts come first;
the result has, after each case, all that there is.

    python -m benchmarks.gpu_pipeline --out benchmarks/results/h200_pipeline.json
    python -m benchmarks.gpu_pipeline --paths staged mapped --wires 0 --out benchmarks/results/h200_pipeline_mapped.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import field, frozen

from bench.machine import Machine, installed
from bench.ranks import Ranks, running, within_one_process
from disagg_kv.engines.hf.demo.devices import spread
from disagg_kv.errors import DisaggKVError, IntegrityError
from disagg_kv.planning import exposed_s

from .model_ranks import (
    COMPARED,
    COUNTED,
    MODELS,
    PAGE,
    Came,
    Case,
    Sent,
    Setup,
    Staging,
    Way,
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

    def end(self, way: Way) -> None:
        """End one way's endpoints."""
        self._prefill.ask(type(None), "end", way)
        self._decode.ask(type(None), "end", way)

    def computed(self) -> float:
        """Seconds of compute alone."""
        self._number += 1
        return self._prefill.ask(float, "compute", self._case.tokens, self._number)[0]

    def moved(self, way: Way, how: str) -> tuple[float, Sent]:
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

    def checked(self, way: Way) -> None:
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


@frozen
class Turns:
    """Seconds of what takes turns: of compute alone, and of each path.

    Args:
        compute: forward passes alone.
        transfer: per path.
        whole, model: per way that is compared, until all was there, and until the first token was computed.
        last: how the last room of each such way was sent.
    """

    compute: list[float] = field(factory=list)
    transfer: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    whole: dict[Way, list[float]] = field(factory=lambda: defaultdict(list))
    model: dict[Way, list[float]] = field(factory=lambda: defaultdict(list))
    last: dict[Way, Sent] = field(factory=dict)


def group_s(pair: Pair, path: str, layers: int) -> float:
    """Seconds that one more group costs."""
    together, singly = (Way(path, kind) for kind in COUNTED)
    took: dict[Way, list[float]] = {together: [], singly: []}
    for turn in range(GROUP_TURNS + 1):
        for way, seconds in took.items():
            found, _ = pair.moved(way, "layers")
            if turn:
                seconds.append(found)
    return max(0.0, (statistics.median(took[singly]) - statistics.median(took[together])) / max(1, layers - 1))


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


def turns(pair: Pair, paths: Sequence[str], repeats: int, until: float) -> Turns:
    """What is measured, turn by turn."""
    took = Turns()
    ways = [Way(path, kind) for path in paths for kind in COMPARED]
    began, warm = time.monotonic(), 0
    while warm < 2 or (warm < WARM and time.monotonic() < began + WARM_S):
        warm += 1
        for way in ways:
            pair.moved(way, "forward")
        for path in paths:
            pair.moved(Way(path, "per chunk"), "transfer")
    for turn in range(repeats):
        if turn >= LEAST and time.monotonic() > until:
            break
        took.compute.append(pair.computed())
        for path in paths:
            took.transfer[path].append(pair.moved(Way(path, "per chunk"), "transfer")[0])
        for way in ways if turn % 2 else reversed(ways):
            seconds, sent = pair.moved(way, "forward")
            took.whole[way].append(seconds)
            took.model[way].append(sent.model_s)
            took.last[way] = sent
    return took


def measured(pair: Pair, case: Case, layers: int, repeats: int, until: float) -> list[Row]:
    """A line of the result for each path."""
    compared = [way for way in case.ways if way.kind in COMPARED]
    for way in compared:
        pair.checked(way)
    groups = {path: group_s(pair, path, layers) for path in case.paths}
    for way in case.ways:
        if way.kind in COUNTED:
            pair.end(way)
    took = turns(pair, case.paths, repeats, until)
    for way in compared:
        pair.checked(way)
    return [found(took, path, case.paths[0], groups[path], layers) for path in case.paths]


def found(took: Turns, path: str, first: str, group: float, layers: int) -> Row:
    """The line of one path, ``first`` being that with which models are compared."""
    whole, grouped = (Way(path, kind) for kind in COMPARED)
    of = {
        "compute": took.compute,
        "transfer": took.transfer[path],
        "per_chunk": took.whole[whole],
        "pipelined": took.whole[grouped],
    }
    sent = took.last[grouped]
    median = {name: statistics.median(seconds) for name, seconds in of.items()}
    bounds = [bounded(c, t, group, layers) for c, t in zip(of["compute"], of["transfer"], strict=True)]
    could = min(median["compute"], median["transfer"]) * (1 - 1 / sent.groups)
    hidden = (median["compute"] + median["transfer"] - median["pipelined"]) / could if could else None
    model = {way: took.model[way] for way in (whole, grouped)}
    return {
        "path": path,
        **{f"{name}_ms": ms(seconds) for name, seconds in median.items()},
        "model_ms": ms(statistics.median(model[whole])),
        "model_pipelined_ms": ms(statistics.median(model[grouped])),
        "model_over_first": over(model[grouped], took.model[Way(first, grouped.kind)]),
        "model_per_chunk_over_first": over(model[whole], took.model[Way(first, whole.kind)]),
        "groups": sent.groups,
        "reason": sent.reason,
        "group_ms": ms(group),
        "bound_ms": ms(statistics.median(at for at, _ in bounds)),
        "bound_groups": statistics.median_low(n for _, n in bounds),
        "over_bound": over(of["pipelined"], [at for at, _ in bounds]),
        "hidden": None if hidden is None else round(hidden, 3),
        "pipelined_over_per_chunk": over(of["pipelined"], of["per_chunk"]),
        "turns": len(took.compute),
        "quiet": quiet(of, group, layers),
        "all_ms": {name: [ms(seconds) for seconds in all_of] for name, all_of in of.items()},
    }


def over(these: Sequence[float], those: Sequence[float]) -> float:
    """The median ratio of turns."""
    return round(statistics.median(a / b for a, b in zip(these, those, strict=True)), 3)


def ms(seconds: float) -> float:
    """Rounded."""
    return round(seconds * 1e3, 3)


def run(
    setups: Sequence[Setup], cases: Sequence[Case], limits: Limits, told: Callable[[Mapping[int, Sequence[Row]]], None]
) -> None:
    """Rows for each case; after one that failed the others go on in new processes. ``told`` hears all after each."""
    prefill, decode = setups
    began = time.monotonic()
    layers = len(model_spec(prefill.model).layers)
    threads = prefill.device == "cpu" and within_one_process(prefill.transport)
    rows: dict[int, Sequence[Row]] = {}

    def ended(case: Case, ends: Sequence[Row]) -> None:
        rows[case.number] = [{**_case(case), **row} for row in ends]
        told(rows)

    while len(rows) < len(cases):
        left = cases[len(rows) :]
        try:
            with running(
                serve, {"prefill": [prefill], "decode": [decode]}, prefill.timeout_s, threads=threads
            ) as ranks:
                for case in left:
                    now, ends = time.monotonic(), began + limits.all_s
                    if now > ends:
                        ended(case, [{"error": f"not begun: {limits.all_s:g} s were over"}])
                        continue
                    pair = Pair(*ranks, case)
                    until = now + (ends - now) / (len(cases) - len(rows))
                    lines = measured(pair, case, layers, limits.repeats, until)
                    pair.close()
                    ended(case, lines)
        except DisaggKVError as error:
            if len(rows) < len(cases):
                ended(cases[len(rows)], [{"error": f"{type(error).__name__}: {error}"}])


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
    parser.add_argument("--paths", nargs="*", default=["staged"], help="of the wire as it is; each with its groups")
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
    shown = [
        Case(n, speed, tokens, tuple(given.paths if speed is None else [p for p in given.paths if p != "mapped"]))
        for n, (speed, tokens) in enumerate((speed, tokens) for speed in speeds for tokens in given.tokens)
    ]
    cases = sorted((case for case in shown if case.paths), key=lambda case: -case.tokens)
    there: Mapping[int, Sequence[Row]] = {}

    def document() -> str:
        in_order = [row for case in shown for row in there.get(case.number, ())]
        return json.dumps({**described(given, words, places), "cases": in_order}, indent=1) + "\n"

    def told(rows: Mapping[int, Sequence[Row]]) -> None:
        nonlocal there
        there = rows
        for row in list(rows.values())[-1]:
            short = {name: of for name, of in row.items() if name != "all_ms"}
            print(json.dumps(short), file=sys.stderr, flush=True)
        if given.out is not None:
            given.out.write_text(document())

    with tempfile.TemporaryDirectory(prefix="disagg-kv-bench-") as folder:
        common = (folder, given.model, given.transport, cases[0].tokens, staging, given.timeout_s)
        setups = [Setup("prefill", places[0], *common), Setup("decode", places[1], *common)]
        run(setups, cases, Limits(given.repeats, given.all_s), told)
    if given.out is None:
        print(document(), end="")


if __name__ == "__main__":
    main()
