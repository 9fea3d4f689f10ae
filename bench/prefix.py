"""``bench prefix``: what held prefixes do to a workload, on and off in one run, beside the published figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from attrs import field, frozen

from .machine import Machine
from .prefix_emulation import Emulation, Emulator, Run
from .prefix_workload import PrefixShape, prompts_of
from .svg import opened

LIMITS: Mapping[str, float] = {"bytes_over_ideal": 1.02, "ttft_over_ideal": 1.10, "latency_at_equal_batch": 1.05}
"""Ratios that the run with prefixes must hold."""


@frozen
class Figures:
    """One run; times in seconds.

    Args:
        hit_ratio: tokens that decode held, as a share of all prompts' tokens.
        kv_bytes: bytes on the wire.
        kv_bytes_ideal: bytes that decode cannot have had, in whole pages.
        ttft_mean, ttft_p50, ttft_p99: time until decode has the first token.
        latency: time between two tokens, on average over tokens.
        latency_at_equal_batch: that, over the time of the same batches without arrivals.
        worst_step: the longest step with running requests, over its time without arrivals.
        batch: running requests, on average over tokens.
        requests_per_s: finished requests per second.
        evicted_pages: pages that decode's index evicted.
        host_s_per_request: CPU time of index and planner.
    """

    hit_ratio: float
    kv_bytes: int
    kv_bytes_ideal: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    latency: float
    latency_at_equal_batch: float
    worst_step: float
    batch: float
    requests_per_s: float
    evicted_pages: int
    host_s_per_request: float

    @classmethod
    def of(cls, run: Run) -> Figures:
        """A run's."""
        batch, seconds, plain = (np.array(column) for column in zip(*run.steps, strict=True))
        tokens = batch.sum()
        p50, p99 = np.percentile(run.ttft, (50, 99))
        return cls(
            hit_ratio=run.held_tokens / run.prompt_tokens,
            kv_bytes=run.kv_bytes,
            kv_bytes_ideal=run.kv_bytes_ideal,
            ttft_mean=float(np.mean(run.ttft)),
            ttft_p50=float(p50),
            ttft_p99=float(p99),
            latency=float((batch * seconds).sum() / tokens),
            latency_at_equal_batch=float((batch * seconds).sum() / (batch * plain).sum()),
            worst_step=float((seconds / plain).max()),
            batch=float((batch * batch).sum() / tokens),
            requests_per_s=len(run.ttft) / run.seconds,
            evicted_pages=run.evicted,
            host_s_per_request=run.host_s / len(run.ttft),
        )


PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "off": {"ttft_mean": 19.8, "latency": 0.0418, "requests_per_s": 2.33},
    "on": {"ttft_mean": 4.6, "latency": 0.0528, "requests_per_s": 2.74},
}
"""SGLang #22234, 80 groups of 8 prompts, on its authors' machines."""


@frozen
class PrefixReport:
    """All runs of one benchmark.

    Args:
        shape: the workload.
        emulation: the machines.
        off: everything is sent.
        on: decode's index is used.
        ideal: ``on`` without page rounding, evictions, control frames, scatters or host time.
        arrivals: ``on`` with other numbers of requests that may join a step: one, and any.
        published: others' figures.
        ratios: ``bytes_over_ideal``, ``ttft_over_ideal`` and ``latency_at_equal_batch`` of ``on``; and ``on`` over
            ``off`` as ``ttft``, ``latency`` and ``throughput``, with ``published_`` beside them.
        limits: of the first three.
        machine: where index and planner ran.
    """

    shape: PrefixShape
    emulation: Emulation
    off: Figures
    on: Figures
    ideal: Figures
    arrivals: Mapping[str, Figures]
    published: Mapping[str, Mapping[str, float]]
    ratios: Mapping[str, float]
    limits: Mapping[str, float]
    machine: Machine
    ok: bool = field(init=False)

    @ok.default
    def _ok(self) -> bool:
        return all(self.ratios[name] <= limit for name, limit in self.limits.items())


def run_prefix(
    shape: PrefixShape,
    emulation: Emulation,
    progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.process_time,
) -> PrefixReport:
    """Run the workload five times.

    Args:
        shape: the workload.
        emulation: the machines.
        progress: called with the name of each run before it.
        clock: this process's CPU time, to measure index and planner.

    Raises:
        CapacityError: a request that does not fit.
    """
    prompts = prompts_of(shape)
    figures: dict[str, Figures] = {}
    one, every = (attrs.evolve(emulation, arrivals_per_step=most) for most in (1, len(prompts)))
    for name, of, incremental, ideal in (
        ("off", emulation, False, False),
        ("on", emulation, True, False),
        ("ideal", emulation, True, True),
        ("one", one, True, False),
        ("any", every, True, False),
    ):
        progress(name)
        emulator = Emulator(of, prompts, shape.concurrency, incremental=incremental, ideal=ideal, clock=clock)
        run = emulator.run()
        figures[name] = Figures.of(run)
    off, on, ideal_figures = figures["off"], figures["on"], figures["ideal"]
    ratios = {
        "bytes_over_ideal": on.kv_bytes / on.kv_bytes_ideal,
        "ttft_over_ideal": on.ttft_mean / ideal_figures.ttft_mean,
        "latency_at_equal_batch": on.latency_at_equal_batch,
        "ttft": on.ttft_mean / off.ttft_mean,
        "throughput": on.requests_per_s / off.requests_per_s,
        "latency": on.latency / off.latency,
        **{f"published_{name}": ratio for name, ratio in _published().items()},
    }
    arrivals = {name: figures[name] for name in ("one", "any")}
    return PrefixReport(shape, emulation, off, on, ideal_figures, arrivals, PUBLISHED, ratios, LIMITS, Machine.here())


def _published() -> dict[str, float]:
    off, on = PUBLISHED["off"], PUBLISHED["on"]
    names = {"ttft": "ttft_mean", "throughput": "requests_per_s", "latency": "latency"}
    return {name: on[figure] / off[figure] for name, figure in names.items()}


PANELS: Sequence[tuple[str, str, float]] = (
    ("hit ratio, %", "hit_ratio", 100.0),
    ("GB on the wire", "kv_bytes", 1e-9),
    ("TTFT mean, s", "ttft_mean", 1.0),
    ("TTFT p99, s", "ttft_p99", 1.0),
    ("between tokens, ms", "latency", 1e3),
    ("requests/s", "requests_per_s", 1.0),
)
COLOURS = {
    ".off fill": ("#9aa0a6", "#94a3b8"),
    ".on fill": ("#3f51b5", "#a5b4fc"),
    ".ideal fill": ("#80cbc4", "#2dd4bf"),
}
"""Of the bars: on a light ground, and on a dark one."""
RUNS = ("off", "on", "ideal")


def plot_svg(report: PrefixReport) -> str:
    """An SVG picture: a panel per figure, a bar per run."""
    width, height, bar = 130, 150, 26
    parts = opened("With held prefixes and without", width * len(PANELS), height + 60, 11, COLOURS)
    for number, (title, name, scale) in enumerate(PANELS):
        left = number * width + 16
        values = {run: float(getattr(getattr(report, run), name)) * scale for run in RUNS}
        most = max(values.values()) or 1.0
        parts.append(f'<text x="{left}" y="16" font-weight="bold">{title}</text>')
        for place, (run, value) in enumerate(values.items()):
            x, tall = left + place * (bar + 6), height * 0.75 * value / most
            y = height + 20 - tall
            parts.append(f'<rect x="{x}" y="{y:.1f}" width="{bar}" height="{tall:.1f}" class="{run}"/>')
            parts.append(f'<text x="{x + bar / 2}" y="{y - 4:.1f}" text-anchor="middle">{value:.3g}</text>')
            parts.append(f'<text x="{x + bar / 2}" y="{height + 36}" text-anchor="middle">{run}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
