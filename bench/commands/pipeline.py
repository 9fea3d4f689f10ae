"""``python -m bench pipeline``: how much of the wire layer groups hide behind compute."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from disagg_kv.cli.options import Layers, number
from disagg_kv.cli.output import JsonFlag, emit, progress

from .options import HeadDim, KvHeads

if TYPE_CHECKING:
    from ..pipeline import PipelineReport
    from ..transfer import Quantiles


def pipeline(
    transport: Annotated[str, typer.Option(help="A registered transport's name.")] = "shm",
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel prefill ranks.")] = 2,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel decode ranks.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request whose ratios are set.")] = 1024,
    layers: Layers = 32,
    kv_heads: KvHeads = 4,
    head_dim: HeadDim = 64,
    compute: Annotated[float, number(0, text="Emulated seconds to compute that request.")] = 0.4,
    ratios: Annotated[str, typer.Option(help="Comma-separated: seconds of wire per second of compute.")] = "0.5,1,2",
    lengths: Annotated[str, typer.Option(help="Comma-separated: prompts of the sweep, in tokens.")] = (
        "64,256,1024,4096,16384"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Measured transfers per ratio and schedule.")] = 20,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs per length of the sweep.")] = 30,
    timeout: Annotated[float, number(1, text="Seconds after which one transfer has failed.")] = 120.0,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG picture of the sweep here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Send one request per chunk and in layer groups, behind emulated compute and an emulated wire.

    The bytes are checked first. If they are wrong, nothing is measured and the exit code is 1.
    """
    from ..pipeline import PipelineShape, plot_svg, run_pipeline
    from ..shape import TransferShape

    transfer = TransferShape(
        transport=transport,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        tokens=tokens,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        repeats=repeats,
        timeout_s=timeout,
    )
    shape = PipelineShape(
        transfer, compute, tuple(_numbers(ratios)), tuple(int(length) for length in _numbers(lengths)), pairs
    )
    with progress() as bar:
        task = bar.add_task("starting", total=1 + len(shape.ratios) + len(shape.lengths))
        report = run_pipeline(shape, lambda line: bar.update(task, advance=1, description=line))
    if plot is not None:
        plot.write_text(plot_svg(report))
    tables = Group(_overlaps(report), _lengths(report))
    emit({"ok": True, **attrs.asdict(report)}, tables, _verdict(report), as_json=as_json)


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",") if word.strip()]
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is not a list of numbers") from exc
    if not all(map(math.isfinite, numbers)):
        raise typer.BadParameter(f"{text!r} has a number that is not finite")
    return numbers


def _overlaps(report: PipelineReport) -> Table:
    columns = ("T / C", "C ms", "T ms", "per chunk ms", "pipelined ms", "groups", "bound ms", "over bound", "hidden")
    table = Table(*columns, title=f"emulated: {report.emulated}; a group costs {report.group_s * 1e6:.0f} us")
    for one in report.overlaps:
        cells = (f"{one.ratio:g}", _ms(one.compute_s), _ms(one.wire_s), _p50(one.per_chunk), _p50(one.pipelined))
        bound = (str(one.groups), _ms(one.bound_s), f"{one.over_bound:.3f}", f"{one.hidden:.0%}")
        table.add_row(*cells, *bound)
    return _right(table)


def _lengths(report: PipelineReport) -> Table:
    columns = ("tokens", "per chunk ms", "pipelined ms", "groups", "bound ms", "pipelined / per chunk")
    table = Table(*columns, title=f"T / C = 1, median of {report.shape.pairs} pairs")
    for one in report.lengths:
        took = (_p50(one.per_chunk), _p50(one.pipelined))
        table.add_row(f"{one.tokens:,}", *took, str(one.groups), _ms(one.bound_s), f"{one.ratio:.3f}")
    return _right(table)


def _right(table: Table) -> Table:
    for column in table.columns:
        column.justify = "right"
    return table


def _verdict(report: PipelineReport) -> Text:
    worst = max((one.over_bound for one in report.overlaps), default=1.0)
    slowest = max((one.ratio for one in report.lengths), default=1.0)
    where = f"{report.machine.cpu}, {report.machine.cores} cores, commit {report.machine.commit}"
    return Text(
        f"OK: every byte was right; at most {worst:.3f} of the bound, at most {slowest:.3f} of per-chunk ({where})"
    )


def _p50(of: Quantiles) -> str:
    return _ms(of.p50)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
