"""Every knob of the idle policy against the policy without it: in turns, with idle and with busy engine threads.

One prefill rank sends to one decode rank, each in a process of its own. Each has an endpoint per variant: the policy as
it is, twice, and the policy without one knob or without several. In each round every variant moves every load once, in
another order each time. The bytes of a large transfer are compared first.

Loads: ``small`` is a room of 64 tokens, ``large`` one of 1,024 in 16 segments, ``many`` 16 rooms of 64 tokens at once.
``pass`` is a room of 64 tokens whose layers a forward pass computes one by one; its time begins with the last layer. A
busy engine thread runs Python code between two polls, as with ``python -m bench transfer --busy``.

Per variant the result has ratios: without the knob over the policy as it is, of the median and the 95th percentile of
the transfers' times, of the throughput (bytes over all times), and of the processor time of both endpoints' threads.
``idle_cpu`` is the latter while a room is open and its rows are not there yet. Each ratio has a 95 % bootstrap interval
over rounds. "as it is, again" shows how far equal things differ.

    python -m benchmarks.idle --json benchmarks/results/idle.json

Cases of CPU memory run side by side (``-j``), then those of GPUs alone: work on other cores keeps a host from halting
them, and hides the cost of a late wake.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from bench.data import fill, page_ids, poison, wrong
from bench.engine import BUSY_S, LOOK_S, between_polls, run_python, wait_until
from bench.machine import Machine
from bench.rank import attend
from bench.ranks import Ranks, running
from bench.shape import TransferShape
from benchmarks.gpu_transfer import said
from disagg_kv import (
    CacheSpec,
    DecodeEndpoint,
    Expectation,
    GroupId,
    PagedPool,
    PageTable,
    PrefillEndpoint,
    Source,
    shard,
)
from disagg_kv.channels import Channel, UnixChannel, ZmqChannel
from disagg_kv.core import Options, Phase
from disagg_kv.endpoints.loop import event_loop
from disagg_kv.endpoints.loop.timing import SHORTEST_PAUSE_S, IdlePolicy
from disagg_kv.ids import LayerId, Role, RoomId
from disagg_kv.rendezvous import StaticRendezvous
from disagg_kv.transports import between_processes

AS_IT_IS, AGAIN = "as it is", "as it is, again"
KNOBS = ("growing pauses", "short pauses", "pause of a pass")
"""On every wire, and with every channel."""

ROOT = Path(__file__).parents[1]
KV = GroupId("kv")
PAGE, PAGES, LAYERS = 64, 16, 4
SEGMENT = 1 << 20
"""Bytes of a page, and of a slot."""
COMPUTE_S = 0.008
"""Of the forward pass of the load ``pass``."""
SETTLE_S, IDLE_S, IDLE_EVERY = 0.1, 2.0, 8
"""Every so many rounds, rooms wait for their rows: seconds until that is measured, and seconds of it."""
DRAWS = 1000
"""Of the bootstrap."""
TIMEOUT_S = 60.0
LOADS: Mapping[str, tuple[int, int]] = {"small": (1, 1), "large": (1, PAGES), "many": (PAGES, 1), "pass": (1, 1)}
"""Rooms, and pages of each."""

Floats = npt.NDArray[np.float64]


@frozen
class Case:
    """Between whom: a transport, where the memory lies, and the channel."""

    transport: str
    device: str
    channel: str

    def __str__(self) -> str:
        return f"{self.transport} {self.device} {self.channel}"

    @property
    def variants(self) -> Mapping[str, frozenset[str]]:
        """By name: which knobs are off."""
        nothing: frozenset[str] = frozenset()
        return {AS_IT_IS: nothing, AGAIN: nothing, **{knob: frozenset({knob}) for knob in KNOBS}}


class Without(IdlePolicy):
    """The policy with some knobs off."""

    def __init__(self, off: frozenset[str], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._off = off
        if "growing pauses" in off:
            self._longest = SHORTEST_PAUSE_S

    def rest(self, now: float, timeout_s: float, *, busy: bool, in_pass_s: float) -> float:
        """See the policy."""
        if "pause of a pass" in self._off:
            in_pass_s = 0.0
        if "short pauses" in self._off:
            self._polls_since = -inf
        return super().rest(now, timeout_s, busy=busy, in_pass_s=in_pass_s)


@contextmanager
def policy(off: frozenset[str]) -> Iterator[None]:
    """Endpoints that are made meanwhile have the policy with some knobs off."""
    names = vars(event_loop)
    names["IdlePolicy"] = partial(Without, off)
    try:
        yield
    finally:
        names["IdlePolicy"] = IdlePolicy


@frozen
class Setup:
    """A rank: of which case, which side, where the sockets are, and where its memory lies."""

    case: Case
    role: Role
    folder: str
    device: str

    def address(self, role: Role, variant: str) -> str:
        """Of an endpoint."""
        number = list(self.case.variants).index(variant)
        return f"{'unix' if self.case.channel == 'unix' else 'ipc'}://{self.folder}/{role}-{number}"

    def channel(self, variant: str) -> Channel:
        """Of an endpoint of this rank."""
        address = self.address(self.role, variant)
        return UnixChannel(address) if self.case.channel == "unix" else ZmqChannel(address)


class Rank:
    """An endpoint per variant; its process's first thread is the engine's."""

    polls = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._shape = TransferShape(
            transport=setup.case.transport, prefill_tp=1, tokens=PAGE * PAGES, layers=LAYERS, page_size=PAGE
        )
        self._ids = page_ids(self._shape, setup.role, 0)
        self._pools: dict[str, PagedPool] = {}
        self._ends: dict[str, PrefillEndpoint | DecodeEndpoint] = {}
        for variant, off in setup.case.variants.items():
            with policy(off):
                self._ends[variant] = self._endpoint(variant)
        self._handles: dict[str, list[Any]] = {}
        self._before: dict[str, float] = {}

    def _endpoint(self, variant: str) -> PrefillEndpoint | DecodeEndpoint:
        setup = self._setup
        carrier = between_processes(setup.case.transport, setup.device)
        spec = CacheSpec.kv(LAYERS, self._shape.kv_heads, self._shape.head_dim, self._shape.dtype)
        pool = self._pools[variant] = PagedPool.allocate(
            spec,
            shard(spec),
            pages=PAGES + 2,
            page_size=PAGE,
            allocator=carrier.allocator,
            device=setup.device,
        )
        roles: tuple[Role, Role] = ("prefill", "decode")
        where = StaticRendezvous({role: [setup.address(role, variant)] for role in roles})
        options = Options(silence_s=TIMEOUT_S, total_s=TIMEOUT_S)
        channel = setup.channel(variant)
        if setup.role == "decode":
            poison(pool)
            ring = 2 * PAGES * SEGMENT
            return DecodeEndpoint(
                pool, transport=carrier, channel=channel, rendezvous=where, instance="decode", ring_bytes=ring,
                options=options, strategy="staged",
            )  # fmt: skip
        fill(pool, self._shape, self._ids)
        return PrefillEndpoint(
            pool, transport=carrier, channel=channel, rendezvous=where, instance="prefill", slot_bytes=SEGMENT,
            slots=8, options=options, strategy="staged+layer_pipelined",
        )  # fmt: skip

    def wrong(self, variant: str) -> int:
        """Bytes of a pool that are not as they must be."""
        return wrong(self._pools[variant], self._shape, self._ids)

    def prepare(self, variant: str, load: str, number: int) -> None:
        """Open the rooms; prefill: wait until decode awaits them."""
        rooms, pages = LOADS[load]
        end, names = self._ends[variant], [RoomId(f"{load} {number} {at}".encode()) for at in range(rooms)]
        if isinstance(end, DecodeEndpoint):
            receptions = [end.open(name, Source("prefill")) for name in names]
            for reception, table in zip(receptions, self._tables(load), strict=True):
                reception.expect(Expectation(pages * PAGE, [table]))
            handles: list[Any] = [*receptions]
        else:
            handles = [end.open(name) for name in names]
            _until_all(end, handles, lambda handle: handle.held is not None)
        self._handles[variant] = handles
        self._before[variant] = self._spent(variant)

    def move(self, variant: str, load: str, busy: bool) -> tuple[float, float]:
        """Move them: when it began, or ended; and the processor time of the endpoint's thread."""
        end, handles = self._ends[variant], self._handles[variant]
        at = time.monotonic()
        if isinstance(end, PrefillEndpoint):
            rows = LOADS[load][1] * PAGE
            if load == "pass":
                at = self._pass(end, handles[0], busy)
            else:
                for handle, table in zip(handles, self._tables(load), strict=True):
                    handle.send_chunk(rows, [table])
            for handle in handles:
                handle.finish(rows)
        else:
            _until_all(end, handles, lambda handle: handle.phase is Phase.DONE, busy=busy)
            at = max(handle.report.ended for handle in handles)
        _until_all(end, handles, lambda handle: bool(handle.released), busy=busy)
        return at, self._spent(variant) - self._before[variant]

    def _tables(self, load: str) -> list[PageTable]:
        rooms, pages = LOADS[load]
        return [PageTable(KV, self._ids[at * pages : (at + 1) * pages]) for at in range(rooms)]

    def _pass(self, end: PrefillEndpoint, handle: Any, busy: bool) -> float:
        """A forward pass over one page that computes nothing; when its last layer was there."""
        step = end.step({handle.room: (PAGE, self._tables("pass"))})
        began = time.monotonic()
        for layer in range(LAYERS):
            until = began + COMPUTE_S * (layer + 1) / LAYERS
            while (left := until - time.monotonic()) > 0:
                if busy:
                    run_python(min(left, BUSY_S))
                    time.sleep(0)
                else:
                    time.sleep(left)
            at = time.monotonic()
            step.layer_ready(LayerId(layer))
        step.close()
        return at

    def spent(self) -> dict[str, float]:
        """Processor time of each endpoint's thread, in seconds."""
        return {variant: self._spent(variant) for variant in self._ends}

    def _spent(self, variant: str) -> float:
        thread = self._ends[variant].driver._thread
        assert thread is not None
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def abort(self) -> None:
        """End what was prepared and is not moved."""
        for handles in self._handles.values():
            for handle in handles:
                handle.abort("nothing is sent")

    def idle(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End all endpoints."""
        for end in self._ends.values():
            end.close(1.0)


def serve(pipe: Connection, setup: Setup) -> None:
    """Be a rank until the pipe is closed."""
    attend(pipe, setup.device, lambda: Rank(setup))


def _until_all(
    end: PrefillEndpoint | DecodeEndpoint, handles: Sequence[Any], good: Callable[[Any], bool], *, busy: bool = False
) -> None:
    for handle in handles:
        wait_until(end.poll, partial(good, handle), handle, TIMEOUT_S, between_polls(busy=busy, pause_s=LOOK_S))


@define
class Samples:
    """Of one variant, load and mode: seconds, and processor seconds of both endpoints' threads; one per round."""

    seconds: list[float] = field(factory=list)
    cpu: list[float] = field(factory=list)


def measure(case: Case, seconds: float, rounds: int | None) -> dict[str, Any]:
    """Ratios of each variant over the policy as it is, for so many rounds or seconds."""
    devices = ["cpu", "cpu"]
    if case.device == "cuda":
        devices = ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"]
    roles: tuple[Role, Role] = ("prefill", "decode")
    with tempfile.TemporaryDirectory(prefix="disagg-kv-idle-") as folder:
        setups = {role: [Setup(case, role, folder, device)] for role, device in zip(roles, devices, strict=True)}
        with running(serve, setups, 2 * TIMEOUT_S, threads=False) as (prefill, decode):
            turns = Turns(prefill, decode, list(case.variants))
            turns.check()
            until = time.monotonic() + seconds
            while turns.number < rounds if rounds else time.monotonic() < until:
                turns.round()
    return {"case": attrs.asdict(case), "rounds": turns.number, "variants": turns.ratios()}


class Turns:
    """Rounds in which every variant has its turns."""

    def __init__(self, prefill: Ranks, decode: Ranks, variants: Sequence[str]) -> None:
        self._prefill, self._decode = prefill, decode
        self._variants = variants
        self._rng = np.random.default_rng(7)
        self._rooms = 0
        self._moved: dict[tuple[str, str, bool], Samples] = defaultdict(Samples)
        self._idle: dict[str, list[float]] = defaultdict(list)
        self.number = 0

    def check(self) -> None:
        """Move once, and compare the bytes of all pages."""
        for variant in self._variants:
            for load in LOADS:
                self._move(variant, load, False)
            (bad,) = self._decode.ask(int, "wrong", variant)
            if bad:
                raise SystemExit(f"{variant}: {bad} bytes are wrong")

    def round(self) -> None:
        """Every load, idle and busy, with every variant, in another order each time; now and then an idle room."""
        if self.number % IDLE_EVERY == 0:
            self._rest()
        for load, busy in product(LOADS, (False, True)):
            for variant in self._rng.permutation(self._variants):
                taken, cpu = self._move(str(variant), load, busy)
                samples = self._moved[str(variant), load, busy]
                samples.seconds.append(taken)
                samples.cpu.append(cpu)
        self.number += 1

    def _prepare(self, variant: str, load: str) -> None:
        self._rooms += 1
        for ranks in (self._decode, self._prefill):
            ranks.ask(type(None), "prepare", variant, load, self._rooms)

    def _move(self, variant: str, load: str, busy: bool) -> tuple[float, float]:
        self._prepare(variant, load)
        for ranks in (self._decode, self._prefill):
            ranks.tell("move", variant, load, busy)
        ((began, sent_s),) = self._prefill.answers(tuple)
        ((ended, received_s),) = self._decode.answers(tuple)
        return ended - began, sent_s + received_s

    def _rest(self) -> None:
        """Rooms that wait for rows: what the endpoints' threads take."""
        for variant in self._variants:
            self._prepare(variant, "small")
        time.sleep(SETTLE_S)
        before = self._spent()
        time.sleep(IDLE_S)
        after = self._spent()
        for variant in self._variants:
            self._idle[variant].append((after[variant] - before[variant]) / IDLE_S)
        for ranks in (self._decode, self._prefill):
            ranks.ask(type(None), "abort")

    def _spent(self) -> Mapping[str, float]:
        (sent,), (received,) = (ranks.ask(dict, "spent") for ranks in (self._prefill, self._decode))
        return {variant: sent[variant] + received[variant] for variant in self._variants}

    def ratios(self) -> dict[str, Any]:
        """Per variant: of idle rooms; then per mode, the geometric mean over all loads; and what each load took."""
        found: dict[str, Any] = {}
        for variant in self._variants:
            idle = self._compare([(self._idle[variant], self._idle[AS_IT_IS])], np.median)
            found[variant] = {"idle_cpu": {"share": round(statistics.median(self._idle[variant]), 5), **idle}}
            for mode, busy in (("idle", False), ("busy", True)):
                both = [[self._moved[name, load, busy] for name in (variant, AS_IT_IS)] for load in LOADS]
                found[variant][f"all, {mode}"] = self._ratios(both)
                found[variant][f"p50_ms, {mode}"] = {
                    load: round(statistics.median(mine.seconds) * 1e3, 3)
                    for load, (mine, _) in zip(LOADS, both, strict=True)
                }
        return found

    def _ratios(self, both: Sequence[Sequence[Samples]]) -> dict[str, dict[str, float]]:
        seconds = [(mine.seconds, base.seconds) for mine, base in both]
        return {
            "p50": self._compare(seconds, np.median),
            "p95": self._compare(seconds, _p95),
            "throughput": self._compare([(base, mine) for mine, base in seconds], np.mean),
            "cpu": self._compare([(mine.cpu, base.cpu) for mine, base in both], np.median),
        }

    def _compare(
        self, both: Sequence[tuple[Sequence[float], Sequence[float]]], of: Callable[..., Any]
    ) -> dict[str, float]:
        """The mean ratio of a figure, and its 95 % interval over rounds that are drawn again, for all alike."""
        rounds = len(both[0][0])
        drawn = np.vstack([np.arange(rounds), self._rng.integers(rounds, size=(DRAWS, rounds))])
        logs = [
            np.log(of(np.asarray(mine)[drawn], axis=1) / of(np.asarray(base)[drawn], axis=1)) for mine, base in both
        ]
        ratios = np.exp(np.mean(logs, axis=0))
        low, high = np.percentile(ratios[1:], [2.5, 97.5])
        return {"ratio": round(float(ratios[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def _p95(values: Floats, axis: int) -> Any:
    return np.percentile(values, 95, axis=axis)


def cases(named: Sequence[str]) -> list[Case]:
    """Those that this machine has, or those that are named."""
    every = [Case(name, "cpu", "unix") for name in ("shm", "nixl", "mooncake")] + [Case("shm", "cpu", "zmq")]
    if torch.cuda.device_count():
        every += [Case("cuda_ipc", "cuda", channel) for channel in ("unix", "zmq")] + [Case("nixl", "cuda", "unix")]
    return [case for case in every if not named or str(case) in named]


def apart(case: Case, seconds: float, rounds: int | None) -> dict[str, Any]:
    """Measure a case in a process of its own, which begins with no GPU and no thread."""
    command = [sys.executable, "-m", "benchmarks.idle", "--only", str(case), "--seconds", str(seconds)]
    if rounds:
        command += ["--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        print(f"{case}: failed\n{done.stderr}", file=sys.stderr, flush=True)
        return {"case": attrs.asdict(case), "error": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{case}: {found['rounds']} rounds", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser(description="the idle policy without each of its knobs")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--cases", nargs="*", default=[], help="such as 'shm cpu unix'; default: all that can")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the whole measurement")
    parser.add_argument("--rounds", type=int, help="in place of seconds")
    parser.add_argument("-j", type=int, default=1, help="cases of CPU memory that run at a time")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        (case,) = cases([given.only])
        json.dump(measure(case, given.seconds, given.rounds), sys.stdout)
        return 0
    named = cases(given.cases)
    of_cpu, of_gpu = ([case for case in named if (case.device == "cuda") is gpu] for gpu in (False, True))
    run = partial(apart, seconds=given.seconds / (-(-len(of_cpu) // given.j) + len(of_gpu)), rounds=given.rounds)
    with ThreadPoolExecutor(given.j) as pool:
        found = list(pool.map(run, of_cpu))
    found += map(run, of_gpu)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "commit": given.commit,
        "machine": attrs.asdict(Machine.here()),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())],
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cases": found,
    }
    # What has no parts is a line.
    text = (
        re.sub(r"\{\s+([^{}]*?)\s+\}", lambda m: f"{{{' '.join(m[1].split())}}}", json.dumps(document, indent=1)) + "\n"
    )
    if given.json:
        given.json.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
