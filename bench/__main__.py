"""``python -m bench``: measure, after the bytes were checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import attrs
import typer
from rich.table import Table
from rich.text import Text

from disagg_kv.cli import main as cli
from disagg_kv.cli.options import DecodePageSize, Device, Layers, PageSize, Verify, number
from disagg_kv.cli.output import Json, JsonFlag, emit, progress

from .commands.chunks import chunks
from .commands.grant import grant
from .commands.options import HeadDim, KvHeads
from .commands.pipeline import pipeline
from .commands.prefix import prefix

if TYPE_CHECKING:
    from . import TransferReport

Order = Literal["NHD", "HND"]
Programs = Annotated[
    int | None,
    typer.Option(min=1, help="Most programs of a copy of mapped pages on a GPU; default: one per multiprocessor."),
]
Transport = Annotated[
    str | None, typer.Option(help="A transport, or several joined by +; default: shm for the CPU, cuda_ipc for GPUs.")
]


def build(argv: Sequence[str]) -> typer.Typer:
    """The application with all benchmarks."""
    app = typer.Typer(callback=bench, add_completion=False, pretty_exceptions_enable=False)
    for command in (transfer, adapter, grant, chunks, prefix, pipeline):
        app.command()(command)
    return app


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code, as :func:`disagg_kv.cli.main.run` does."""
    return cli.run(argv, build, "python -m bench")


def bench() -> None:
    """Run a benchmark. Compare only numbers of one run."""


def transfer(
    transport: Transport = None,
    device: Annotated[Device, typer.Option(help="Device of the caches: cpu, or cuda (all GPUs).")] = "cpu",
    strategies: Annotated[str, typer.Option(help="Comma-separated; each is measured in turn.")] = "slice,staged",
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel prefill ranks.")] = 4,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel decode ranks.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request.")] = 1024,
    layers: Layers = 32,
    kv_heads: KvHeads = 8,
    head_dim: HeadDim = 128,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bfloat16",
    decode_dtype: Annotated[str | None, typer.Option(help="Element type of decode's cache, if it differs.")] = None,
    page_size: PageSize = 64,
    decode_page_size: DecodePageSize = None,
    layout: Annotated[Order, typer.Option(help="Order inside a page.")] = "NHD",
    decode_layout: Annotated[Order | None, typer.Option(help="Order inside a page of decode, if it differs.")] = None,
    announced: Annotated[
        bool, typer.Option("--announced", help="Announce the rows first, as an engine does before a pass.")
    ] = False,
    busy: Annotated[
        bool, typer.Option("--busy", help="Let each engine thread run Python code while a transfer is under way.")
    ] = False,
    decode_load: Annotated[
        bool, typer.Option("--decode-load", help="Let each decode rank run decode-like steps, and show their times.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, help="Staging slots of a prefill rank.")] = 8,
    slot_mib: Annotated[int | None, typer.Option(min=1, help="MiB of a staging slot.")] = None,
    ring_mib: Annotated[int | None, typer.Option(min=1, help="MiB of a decode rank's staging ring.")] = None,
    programs: Programs = None,
    verify: Annotated[Verify, typer.Option(help="Measure each strategy once more with checksums.")] = "off",
    repeats: Annotated[int, typer.Option(min=1, help="Measured transfers per strategy.")] = 20,
    timeout: Annotated[float, number(1, text="Seconds after which one transfer has failed.")] = 120.0,
    as_json: JsonFlag = False,
) -> None:
    """Move one request with several strategies in turns, and compare them with plain bulk writes.

    The bytes are checked first. If they are wrong, nothing is measured and the exit code is 1.
    """
    from . import TransferShape, run_transfer
    from .transfer import steps

    shape = TransferShape(
        transport=transport or ("cuda_ipc" if device.startswith("cuda") else "shm"),
        device=device,
        strategies=tuple(name.strip() for name in strategies.split(",") if name.strip()),
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        tokens=tokens,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        decode_dtype=decode_dtype,
        page_size=page_size,
        decode_page_size=decode_page_size or page_size,
        layout=layout,
        decode_layout=decode_layout or layout,
        announced=announced,
        busy=busy,
        decode_load=decode_load,
        slots=slots,
        slot_bytes=slot_mib and slot_mib << 20,
        ring_bytes=ring_mib and ring_mib << 20,
        programs=programs,
        verify=verify,
        repeats=repeats,
        timeout_s=timeout,
    )
    with progress() as bar:
        task = bar.add_task("starting", total=steps(shape))
        report = run_transfer(shape, lambda line: bar.update(task, advance=1, description=line))
    emit(document(report), _table(report), _verdict(report), as_json=as_json)


def adapter(
    transport: Annotated[str, typer.Option(help="A transport with a library behind it: nixl, mooncake.")] = "nixl",
    small: Annotated[int, typer.Option(min=1, help="Measured writes of 64 KiB, of each kind.")] = 1000,
    large: Annotated[int, typer.Option(min=1, help="Measured writes of 16 MiB, of each kind.")] = 60,
    timeout: Annotated[float, number(1, text="Seconds after which one write has failed.")] = 60.0,
    as_json: JsonFlag = False,
) -> None:
    """Write through a transport and through the library's own call in turns, and show what the transport adds."""
    from .adapter import run_adapter

    report = run_adapter(transport, {64 << 10: small, 16 << 20: large}, timeout)
    table = Table("us, p50 / p95", "library", "transport", "added", title=f"One write over {transport}")
    for size in report.sizes:
        cells = (f"{of.p50 * 1e6:,.0f} / {of.p95 * 1e6:,.0f}" for of in (size.raw, size.adapter))
        added = f"{size.overhead_s * 1e6:,.0f} ({size.overhead_share:.1%})"
        table.add_row(f"{size.nbytes >> 10:,} KiB", *cells, added)
    machine = report.machine
    said = Text(f"OK: every byte was right ({machine.cpu}, {machine.cores} cores, commit {machine.commit})")
    emit({"ok": True, **attrs.asdict(report)}, table, said, as_json=as_json)


def document(report: TransferReport) -> dict[str, Json]:
    """The report as JSON; seconds everywhere."""
    found: dict[str, Json] = attrs.asdict(report)
    return {"ok": True, **found}


def _table(report: TransferReport) -> Table:
    names = list(report.strategies)
    shape = report.shape
    title = (
        f"TP {shape.prefill_tp} -> {shape.decode_tp} over {shape.transport}: {shape.tokens:,} tokens, "
        f"{report.nbytes / 1e6:,.1f} MB, {shape.repeats} repeats{', engine threads busy' if shape.busy else ''}"
    )
    table = Table("", *names, "plain writes", title=title)
    for name in names[:1]:
        for phase in report.strategies[name].phases:
            cells = (report.strategies[n].phases[phase] for n in names)
            ceiling = {"wire": report.ceiling.wire, "total": report.ceiling.total}.get(phase)
            plain = _ms(ceiling.p50, ceiling.p95) if ceiling else ""
            table.add_row(f"{phase} ms, p50 / p95", *(_ms(c.p50, c.p95) for c in cells), plain)
    each = report.strategies.values()
    table.add_row("GB/s", *(f"{m.gb_per_s:.2f}" for m in each), f"{report.ceiling.gb_per_s:.2f}")
    table.add_row("share of ceiling, wire", *(f"{m.share_of_ceiling:.0%}" for m in each), "100%")
    table.add_row("share of ceiling, total", *(f"{m.total_share_of_ceiling:.0%}" for m in each), "100%")
    if shape.decode_load:
        for name, steps in (
            ("decode step ms, p50 / p95", [m.decode_step for m in each]),
            ("before transfers", [m.decode_step_alone for m in each]),
        ):
            table.add_row(name, *(_ms(of.p50, of.p95) if of else "" for of in steps), "")
    table.add_row("writes", *(f"{m.descriptors:,}" for m in each), f"{report.ceiling.writes:,}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _verdict(report: TransferReport) -> Text:
    line = "every byte was right"
    if report.ratio_staged_over_slice is not None:
        line += f"; staged is {report.ratio_staged_over_slice:.2f} times as fast as slice"
    for name, cost in report.verify_cost.items():
        line += f"; {name} takes {cost:.2f} times as long with verify {report.shape.verify}"
    return Text(f"OK: {line} ({report.machine.cpu}, {report.machine.cores} cores, commit {report.machine.commit})")


def _ms(p50: float, p95: float) -> str:
    return f"{p50 * 1e3:,.1f} / {p95 * 1e3:,.1f}"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
