"""Requests between engines that make steps, as engines do: from ``send_chunk`` until decode's engine sees the release.

One prefill process and one decode process of one host, TP 1 to 1, over ``shm``. A request has 256 tokens of 32 layers
with 4 heads of 64 in bfloat16: 8 MiB. The engine's thread of each side polls its endpoint once per step, and acts on
what its handle shows. Decode awaits the room before prefill sends, as behind a router that asks both at once: prefill's
engine makes steps until it knows, and sends at the end of the next one. The steps of both sides do not keep time.

A row is a load of the engine's threads, a path and a channel. Between two polls, an engine's thread

* ``waiting``: sleeps for 20 us;
* ``python-0.3``, ``python-8``: runs Python code for 0.3 or 8 ms;
* ``forward``: runs Python code for 1 ms, then spends 10 ms without the interpreter lock. ``time.sleep`` stands for a
  forward pass, which waits for its GPU in C++.

``known`` is the same time until decode's endpoint knew the outcome. The longest calls are those of ``poll``,
``send_chunk`` and ``finish`` of one request, on each side. All bytes of each request are compared.

    python -m benchmarks.step --json step.json
    python -m benchmarks.step --other ../before/src      this checkout and another one, in turns
    python -m benchmarks.step --wakeups 2000             no wake-up is lost

With ``--other``, both libraries serve each row in turns (A B, B A, ...), each in two processes of its own. A ratio is
this checkout's figure over the other's; its 95 % interval is a bootstrap over paired repetitions.

With ``--wakeups``, one side's engine stops at a random point of each request: it polls no more, and only reads
``released``, so that its endpoint's thread must do the rest. A request counts from when both sides have opened the room
until both engines have seen the release.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from attrs import frozen

from bench.machine import Machine, commit
from bench.ranks import GRACE_S, ROLES, Ranks
from disagg_kv.errors import ConfigurationError, DisaggKVError, IntegrityError
from disagg_kv.ids import Role

from .step_rank import TIMEOUT_S, Ask, Cache, Load, Seen, Setup
from .tables import table

ROOT = Path(__file__).parents[1]
LOADS: Mapping[str, Load] = {
    "waiting": Load("waiting", 0.0, 20e-6),
    "python-0.3": Load("0.3 ms of Python", 0.0003, 0.0),
    "python-8": Load("8 ms of Python", 0.008, 0.0),
    "forward": Load("1 ms of Python, 10 ms without the lock", 0.001, 0.010),
}
PATHS, CHANNELS = ("mapped", "staged"), ("unix", "zmq")
WARM = 5
"""Requests of each row and library that are not measured."""
CALIBRATED = 20
"""Requests whose median duration bounds the point at which an engine stops."""
DRAWS = 2000
"""Of the bootstrap."""
SEED = 7

Found = dict[str, Any]
Floats = npt.NDArray[np.float64]


@frozen
class Moved:
    """One request; seconds.

    Args:
        released: from ``send_chunk`` until decode's engine saw the room released.
        known: until decode's endpoint knew the outcome.
        whole: from when both sides had opened the room until both engines had seen the release.
        prefill_call, decode_call: the longest call of each side's engine.
    """

    released: float
    known: float
    whole: float
    prefill_call: float
    decode_call: float

    @classmethod
    def of(cls, sent: Seen, came: Seen) -> Moved:
        """From what both sides saw."""
        whole = max(sent.released, came.released) - max(sent.opened, came.opened)
        times = came.released - sent.sent, came.known - sent.sent
        return cls(*times, whole, sent.longest_s, came.longest_s)


class Pair:
    """The two processes that serve the rows of one path and channel with one library."""

    def __init__(self, library: str, prefill: Ranks, decode: Ranks) -> None:
        self.library = library
        self._prefill, self._decode = prefill, decode
        self._rooms = 0

    def request(self, load: Load, lags: Sequence[float] = (0.0, 0.0), stops: Sequence[float] = (inf, inf)) -> Moved:
        """Move one request, and compare its bytes; lags and stops are of prefill and of decode.

        Raises:
            IntegrityError: bytes are wrong.
            DisaggKVError: a request failed, or a process has ended or does not answer.
        """
        self._rooms += 1
        asks = [Ask(f"{self._rooms}", load, lag, stop) for lag, stop in zip(lags, stops, strict=True)]
        self._decode.ask(type(None), "poison")
        self._decode.tell("move", asks[1])
        self._prefill.tell("move", asks[0])
        (sent,), (came,) = self._prefill.answers(Seen), self._decode.answers(Seen)
        (bad,) = self._decode.ask(int, "wrong")
        if bad:
            raise IntegrityError(f"{self.library}, {load.name}: {bad:,} bytes are wrong; nothing is measured")
        return Moved.of(sent, came)


@contextmanager
def started(library: str, source: Path, path: str, channel: str, cache: Cache) -> Iterator[Pair]:
    """A prefill and a decode process with the library of a checkout; none is left afterwards.

    Args:
        library: its name in the result.
        source: its ``src`` folder.
        path: the strategy of both.
        channel: ``"unix"`` or ``"zmq"``.
        cache: what a request moves.

    Raises:
        ConfigurationError: the processes import another library.
        DisaggKVError: one of them cannot begin.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-kv-step-"))
        stack.callback(_end, processes)

        def begin(role: Role) -> Ranks:
            ours, theirs = multiprocessing.Pipe()
            stack.callback(ours.close)
            code = f"from benchmarks.step_rank import main; main({theirs.fileno()})"
            environ = {**os.environ, "PYTHONPATH": str(source)}
            processes.append(
                subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, pass_fds=[theirs.fileno()])
            )
            theirs.close()
            ours.send(Setup(role, path, channel, folder, cache))
            return Ranks(role, [ours], TIMEOUT_S)

        prefill, decode = (begin(role) for role in ROLES)
        for (where,) in (prefill.answers(str), decode.answers(str)):
            if Path(where).resolve() != source.resolve():
                raise ConfigurationError(f"{library}: the library of {where} is used, not that of {source}")
        yield Pair(library, prefill, decode)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Their pipes are closed."""
    until = time.monotonic() + GRACE_S
    for one in processes:
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


@frozen
class Plan:
    """What is measured.

    Args:
        libraries: ``src`` folders by name, this checkout's first.
        loads: keys of :data:`LOADS`.
        paths, channels: of which all combinations are measured.
        cache: what a request moves.
        repeats: requests of each row and library.
        said: called with a line after each row.
    """

    libraries: Mapping[str, Path]
    loads: Sequence[str]
    paths: Sequence[str]
    channels: Sequence[str]
    cache: Cache
    repeats: int
    said: Callable[[str], None]

    def places(self) -> Iterator[tuple[str, str, list[Pair]]]:
        """Each path with each channel, and the pairs of processes of all libraries."""
        for path in self.paths:
            for channel in self.channels:
                with ExitStack() as stack:
                    some = [
                        stack.enter_context(started(name, source, path, channel, self.cache))
                        for name, source in self.libraries.items()
                    ]
                    yield path, channel, some


def in_turns(pairs: Sequence[Pair], number: int) -> Sequence[Pair]:
    """All pairs, in an order that rotates from one repetition to the next."""
    first = number % len(pairs)
    return [*pairs[first:], *pairs[:first]]


def rows(plan: Plan) -> list[Found]:
    """Every load over every path and channel."""
    found: list[Found] = []
    for path, channel, pairs in plan.places():
        for key in plan.loads:
            load = LOADS[key]
            samples = _measured(pairs, load, plan.repeats)
            found.append({"load": load.name, "path": path, "channel": channel, **_figures(samples)})
            plan.said(f"{load.name}, {path}, {channel}")
    return found


def _measured(pairs: Sequence[Pair], load: Load, repeats: int) -> Mapping[str, list[Moved]]:
    rng = np.random.default_rng(SEED)
    samples: dict[str, list[Moved]] = {pair.library: [] for pair in pairs}
    for number in range(-WARM, repeats):
        lags = rng.uniform(0.0, load.python_s + load.sleep_s, size=2).tolist()
        for pair in in_turns(pairs, number):
            moved = pair.request(load, lags)
            if number >= 0:
                samples[pair.library].append(moved)
    return samples


def _figures(samples: Mapping[str, Sequence[Moved]]) -> Found:
    """Of each library; and of the first over the second, ratios."""
    libraries = {name: _of_library(some) for name, some in samples.items()}
    if len(samples) == 1:
        return {"libraries": libraries}
    mine, base = (np.array([moved.released for moved in some]) for some in samples.values())
    ratios = {name: compared(mine, base, percent) for name, percent in (("p50", 50), ("p95", 95))}
    return {"libraries": libraries, "ratios": ratios}


def _of_library(some: Sequence[Moved]) -> Found:
    found: Found = {}
    for name, seconds in (
        ("released_s", [moved.released for moved in some]),
        ("known_s", [moved.known for moved in some]),
        ("prefill_call_s", [moved.prefill_call for moved in some]),
        ("decode_call_s", [moved.decode_call for moved in some]),
    ):
        p50, p95, most = np.percentile(seconds, [50, 95, 100]).tolist()
        found[name] = {"p50": p50, "p95": p95, "max": most}
    return found


def compared(mine: Floats, base: Floats, percent: float) -> dict[str, float]:
    """The ratio of a percentile, and its 95 % interval over repetitions that are drawn again, for both alike."""
    rng, count = np.random.default_rng(SEED), len(mine)
    drawn = np.vstack([np.arange(count), rng.integers(count, size=(DRAWS, count))])
    ratios = np.percentile(mine[drawn], percent, axis=1) / np.percentile(base[drawn], percent, axis=1)
    low, high = np.percentile(ratios[1:], [2.5, 97.5])
    return {"ratio": float(ratios[0]), "low": float(low), "high": float(high)}


def wakeups(plan: Plan) -> list[Found]:
    """Requests of which one side's engine stops, over every path and channel."""
    found: list[Found] = []
    for path, channel, pairs in plan.places():
        rng = np.random.default_rng(SEED)
        load = LOADS["waiting"]
        whole: dict[str, list[float]] = {pair.library: [] for pair in pairs}
        longest = {pair.library: _typical(pair, load) for pair in pairs}
        points: list[tuple[str, float]] = []
        for number in range(plan.repeats):
            stopped, share = int(rng.integers(2)), float(rng.uniform())
            points.append((ROLES[stopped], share))
            for pair in in_turns(pairs, number):
                stops = [share * longest[pair.library] if side == stopped else inf for side in range(2)]
                whole[pair.library].append(pair.request(load, stops=stops).whole)
        libraries = {name: _stopped(seconds, points) for name, seconds in whole.items()}
        found.append({"path": path, "channel": channel, "libraries": libraries})
        plan.said(f"{path}, {channel}")
    return found


def _typical(pair: Pair, load: Load) -> float:
    """Seconds of a request whose engines go on."""
    for _ in range(WARM):
        pair.request(load)
    return float(np.median([pair.request(load).whole for _ in range(CALIBRATED)]))


def _stopped(seconds: Sequence[float], points: Sequence[tuple[str, float]]) -> Found:
    p50, p99, most = np.percentile(seconds, [50, 99, 100]).tolist()
    side, share = points[int(np.argmax(seconds))]
    return {"p50_s": p50, "p99_s": p99, "max_s": most, "max_over_p50": most / p50, "max_at": {side: round(share, 3)}}


def document(plan: Plan, kind: str, found: Sequence[Found]) -> Found:
    """The result; seconds everywhere."""
    return {
        "command": " ".join(["python -m benchmarks.step", *sys.argv[1:]]),
        "machine": attrs.asdict(Machine.here()),
        "libraries": {name: commit(source / "disagg_kv" / "__init__.py") for name, source in plan.libraries.items()},
        "request": {**attrs.asdict(plan.cache), "bytes": plan.cache.nbytes},
        "repeats": plan.repeats,
        kind: list(found),
    }


def shown(found: Found) -> str:
    """The result as a table."""
    cells = _wakeup_cells(found["wakeups"]) if "wakeups" in found else _row_cells(found["rows"])
    request, machine = found["request"], found["machine"]
    said = (
        f"{found['repeats']} requests of {request['bytes'] / (1 << 20):.1f} MiB for each row; every byte was right.\n"
        f"{machine['cpu']}, {machine['cores']} cores; "
        + ", ".join(f"{name}: commit {of}" for name, of in found["libraries"].items())
    )
    return f"{table(cells)}\n\n{said}"


def _row_cells(some: Sequence[Found]) -> Iterator[list[str]]:
    libraries = list(some[0]["libraries"])
    yield [
        "between two polls",
        "path",
        "channel",
        *(f"{name}: ms, p50 / p95 / max" for name in libraries),
        *(["p50, ratio", "p95, ratio"] if len(libraries) == 2 else []),
        *(f"{name}: known, ms, p50" for name in libraries),
        *(f"{name}: longest call, us, p50 / p95, prefill; decode" for name in libraries),
    ]
    for row in some:
        each = list(row["libraries"].values())
        yield [
            row["load"],
            row["path"],
            row["channel"],
            *(" / ".join(f"{of['released_s'][name] * 1e3:.2f}" for name in ("p50", "p95", "max")) for of in each),
            *(f"{of['ratio']:.3f} ({of['low']:.3f} to {of['high']:.3f})" for of in row.get("ratios", {}).values()),
            *(f"{of['known_s']['p50'] * 1e3:.2f}" for of in each),
            *("; ".join(_us(of[side]) for side in ("prefill_call_s", "decode_call_s")) for of in each),
        ]


def _us(of: Mapping[str, float]) -> str:
    return f"{of['p50'] * 1e6:,.0f} / {of['p95'] * 1e6:,.0f}"


def _wakeup_cells(some: Sequence[Found]) -> Iterator[list[str]]:
    yield ["path", "channel", "library", "ms, p50", "p99", "largest", "largest over p50", "stopped"]
    for row in some:
        for name, of in row["libraries"].items():
            ((side, share),) = of["max_at"].items()
            times = (f"{of[key] * 1e3:.2f}" for key in ("p50_s", "p99_s", "max_s"))
            yield [row["path"], row["channel"], name, *times, f"{of['max_over_p50']:.1f}", f"{side} at {share:.0%}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="requests between engines that make steps")
    parser.add_argument("--other", type=Path, metavar="SRC", help="the src folder of another checkout of the library")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes, too")
    parser.add_argument("--wakeups", type=int, metavar="N", help="N requests, of which one engine stops polling")
    parser.add_argument("--repeats", type=int, default=100, help="measured requests of each row")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--paths", nargs="+", default=list(PATHS))
    parser.add_argument("--channels", nargs="+", choices=CHANNELS, default=list(CHANNELS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args(argv)
    libraries = {"this": ROOT / "src"}
    if given.other is not None:
        if not (given.other / "disagg_kv" / "__init__.py").is_file():
            parser.error(f"--other {given.other}: there is no disagg_kv in it")
        libraries["other"] = given.other
    repeats = given.repeats if given.wakeups is None else given.wakeups
    if repeats < 1:
        parser.error(f"{repeats} requests: at least one")
    plan = Plan(
        libraries,
        given.loads,
        given.paths,
        given.channels,
        Cache(layers=given.layers, tokens=given.tokens),
        repeats,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    try:
        kind, some = ("rows", rows(plan)) if given.wakeups is None else ("wakeups", wakeups(plan))
    except DisaggKVError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    found = document(plan, kind, some)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(shown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
