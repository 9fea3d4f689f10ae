"""What layer groups hide: time to first token per chunk and pipelined, against what compute and wire allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
from attrs import field, frozen

from disagg_kv.errors import ConfigurationError
from disagg_kv.planning import exposed_s

from .machine import Machine
from .shape import TransferShape
from .svg import opened
from .transfer import Quantiles, Turns, run_turns

PER_CHUNK = "staged"
PIPELINED = "staged+layer_pipelined"

RATIOS = (0.5, 1.0, 2.0)
"""Seconds of wire per second of compute."""

LENGTHS = (64, 256, 1024, 4096, 16384)
"""Tokens of a prompt."""


@frozen
class PipelineShape:
    """The comparison to make.

    Args:
        transfer: the request; its ``tokens`` are those of the ratios. Compute and wire are set here.
        compute_s: emulated compute of the whole request.
        ratios: wire time over compute time.
        lengths: prompts of the sweep; compute and wire take as long per token as at ratio 1.
        pairs: interleaved pairs of the sweep, per length.
    """

    transfer: TransferShape = field(factory=lambda: TransferShape(prefill_tp=2, decode_tp=1, kv_heads=4, head_dim=64))
    compute_s: float = 0.4
    ratios: tuple[float, ...] = RATIOS
    lengths: tuple[int, ...] = LENGTHS
    pairs: int = 30

    def __attrs_post_init__(self) -> None:
        if not self.compute_s > 0 or any(not r > 0 for r in self.ratios):
            raise ConfigurationError(f"compute of {self.compute_s} s, wire at {list(self.ratios)} times that")
        if any(n < 1 for n in self.lengths) or self.pairs < 1:
            raise ConfigurationError(f"prompts of {list(self.lengths)} tokens, {self.pairs} pairs of each")


@frozen
class Overlap:
    """One ratio of wire to compute.

    Args:
        ratio: T / C.
        compute_s, wire_s: C, emulated, and T: the busiest prefill rank's bytes over the emulated wire's speed.
        per_chunk, pipelined: seconds from the first layer's beginning until decode had everything.
        groups: N, as the schedule chose it in the last transfer.
        bound_s: the least over N of max(C, T) + min(C, T) / N + N times the overhead of a group.
        bound_groups: the N of that.
        over_bound: the median pipelined time over the bound.
        hidden: the share of min(C, T) (1 - 1 / N) by which the pipelined median is below C + T.
    """

    ratio: float
    compute_s: float
    wire_s: float
    per_chunk: Quantiles
    pipelined: Quantiles
    groups: int
    bound_s: float
    bound_groups: int
    over_bound: float
    hidden: float


@frozen
class Length:
    """One prompt length of the sweep.

    Args:
        tokens: of the prompt.
        per_chunk, pipelined: as in :class:`Overlap`.
        groups: N.
        bound_s: as in :class:`Overlap`.
        ratio: the median over interleaved pairs of pipelined over per-chunk.
    """

    tokens: int
    per_chunk: Quantiles
    pipelined: Quantiles
    groups: int
    bound_s: float
    ratio: float


@frozen
class PipelineReport:
    """The results of one run.

    Args:
        shape: the comparison.
        emulated: the emulated parts.
        group_s: measured seconds that one more group costs.
        overlaps: per ratio.
        lengths: the sweep.
        machine: the machine and versions.
    """

    shape: PipelineShape
    emulated: str
    group_s: float
    overlaps: tuple[Overlap, ...]
    lengths: tuple[Length, ...]
    machine: Machine = field(factory=Machine.here)


def run_pipeline(shape: PipelineShape, progress: Callable[[str], None] = lambda _: None) -> PipelineReport:
    """Measure the cost of a group, then each ratio, then each length. Each of them checks the bytes.

    Args:
        shape: the comparison to make.
        progress: called with a line after each part.

    Raises:
        ConfigurationError, IntegrityError, DeadlineError, PeerLostError: as :func:`run_transfer`.
    """
    group_s = _group_s(shape)
    progress(f"a group costs {group_s * 1e6:.0f} us")
    overlaps = []
    for ratio in shape.ratios:
        overlaps.append(_overlap(shape, ratio, group_s))
        progress(f"T / C = {ratio:g}: {overlaps[-1].over_bound:.3f} of the bound")
    lengths = []
    for tokens in shape.lengths:
        lengths.append(_length(shape, tokens, group_s))
        progress(f"{tokens:,} tokens: {lengths[-1].ratio:.3f} of per-chunk")
    return PipelineReport(shape, "compute (sleeps) and wire", group_s, tuple(overlaps), tuple(lengths))


def _group_s(shape: PipelineShape) -> float:
    """Layers one by one against all at once, with nothing to compute and few bytes to move."""
    base = attrs.evolve(
        shape.transfer, strategies=(PIPELINED,), tokens=shape.transfer.page_size, compute_s=1e-6, wire_bytes_per_s=None
    )
    took = {
        size: Quantiles.of(run_turns(attrs.evolve(base, group=size))[PIPELINED].totals).p50 for size in (1, base.layers)
    }
    return max(0.0, (took[1] - took[base.layers]) / max(1, base.layers - 1))


def _emulated(shape: PipelineShape, tokens: int, ratio: float, repeats: int) -> tuple[TransferShape, float, float]:
    """The transfer, C and T."""
    compute = shape.compute_s * tokens / shape.transfer.tokens
    sized = attrs.evolve(shape.transfer, tokens=tokens, strategies=(PER_CHUNK, PIPELINED), repeats=repeats)
    sent: dict[int, int] = {}
    for pair in sized.explain().pairs:
        sent[pair.writer] = sent.get(pair.writer, 0) + pair.nbytes
    wire = compute * ratio
    return attrs.evolve(sized, compute_s=compute, wire_bytes_per_s=max(sent.values()) / wire), compute, wire


def _bound(layers: int, compute: float, wire: float, group_s: float) -> tuple[float, int]:
    return min((exposed_s(compute, wire, n, group_s), n) for n in range(1, layers + 1))


def _overlap(shape: PipelineShape, ratio: float, group_s: float) -> Overlap:
    transfer, compute, wire = _emulated(shape, shape.transfer.tokens, ratio, shape.transfer.repeats)
    found = run_turns(transfer)
    pipelined = Quantiles.of(found[PIPELINED].totals)
    groups = found[PIPELINED].groups
    bound, best = _bound(transfer.layers, compute, wire, group_s)
    could = min(compute, wire) * (1 - 1 / groups)
    return Overlap(
        ratio,
        compute,
        wire,
        Quantiles.of(found[PER_CHUNK].totals),
        pipelined,
        groups,
        bound,
        best,
        pipelined.p50 / bound,
        (compute + wire - pipelined.p50) / could if could else 0.0,
    )


def _length(shape: PipelineShape, tokens: int, group_s: float) -> Length:
    transfer, compute, wire = _emulated(shape, tokens, 1.0, shape.pairs)
    found = run_turns(transfer)
    bound, _ = _bound(transfer.layers, compute, wire, group_s)
    return Length(
        tokens,
        Quantiles.of(found[PER_CHUNK].totals),
        Quantiles.of(found[PIPELINED].totals),
        found[PIPELINED].groups,
        bound,
        _paired(found[PER_CHUNK], found[PIPELINED]),
    )


def _paired(base: Turns, other: Turns) -> float:
    ratios: Sequence[float] = [b / a for a, b in zip(base.totals, other.totals, strict=True)]
    return float(np.median(ratios))


LINES = {
    "per chunk": ("#c2410c", "#fdba74"),
    "pipelined": ("#1d4ed8", "#93c5fd"),
    "bound": ("#6b7280", "#9ca3af"),
}
"""The colours of the lines: on a light ground, and on a dark one."""


def plot_svg(report: PipelineReport) -> str:
    """Time to first token against prompt length, both on logarithmic axes."""
    width, height, edge = 560, 360, 56
    series = {
        "per chunk": [one.per_chunk.p50 for one in report.lengths],
        "pipelined": [one.pipelined.p50 for one in report.lengths],
        "bound": [one.bound_s for one in report.lengths],
    }
    tokens = [one.tokens for one in report.lengths]
    across = _axis(tokens, edge, width - 16)
    up = _axis([s for of in series.values() for s in of], height - edge, 16)
    colours: dict[str, tuple[str, str]] = {}
    for number, pair in enumerate(LINES.values()):
        colours |= {f".line{number} stroke": pair, f".name{number} fill": pair}
    parts = opened("Time to first token against prompt tokens", width, height, 12, colours)
    for n in tokens:
        parts.append(f'<text x="{across(n):.0f}" y="{height - edge + 18}" text-anchor="middle">{n:,}</text>')
    for number, (name, of) in enumerate(series.items()):
        points = " ".join(f"{across(n):.1f},{up(s):.1f}" for n, s in zip(tokens, of, strict=True))
        dash = ' stroke-dasharray="5 4"' if name == "bound" else ""
        parts.append(f'<polyline class="line{number}" points="{points}" fill="none" stroke-width="2"{dash}/>')
        parts.append(f'<text class="name{number}" x="{edge + 8}" y="{28 + 16 * number}">{name}</text>')
    for n, s in zip(tokens, series["per chunk"], strict=True):
        parts.append(f'<text x="{across(n):.0f}" y="{up(s) - 6:.0f}" text-anchor="middle">{s * 1e3:,.0f} ms</text>')
    caption = f"time to first token against prompt tokens, {report.emulated} emulated"
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 12}" text-anchor="middle">{caption}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """From a value to its place, logarithmically."""
    first, last = np.log(min(values)), np.log(max(values))
    return lambda value: float(low + (high - low) * (np.log(value) - first) / max(last - first, 1e-9))
