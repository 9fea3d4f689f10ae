"""``python -m bench prefix``: a workload of shared prefixes, with and without incremental transfer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from rich.table import Table
from rich.text import Text

from disagg_kv.cli.options import number
from disagg_kv.cli.output import Json, JsonFlag, emit, progress

if TYPE_CHECKING:
    from ..prefix import PrefixReport

SMALL = {"groups": 6, "prompts": 4, "shared_tokens": 2000, "own_tokens": 300, "answer_tokens": 40, "concurrency": 8}
"""What ``--small`` puts in place of the published sizes."""

ROWS = (
    ("hit ratio, %", "hit_ratio", 100.0),
    ("GB on the wire", "kv_bytes", 1e-9),
    ("GB at best", "kv_bytes_ideal", 1e-9),
    ("TTFT mean, s", "ttft_mean", 1.0),
    ("TTFT p50, s", "ttft_p50", 1.0),
    ("TTFT p99, s", "ttft_p99", 1.0),
    ("between tokens, ms", "latency", 1e3),
    ("the same, over equal batches without arrivals", "latency_at_equal_batch", 1.0),
    ("longest step, over one without arrivals", "worst_step", 1.0),
    ("requests running", "batch", 1.0),
    ("requests/s", "requests_per_s", 1.0),
    ("host ms per request", "host_s_per_request", 1e3),
)


def prefix(
    groups: Annotated[int, typer.Option(min=1, help="Groups of prompts; each group shares a prefix.")] = 80,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 8,
    shared_tokens: Annotated[int, typer.Option(min=1, help="Largest shared prefix, in tokens.")] = 7000,
    own_tokens: Annotated[int, typer.Option(min=1, help="Largest part of a prompt after it, in tokens.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Largest number of tokens to generate.")] = 1067,
    range_ratio: Annotated[float, number(0, 1, text="The shortest length, as a share of the longest.")] = 0.5,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of lengths, tokens and order.")] = 0,
    parameters: Annotated[
        Path | None, typer.Option(help="A JSON file that describes the emulated machines; default: the library's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG picture here.")] = None,
    small: Annotated[
        bool, typer.Option(help="A small workload instead of the sizes above, and conversations of a real model.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Send prompts that share prefixes, with and without held prefixes, and compare both with the ideal.

    Compute and wire are emulated; index, page accounts, planner and rate limits are the library's own. Exit code 1: a
    limit is exceeded.
    """
    from ..prefix import plot_svg, run_prefix
    from ..prefix_emulation import PARAMETERS, Emulation
    from ..prefix_workload import PrefixShape

    shape = PrefixShape(
        groups=groups,
        prompts=prompts,
        shared_tokens=shared_tokens,
        own_tokens=own_tokens,
        answer_tokens=answer_tokens,
        range_ratio=range_ratio,
        concurrency=concurrency,
        seed=seed,
    )
    if small:
        shape = attrs.evolve(shape, **SMALL)
    with progress() as bar:
        task = bar.add_task("starting", total=5)
        emulation = Emulation.read(parameters or PARAMETERS)
        report = run_prefix(shape, emulation, lambda name: bar.update(task, advance=1, description=name))
    model = _real_model() if small else None
    if plot is not None:
        plot.write_text(plot_svg(report))
    ok = report.ok and (model is None or model["ok"] is True)
    emit({**attrs.asdict(report), "ok": ok, "model": model}, _table(report), _verdict(report, ok), as_json=as_json)
    if not ok:
        raise typer.Exit(1)


def _real_model() -> dict[str, Json]:
    """A real model's conversations, sent in full and incrementally: bytes, and whether all were right."""
    from disagg_kv.engines.hf.demo import DemoConfig, run_demo

    found: dict[str, Json] = {}
    good = True
    for name, strategy in (("off", "staged"), ("on", "staged+incremental")):
        config = DemoConfig(
            prefill_tp=2, decode_tp=1, requests=2, turns=3, max_new_tokens=6, layers=2, strategy=strategy
        )
        report = run_demo(config)
        good = good and report.ok
        ideal = sum(turn.kv_bytes_ideal for turn in report.turns)
        found[name] = {"kv_bytes": report.kv_bytes, "kv_bytes_ideal": ideal, "phases": dict(report.phases)}
    return {"ok": good, **found}


def _table(report: PrefixReport) -> Table:
    shape = report.shape
    title = (
        f"{shape.groups} x {shape.prompts} prompts of {shape.shared_tokens:,} shared and {shape.own_tokens:,} own, "
        f"{shape.concurrency} at once"
    )
    table = Table("", "off", "on", "ideal", "published off", "published on", title=title)
    for label, name, scale in ROWS:
        ours = [f"{getattr(figures, name) * scale:,.4g}" for figures in (report.off, report.on, report.ideal)]
        theirs = [f"{of[name] * scale:,.4g}" if name in of else "" for of in report.published.values()]
        table.add_row(label, *ours, *theirs)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _verdict(report: PrefixReport, ok: bool) -> Text:
    ratios = ", ".join(f"{name} {report.ratios[name]:.3f} (at most {most:g})" for name, most in report.limits.items())
    return Text(f"{'OK' if ok else 'FAILED'}: {ratios}", "green" if ok else "red")
