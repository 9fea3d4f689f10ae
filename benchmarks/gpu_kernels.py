"""Gather, scatter, copy and checksum on a GPU against a plain device copy of as many bytes; prints one JSON document.

A gather or copy may convert: it reads bfloat16 and writes float8 with scales that are given per head, or computed per
token and head and written too. Its ``share`` compares bytes read and written per second with those of the plain copy.
A copy goes from pages to pages of another pool on the same GPU: see ``benchmarks/gpu_peer.py`` for those of a peer.

48 layers, 8 heads of 128, K and V, pages in shuffled order. What each rank of the named tensor-parallel sizes does is
one call. The bytes are checked against the reference before anything is timed. ``device_us`` is per call over calls
that were all queued before the GPU began the first, event to event; copies of the same bytes are timed in turn with
them, and ``share`` is their time over ours: medians. A copy writes as much as it reads, and so do gather and scatter; a
checksum only reads, so its ``GB_per_s`` counts the bytes once and its share may exceed 1. ``host_us`` is what the call
takes on the host while the GPU is idle, ``host_new_us`` the same where no segment had as many tokens before,
``latency_us`` from the call to the end of its event as the host sees it.

    python benchmarks/gpu_kernels.py > benchmarks/results/h200_kernels.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import numpy as np
import torch
import triton
from attrs import evolve, frozen

from bench.timing import Queued as Sleeping
from disagg_kv.geometry import CacheSpec, PageTable, shard
from disagg_kv.ids import GroupId
from disagg_kv.kernels import Checksums, Move, PageMove, Pages, ReferenceKernels
from disagg_kv.kernels.convert.kinds import TUNED, kinds_of, op_of, split_copies
from disagg_kv.kernels.convert.launch import beside, in_turn
from disagg_kv.kernels.cuda_queue import Mark
from disagg_kv.kernels.tensors import tensor_of
from disagg_kv.kernels.triton_copy_launch import CopyLauncher
from disagg_kv.kernels.triton_kernels import OPS, Tuning
from disagg_kv.kernels.triton_launch import Launcher, PreparedLaunch
from disagg_kv.kernels.triton_sums import ChecksumLauncher
from disagg_kv.memory import Buffer, ConvertedPool, Event, Layout, MemoryPool, PagedPool
from disagg_kv.planning import PageCopy, StagedLayout

KV = GroupId("kv")
HEADS, DIM = 8, 128
QUEUED, ROUNDS = 8, 7
ASLEEP_S = 2e-3
"""How long the GPU sleeps at first while calls are queued."""


@frozen
class Case:
    """One call of one rank.

    Args:
        op: ``"gather"``, ``"scatter"``, ``"copy"`` or ``"checksum"``, which reads what a gather of the case reads.
        dtype: of the cache.
        tp: sizes on both sides, as in ``"4->1"``.
        heads: that the rank's pool has.
        parts: peers that a call serves; each gets or gives an equal share of the heads.
        page_size: tokens.
        tokens: of the call.
        layout: of the pool.
        into: the dtype into which a gather or copy converts, if it does.
        computed: its scales are computed, else given per head.
    """

    op: str
    dtype: str
    tp: str
    heads: int
    parts: int
    page_size: int = 64
    tokens: int = 8192
    layout: Layout = "NHD"
    into: str = ""
    computed: bool = False


CASES = [
    Case("gather", "bfloat16", "4->1", 2, 1),
    Case("scatter", "bfloat16", "4->1", 8, 4),
    Case("gather", "bfloat16", "2->4", 4, 2),
    Case("scatter", "bfloat16", "2->4", 2, 1),
    Case("gather", "bfloat16", "1->4", 8, 4),
    Case("gather", "float8_e4m3fn", "8->1", 1, 1),
    Case("scatter", "float8_e4m3fn", "8->1", 8, 8),
    Case("gather", "float8_e4m3fn", "1->8", 8, 8),
    Case("gather", "bfloat16", "4->1", 2, 1, page_size=1),
    Case("scatter", "bfloat16", "4->1", 8, 4, page_size=1),
    Case("gather", "bfloat16", "4->1", 2, 1, layout="HND"),
    Case("scatter", "bfloat16", "4->1", 8, 4, layout="HND"),
    Case("gather", "bfloat16", "4->1", 2, 1, tokens=1024),
    Case("scatter", "bfloat16", "4->1", 8, 4, tokens=1024),
    Case("checksum", "bfloat16", "4->1", 2, 1),
    Case("checksum", "bfloat16", "1->4", 8, 4),
    Case("checksum", "float8_e4m3fn", "1->8", 8, 8),
    Case("checksum", "bfloat16", "4->1", 2, 1, page_size=1),
    Case("checksum", "bfloat16", "4->1", 2, 1, tokens=1024),
    Case("gather", "bfloat16", "4->1", 2, 1, into="float8_e4m3fn"),
    Case("gather", "bfloat16", "1->4", 8, 4, into="float8_e4m3fn"),
    Case("gather", "bfloat16", "4->1", 2, 1, into="float8_e5m2"),
    Case("gather", "bfloat16", "4->1", 2, 1, into="float8_e4m3fn", computed=True),
    Case("gather", "bfloat16", "1->4", 8, 4, into="float8_e4m3fn", computed=True),
    Case("gather", "bfloat16", "4->1", 2, 1, into="float8_e4m3fn", tokens=1024),
    Case("copy", "bfloat16", "4->1", 2, 1),
    Case("copy", "bfloat16", "4->1", 2, 1, into="float8_e4m3fn"),
    Case("copy", "bfloat16", "1->4", 8, 4, into="float8_e4m3fn"),
    Case("copy", "bfloat16", "4->1", 2, 1, into="float8_e4m3fn", computed=True),
    Case("copy", "bfloat16", "1->4", 8, 4, into="float8_e4m3fn", computed=True),
]


class Conversions:
    """Gathers that convert, as the kernels launch them.

    Args:
        tuning: how they are cut.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._of = cache(lambda kind: Launcher(evolve(op_of("gather", kind), tuning=tuning)))

    def __call__(
        self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None = None
    ) -> Event | None:
        """Enqueue them."""
        parts = kinds_of(pool).split(moves)
        return beside([partial(self._of(kind), pool, some, staging) for kind, some, _ in parts], after)


class Copies:
    """Copies from pages to pages, converted where the case says so.

    Args:
        tuning: how they are cut.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._of = cache(lambda kind: CopyLauncher(evolve(op_of("copy", kind), tuning=tuning)))

    def __call__(self, moves: Sequence[PageMove], after: Event | None = None) -> Event | None:
        """Enqueue them."""
        return in_turn([partial(self._of(kind), some) for kind, some in split_copies(moves)], after)


Launch = Launcher | ChecksumLauncher | Conversions | Copies


def read_as(case: Case, pool: PagedPool) -> MemoryPool:
    """The pool that a case reads: converted, where it converts."""
    if not case.into:
        return pool
    spec = pool.site.spec.cast(case.into, computed=case.computed)
    if not case.computed:
        given = [0.5 + 0.25 * head for head in range(case.heads)]
        spec = CacheSpec({layer: [evolve(c, scales=given) for c in cs] for layer, cs in spec.layers.items()})
    return ConvertedPool(pool, spec)


class Bench:
    """One case's memory and calls.

    Args:
        case: what to do.
        layers: of the model.
        device: where.
    """

    def __init__(self, case: Case, layers: int, device: str) -> None:
        self.case = case
        self.device = device
        spec = CacheSpec.kv(layers, case.heads, DIM, case.dtype)
        count = case.tokens // case.page_size + 1
        self.pools = [
            PagedPool.allocate(
                spec, shard(spec), pages=count, page_size=case.page_size, layout=case.layout, allocator=self._noise
            )
            for _ in range(2)
        ]
        self._pages = np.random.default_rng(0).permutation(count)
        self.source = read_as(case, self.pools[0])
        names, planes = self.source.site.spec.names(), self.source.site.planes
        self._order = [i for n in names for i, p in enumerate(planes) if p.component == n]
        self.moves, self.nbytes = self.of(case.tokens)
        self.staging = [self._noise(self.nbytes) for _ in range(2)]
        self.targets = [self._peers(), self._peers()] if case.op == "copy" else []
        self.copies = self.page_moves(self.moves)
        self._sums: list[Checksums] = []

    def of(self, tokens: int) -> tuple[list[Move], int]:
        """The case's moves for its first ``tokens`` tokens, and their bytes."""
        case, planes, site = self.case, len(self._order), self.source.site
        units = case.heads // case.parts
        cells = [site.spec.component(site.planes[i].layer, site.planes[i].component).unit_bytes for i in self._order]
        ends = np.cumsum([0, *cells]) * tokens * units
        part, each = int(ends[-1]), np.zeros(planes, np.int64)
        table = PageTable(KV, self._pages[: -(-tokens // case.page_size)])
        moves = [
            Move(
                StagedLayout(
                    np.array(self._order, np.int32),
                    np.full(planes, i * units, np.int32),
                    np.full(planes, units, np.int32),
                    each,
                    each + tokens,
                    ends[:-1],
                    part,
                ),
                {KV: table},
                i * part,
            )
            for i in range(case.parts)
        ]
        return moves, case.parts * part

    def _peers(self) -> list[PagedPool]:
        """The pools that a copy writes, one for each peer; that of a peer with fewer ranks has more heads."""
        case, spec = self.case, self.source.site.spec
        heads = case.heads * int(case.tp[0]) // int(case.tp[-1])
        layers = {layer: [evolve(c, units=heads, scales=()) for c in cs] for layer, cs in spec.layers.items()}
        wide = CacheSpec(layers)
        count, size = case.tokens // case.page_size + 1, case.page_size
        return [
            PagedPool.allocate(
                wide, shard(wide), pages=count, page_size=size, layout=case.layout, allocator=self._noise
            )
            for _ in range(case.parts)
        ]

    def page_moves(self, moves: Sequence[Move], number: int = 0) -> list[PageMove]:
        """The same from pages to pages; ``number``: of the pools that are written."""
        if not self.targets:
            return []
        made: list[PageMove] = []
        for move, pool in zip(moves, self.targets[number], strict=True):
            there = {(p.layer, p.component): i for i, p in enumerate(pool.site.planes)}
            planes = [self.source.site.planes[i] for i in move.layout.plane.tolist()]
            into = np.array([there[p.layer, p.component] for p in planes], np.int32)
            target = evolve(move.layout, plane=into, first_unit=0 * into)
            (table,) = move.tables.values()
            tables = {KV: PageTable(KV, table.pages[::-1].copy())}
            copy = PageCopy(move.layout, target)
            made.append(PageMove(copy, Pages(self.source, move.tables), Pages(pool, tables)))
        return made

    @property
    def moved(self) -> int:
        """Bytes that a call reads and writes."""
        case = self.case
        read = 2 * len(self.pools[0].site.planes) * case.tokens * case.heads * DIM
        return read + self.nbytes if case.into else (1 if case.op == "checksum" else 2) * self.nbytes

    def _noise(self, nbytes: int) -> Buffer:
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device)
        _finish(self.device)
        return Buffer(memory.data_ptr(), nbytes, str(memory.device), memory)

    def call(
        self,
        launcher: Launch,
        after: Event | None = None,
        *,
        moves: list[Move] | None = None,
        copies: list[PageMove] | None = None,
    ) -> Event | None:
        """Launch the case, or other moves."""
        if isinstance(launcher, Copies):
            return launcher(copies or self.copies, after)
        if not isinstance(launcher, ChecksumLauncher):
            return launcher(self.source, moves or self.moves, self.staging[0], after)
        # As an endpoint would: what is there by now is read, and its arguments' memory is used again.
        for sums in [one for one in self._sums if one.event is None or one.event.query()]:
            sums.read()
            self._sums.remove(sums)
        self._sums.append(launcher(self.pools[0], moves or self.moves, after))
        return self._sums[-1].event

    def halves(self, launcher: Launcher) -> tuple[Callable[[], None], Callable[[], Event | None]]:
        """What does all of the case but its launch, and what launches it then."""
        ready: list[PreparedLaunch] = []

        def prepare() -> None:
            case = self.pools[0], self.moves, self.staging[0]
            moved = self.case.op == "gather"
            prepared = launcher.prepare(*case, moved=moved)
            if prepared is None:
                _finish(self.device)  # earlier launches may still read all the memory that there is for arguments
                prepared = launcher.prepare(*case, moved=moved)
            assert prepared is not None, "nothing to prepare"
            ready.append(prepared)

        return prepare, lambda: ready.pop().launch()

    def check(self, launcher: Launch) -> None:
        """Stop the program where bytes differ from the reference's, moved or not, or sums do."""
        reference = ReferenceKernels()
        if isinstance(launcher, ChecksumLauncher):
            ours = launcher(self.pools[0], self.moves)
            if ours.event is not None:
                ours.event.synchronize()
            theirs = reference.checksum(self.pools[0], self.moves, None)
            if [of.tolist() for of in ours.read()] != [of.tolist() for of in theirs.read()]:
                sys.exit(f"wrong sums: {self.case}")
            return
        if self.case.op == "copy":
            pairs = [(a.buffers[0], b.buffers[0]) for a, b in zip(*self.targets, strict=True)]
        elif self.case.op == "gather":
            pairs = [(self.staging[0], self.staging[1])]
        else:
            pairs = [(self.pools[0].buffers[0], self.pools[1].buffers[0])]
        for ours, theirs in pairs:
            tensor_of(theirs).copy_(tensor_of(ours))
        _finish(self.device)
        if self.case.op == "copy":
            reference.copy(self.page_moves(self.moves, 1), None)
        elif self.case.op == "gather":
            reference.gather(self.source, self.moves, self.staging[1], None)
        else:
            reference.scatter(self.pools[1], self.moves, self.staging[0])
        if any(torch.equal(tensor_of(a), tensor_of(b)) for a, b in pairs):
            sys.exit(f"the check of {self.case} proves nothing")
        event = self.call(launcher)
        if event is not None:
            event.synchronize()
        if not all(torch.equal(tensor_of(a), tensor_of(b)) for a, b in pairs):
            sys.exit(f"wrong bytes: {self.case}")

    def copy(self) -> None:
        """A plain copy of as many bytes."""
        tensor_of(self.staging[1]).copy_(tensor_of(self.staging[0]))


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _queued(run: Callable[[Event | None], Event | None]) -> float:
    """Seconds per call of calls that the GPU has all been given before it begins.

    It sleeps meanwhile. Where that was too short, the calls are made again, behind a sleep of twice the time they took.
    """
    end, asleep_s = torch.cuda.Event(enable_timing=True), ASLEEP_S
    while True:
        begin, started = Sleeping(asleep_s).over, time.perf_counter()
        for event in [run(begin) for _ in range(QUEUED)]:
            if isinstance(event, Mark):
                event.precede(torch.cuda.current_stream().cuda_stream)
        end.record()
        asleep, took = not begin.query(), time.perf_counter() - started
        end.synchronize()
        if asleep:
            return float(begin.elapsed_time(end)) / 1e3 / QUEUED
        asleep_s = 2 * max(asleep_s, took)


def _host(runs: Iterable[Callable[[], Event | None]]) -> tuple[float, float]:
    """Median seconds until a call returns, and until its event is seen to have happened."""
    returned: list[float] = []
    ended: list[float] = []
    for run in runs:
        start = time.perf_counter()
        event = run()
        returned.append(time.perf_counter() - start)
        if event is not None:
            event.synchronize()
        ended.append(time.perf_counter() - start)
    return statistics.median(returned), statistics.median(ended)


def _launcher(case: Case, tuning: Tuning) -> Launch:
    if case.op == "copy":
        return Copies(tuning)
    if case.into:
        return Conversions(tuning)
    op = evolve(OPS[case.op], tuning=tuning)
    return ChecksumLauncher(op) if case.op == "checksum" else Launcher(op)


def _measure(case: Case, layers: int, device: str, tunings: list[Tuning]) -> list[dict[str, object]]:
    bench = Bench(case, layers, device)
    launchers: dict[Tuning, Launch] = {}
    for tuning in tunings or [(TUNED if case.into else {name: op.tuning for name, op in OPS.items()})[case.op]]:
        launchers[tuning] = _launcher(case, tuning)
    for launcher in launchers.values():
        bench.check(launcher)
        for written in (bench.staging[0], *(pool.buffers[0] for pools in bench.targets for pool in pools)):
            tensor_of(written).random_(0, 256)
    results: list[dict[str, object]] = []
    if device == "cpu":
        return results

    def copy(after: Event | None) -> None:
        bench.copy()

    for tuning, launcher in launchers.items():
        call = partial(bench.call, launcher)
        _queued(copy)
        seconds: dict[str, list[float]] = {"copy": [], "ours": []}
        for _ in range(ROUNDS):
            seconds["copy"].append(_queued(copy))
            seconds["ours"].append(_queued(call))
        copied, ours = (statistics.median(seconds[name]) for name in ("copy", "ours"))
        host, latency = _host([call] * 50)
        others = [bench.of(case.tokens - i)[0] for i in range(1, 50)]
        new, _ = _host([partial(call, moves=one, copies=bench.page_moves(one)) for one in others])
        results.append(
            {
                "op": case.op,
                "dtype": case.dtype,
                "into": case.into,
                "computed": case.computed,
                "tp": case.tp,
                "layout": case.layout,
                "page_size": case.page_size,
                "tokens": case.tokens,
                "row_bytes": bench.nbytes // (2 * layers * case.tokens * case.parts),
                "peers": case.parts,
                "bytes": bench.nbytes,
                "copy_GB_per_s": round(2 * bench.nbytes / copied / 1e9),
                "GB_per_s": round(bench.moved / ours / 1e9),
                "share": round(copied / ours * (bench.moved / (2 * bench.nbytes) if case.into else 1), 3),
                "device_us": round(ours * 1e6, 1),
                "host_us": round(host * 1e6, 1),
                "host_new_us": round(new * 1e6, 1),
                "latency_us": round(latency * 1e6, 1),
                "tile_bytes": tuning.tile_bytes,
                "warps": tuning.warps,
                "neighbours_together": tuning.neighbours_together,
                "programs": tuning.programs,
            }
        )
        print(json.dumps(results[-1]), file=sys.stderr)
    return results


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _tunings(op: str, given: argparse.Namespace) -> list[Tuning]:
    """Those that were asked for, as far as they differ for an operation."""
    return [
        Tuning(tile, warps, together, programs)
        for tile in given.tile_bytes or ()
        for warps in given.warps
        for together in ((False,) if op == "copy" else (False, True))
        for programs in (given.programs if op == "copy" else (0,))
    ]


def main() -> None:
    """Print every case."""
    parser = argparse.ArgumentParser(description="gather, scatter, copy and checksum against a device copy")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, help="instead of each case's own")
    parser.add_argument("--device", default="cuda", help="cpu: only checks, with TRITON_INTERPRET=1")
    parser.add_argument("--tile-bytes", type=int, nargs="*", help="instead of the tuned ones")
    parser.add_argument("--warps", type=int, nargs="*", default=[1], help="with --tile-bytes")
    parser.add_argument(
        "--programs", type=float, nargs="*", default=[0.5], help="per multiprocessor, with --tile-bytes"
    )
    parser.add_argument("--case", type=int, nargs="*", default=range(len(CASES)), help="by number; all of them")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    given = parser.parse_args()
    cases = [evolve(c, tokens=given.tokens or c.tokens) for c in (CASES[i] for i in given.case)]
    measured = [
        result for case in cases for result in _measure(case, given.layers, given.device, _tunings(case.op, given))
    ]
    report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": given.commit or _said("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name() if given.device != "cpu" else "none",
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "shape": {"layers": given.layers, "heads": HEADS, "head_dim": DIM, "calls": QUEUED, "rounds": ROUNDS},
        "cases": measured,
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
