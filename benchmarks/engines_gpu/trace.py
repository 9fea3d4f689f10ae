"""Where the time of one request goes, from the router to decode's first token, in both instances of vLLM.

    python -m benchmarks.engines_gpu.trace --model MODEL --block 64 --out FOLDER
    python -m benchmarks.engines_gpu.trace --cpu --model TINY_MODEL --block 32 --tokens 512 --out FOLDER
    python -m benchmarks.engines_gpu.trace --plot RESULT.json --out PICTURE.svg

Prefill has the first GPU, decode the last; on a host with one GPU they share it. Requests are alone: each order of the
router in turn. ``traced.py`` notes the moments in the engines. The way of a request is cut at them into PARTS, which
add up to the time to the first token: a part ends at its moment, or is empty if that came before the part began. So
what an instance does while it waits for the other one is in no part. After the requests, plain copies of as many bytes
between the same devices are timed: what the wire takes at least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Literal

from attrs import define, field, frozen

from benchmarks.tables import Found, table
from pictures.drawing import Picture

from .__main__ import Gpus, header, settings
from .cases import FIRST_PORT, LOAD_TOKENS, PAIRS, SOURCE, Mode, Order, Spec, engine_args, environment, transfer
from .engines import Instance, Live, RequestError
from .figures import quantile
from .turns import CPU_ARGS, CPU_ENVIRONMENT, PROGRAM, START_S, parser_of

ORDERS: Sequence[Order] = ("at once", "after prefill")
WARM = 3
"""Requests of each order that do not count; the first of all makes contact."""

PAUSE_S = 0.3
"""After each request, for the instances to write its moments down."""

COPIES = 20

Owner = Literal["vLLM", "model", "ours", "wire"]


@frozen
class Part:
    """A part of a request's way, and what its time is spent on."""

    name: str
    owner: Owner


PARTS: Sequence[Part] = (
    Part("the request reaches prefill's scheduler", "vLLM"),
    Part("prefill schedules it", "vLLM"),
    Part("the pass is announced", "ours"),
    Part("forward pass", "model"),
    Part("sampling, queued before the pass is closed", "model"),
    Part("prefill's answer reaches the router", "vLLM"),
    Part("the request reaches decode's scheduler", "vLLM"),
    Part("decode gives it blocks", "vLLM"),
    Part("the room is opened", "ours"),
    Part("the copy begins", "ours"),
    Part("the rows cross", "wire"),
    Part("decode's endpoint knows", "ours"),
    Part("the step that waits reports it", "ours"),
    Part("the step's result is taken", "vLLM"),
    Part("decode schedules its first step", "vLLM"),
    Part("decode's first step", "model"),
    Part("the token reaches the router", "vLLM"),
)
LOAD = slice(9, 15)
"""The parts from when the rows are final, and decode is ready, until decode's first step begins."""

KINDS: Mapping[Owner, str] = {"vLLM": "engine", "model": "box", "ours": "cell", "wire": "port"}
"""Owners, and the styles of their bars."""

Lines = Sequence[Mapping[str, Any]]


@frozen
class Way:
    """A request's way.

    Args:
        began: when it reached the router.
        ends: of each part, in order, never before the part's beginning.
        room: when decode's room was open.
        nbytes: that crossed.
    """

    began: float
    ends: Sequence[float]
    room: float
    nbytes: int

    @property
    def parts(self) -> list[float]:
        """Seconds of each part."""
        return [end - start for start, end in zip([self.began, *self.ends], self.ends, strict=False)]


def when(lines: Lines, name: str, after: float = -inf, *, last: bool = False, **has: object) -> float:
    """The first moment of a name since ``after``, or the last.

    Raises:
        ValueError: there is none.
    """
    found = [
        float(one["at"])
        for one in lines
        if one["name"] == name and one["at"] >= after and all(one[key] == value for key, value in has.items())
    ]
    if not found:
        raise ValueError(f"no moment {name!r} with {has}")
    return max(found) if last else min(found)


def way(order: Order, began: float, answered: float, token: float, prefill: Lines, decode: Lines) -> Way:
    """Cut a request's way at its moments.

    Args:
        order: of the router.
        began: it reached the router.
        answered: prefill's answer reached the router.
        token: decode's first token did.
        prefill: moments of that instance, of this request alone.
        decode: those of decode.

    Raises:
        ValueError: a moment is missing.
    """
    marked = when(prefill, "marked", last=True)
    wires = [one for one in prefill if one["name"] == "span wire"]
    if not wires:
        raise ValueError("no rows have crossed")
    if any(one["name"] == "copied" for one in prefill):  # by a kernel, which waits on the GPU for the pass
        crossing = when(prefill, "launched", last=True), when(prefill, "copied", last=True)
    else:
        crossing = min(one["start"] for one in wires), max(one["stop"] for one in wires)
    landed = when(decode, "room", handle="ReceptionHandle", phase="DONE")
    room, received = when(decode, "begun", loads=1), when(decode, "received", failed=False)
    learned = when(decode, "learned", received)
    step = when(decode, "begin", received, idle=False)
    passed = "forward" if any(one["name"] == "forward" for one in decode) else "marked"  # one runner has one hook less
    moments = (
        when(prefill, "new"),
        when(prefill, "begin", chunks=1),
        when(prefill, "begun", chunks=1),
        when(prefill, passed, last=True),
        marked,
        answered if order == "after prefill" else began,
        when(decode, "new"),
        when(decode, "begin", loads=1),
        room,
        crossing[0],
        min(landed, crossing[1]),
        landed,
        received,
        learned,
        step,
        when(decode, passed, step),
        token,
    )
    ends, last = [], began
    for moment in moments:
        last = max(last, moment)
        ends.append(last)
    return Way(began, ends, room, sum(one["nbytes"] for one in wires))


def specs(given: argparse.Namespace, gpus: int, notes: Path) -> dict[str, Spec]:
    """Prefill and decode."""
    made = {}
    for number, (name, role) in enumerate((("prefill", "kv_producer"), ("decode", "kv_consumer"))):
        args = engine_args(given.block, 1)
        env = environment(FIRST_PORT + 20 * number, [number * (gpus - 1)], given.source.resolve())
        kv = {**transfer(PAIRS["ours"], role), "engine_id": name}
        kv |= {"kv_connector": "TracedConnector", "kv_connector_module_path": "benchmarks.engines_gpu.traced"}
        if given.cpu:
            args = {**CPU_ARGS, **{key: args[key] for key in ("block_size", "enable_prefix_caching")}}
            env |= CPU_ENVIRONMENT
            kv["kv_connector_extra_config"] = {}
        env["TRACE_TO"] = str(notes / name)
        made[name] = Spec(name, {"model": str(given.model), "args": args, "kv": kv}, env)
    return made


@define(eq=False)
class Run:
    """What was asked, and what came of it."""

    given: argparse.Namespace
    gpus: int
    program: Sequence[str] = PROGRAM
    asked: list[tuple[Order, dict[str, Any], dict[str, Any], float, float]] = field(factory=list)
    ways: dict[Order, list[Way]] = field(factory=dict)
    red: list[str] = field(factory=list)

    async def all(self) -> None:
        """Start, warm up, ask, read the moments; kill the instances whatever happens."""
        self.given.out.mkdir(parents=True, exist_ok=True)
        started: list[Instance] = []
        with tempfile.TemporaryDirectory() as notes:
            try:
                for spec in specs(self.given, self.gpus, Path(notes)).values():
                    started.append(await Instance.start(spec, self.program, self.given.out))
                await asyncio.gather(*(one.ready(START_S) for one in started))
                print("both instances have started", flush=True)
                prefill, decode = started
                await self._ask(Live(PAIRS["ours"], prefill, decode))
            except RequestError as exc:
                self.red.append(str(exc))
            finally:
                await asyncio.gather(*(one.close() for one in started))
            self._read(Path(notes))

    async def _ask(self, live: Live) -> None:
        for rep in range(-WARM, self.given.reps):
            for order in reversed(ORDERS):
                seed = 1000 + 2 * rep + ORDERS.index(order)
                first, second, arrived = await live.answers(Mode("ours", order), seed, self.given.tokens, 1)
                await asyncio.sleep(PAUSE_S)
                if rep >= 0:
                    self.asked.append((order, first, second, arrived, time.monotonic()))
                print(f"{rep:3} {order}: {(second['t1'] - arrived) * 1e3:.1f} ms", flush=True)

    def _read(self, notes: Path) -> None:
        of = {
            name: [json.loads(line) for file in notes.glob(f"{name}.*") for line in file.read_text().splitlines()]
            for name in ("prefill", "decode")
        }
        for order, first, second, arrived, until in self.asked:
            own = ([one for one in of[name] if arrived <= one["at"] < until] for name in ("prefill", "decode"))
            try:
                found = way(order, arrived, first["t1"], second["t1"], *own)
            except ValueError as exc:
                self.red.append(f"{order}: {exc}")
            else:
                self.ways.setdefault(order, []).append(found)


def copies(nbytes: int, devices: Sequence[str]) -> list[float]:
    """Seconds of plain copies from the first device to the last, until each is seen to be done."""
    import torch

    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=one) for one in (devices[0], devices[-1]))
    took = []
    for _ in range(3 + COPIES):
        began = time.monotonic()
        target.copy_(source)
        for one in devices:
            if one != "cpu":
                torch.cuda.synchronize(one)
        took.append(time.monotonic() - began)
    return took[3:]


def document(run: Run, gpus: Gpus | None, nbytes: int, copied: Sequence[float]) -> dict[str, Any]:
    """The results, for JSON: milliseconds of each part, and the moments of one request of each order."""
    given = run.given
    orders = {}
    for order, ways in run.ways.items():
        whole = [one.ends[-1] - one.began for one in ways]
        middle = min(range(len(ways)), key=lambda i: abs(whole[i] - median(whole)))
        one = ways[middle]
        parts = zip(*(each.parts for each in ways), strict=True)
        orders[order] = {
            "ttft_ms": _ms(whole),
            "parts_ms": {part.name: _ms(values) for part, values in zip(PARTS, parts, strict=True)},
            "room_ms": _ms([each.room - each.began for each in ways]),
            "request": {"ends_ms": _ms([end - one.began for end in one.ends]), "room_ms": _ms([one.room - one.began])},
        }
    return {
        **header("trace", given.commit, gpus),
        "settings": {**settings("vllm"), "block": given.block},
        "tokens": given.tokens,
        "bytes": nbytes,
        "copy_ms": _ms(copied),
        "ok": not run.red,
        "red": run.red,
        "orders": orders,
    }


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(one * 1e3, 3) for one in seconds]


def spent(found: Found, order: str, parts: slice = slice(None)) -> dict[Owner, list[float]]:
    """Milliseconds of each request by owner, in some of its parts."""
    of = [(part.owner, found["orders"][order]["parts_ms"][part.name]) for part in PARTS[parts]]
    return {
        owner: [sum(one) for one in zip(*(values for whose, values in of if whose == owner), strict=True)]
        for owner in KINDS
    }


def shown(found: Found) -> str:
    """Each part in both orders, and what :func:`in_short` says."""
    orders = [order for order in ORDERS if order in found["orders"]]
    rows = [["ms, p50 / p90", "whose", *(f"asked {order}" for order in orders)]]
    for part in PARTS:
        rows.append([part.name, part.owner, *(_cell(found["orders"][one]["parts_ms"][part.name]) for one in orders)])
    return f"{table(rows)}\n\n{in_short(found)}"


def in_short(found: Found) -> str:
    """The sums of all parts, and those of the load beside a plain copy: what its wire takes longer is ours."""
    orders, copy = [order for order in ORDERS if order in found["orders"]], median(found["copy_ms"])
    rows = [["ms, p50 / p90", *(f"asked {order}" for order in orders)]]
    for owner in KINDS:
        rows.append([owner, *(_cell(spent(found, order)[owner]) for order in orders)])
    rows.append(["**first token**", *(_cell(found["orders"][order]["ttft_ms"]) for order in orders)])
    loads = [spent(found, order, LOAD) for order in orders]
    rows.append([f"a plain copy of {found['bytes'] / 2**20:.0f} MiB", *[_cell(found["copy_ms"])] * len(orders)])
    ours = ([a + b - copy for a, b in zip(one["ours"], one["wire"], strict=True)] for one in loads)
    rows.append(["the load beside it, ours", *map(_cell, ours)])
    rows.append(["the load beside it, vLLM's", *(_cell(one["vLLM"]) for one in loads)])
    return table(rows)


def _cell(values: Sequence[float]) -> str:
    return f"{quantile(values, 0.5):.2f} / {quantile(values, 0.9):.2f}"


LEFT, RIGHT, TOP, BAR, WIDTH = 300, 56, 66, 20, 900


def plot(found: Found, order: str = "at once") -> Picture:
    """One request, the one in the middle: a bar for each part, and one for what decode prepares meanwhile."""
    one = found["orders"][order]["request"]
    ends = one["ends_ms"]
    rows = [(part, start, end) for part, start, end in zip(PARTS, [0.0, *ends], ends, strict=False) if end > start]
    height = TOP + BAR * (len(rows) + 1) + 12
    picture = Picture(f"One request, from the router to decode's first token: {ends[-1]:.1f} ms", WIDTH, height)
    picture.text(16, 24, picture.title, "title", "start")
    for number, (owner, kind) in enumerate(KINDS.items()):
        picture.rect(kind, LEFT + 90 * number, 38, 14, 12, 2)
        picture.text(LEFT + 20 + 90 * number, 48, owner, "small", "start")
    scale = (WIDTH - LEFT - RIGHT) / ends[-1]

    def bar(line: int, name: str, kind: str, start: float, end: float) -> None:
        y = TOP + line * BAR
        picture.text(LEFT - 10, y + 11, name, "small", "end")
        picture.rect(kind, LEFT + start * scale, y, max(1.0, (end - start) * scale), BAR - 6, 1)
        picture.text(LEFT + end * scale + 5, y + 11, f"{end - start:.2f}", "small", "start")

    for line, (part, start, end) in enumerate(rows):
        bar(line, part.name, KINDS[part.owner], start, end)
    if order == "at once":
        bar(len(rows), "meanwhile decode opens the room", "free", 0.0, one["room_ms"][0])
    return picture


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=LOAD_TOKENS, help="of each prompt")
    parser.add_argument("--reps", type=int, default=10, help="requests of each order that count")
    parser.add_argument("--source", type=Path, default=SOURCE, help="the library's source tree")
    parser.add_argument("--plot", type=Path, help="only draw this document; --out is the picture")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    given = arguments(argv)
    if given.plot is not None:
        given.out.write_text(plot(json.loads(given.plot.read_text())).svg())
        return 0
    gpus = None if given.cpu else Gpus.here()
    run = Run(given, 1 if gpus is None else len(gpus.names))
    asyncio.run(run.all())
    devices = ["cpu"] if gpus is None else [f"cuda:{number}" for number in sorted({0, len(gpus.names) - 1})]
    nbytes = max((one.nbytes for ways in run.ways.values() for one in ways), default=0)
    found = document(run, gpus, nbytes, copies(nbytes, devices))
    (given.out / "trace.json").write_text(json.dumps(found) + "\n")
    print(*([shown(found)] if run.ways else []), *run.red, sep="\n", flush=True)
    return 1 if run.red else 0


if __name__ == "__main__":
    sys.exit(main())
