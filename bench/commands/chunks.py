"""``python -m bench chunks``: the cost of a chunk in a long request and in a shorter one."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer
from rich.table import Table
from rich.text import Text

from disagg_kv.cli.options import number
from disagg_kv.cli.output import JsonFlag, emit, progress


def chunks(
    transport: Annotated[str, typer.Option(help="Carries the bytes.")] = "shm",
    strategies: Annotated[str, typer.Option(help="Comma-separated; measured in turns.")] = "staged,direct",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request.")] = 1_000_000,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk, and of a page.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers, of one head of two bytes.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Measured requests of each strategy and length.")] = 5,
    timeout: Annotated[float, number(1, text="Seconds after which a request has failed.")] = 120.0,
    as_json: JsonFlag = False,
) -> None:
    """Move a request of very many small chunks, and one with a quarter of the chunks, between two processes.

    All bytes are checked after each request. If they are wrong, nothing is printed and the exit code is 1.
    """
    from ..chunks import SMALLER, run_chunks

    names = tuple(strategies.split(","))
    with progress() as bar:
        task = bar.add_task("starting", total=2 * (repeats + 1) * len(names))
        report = run_chunks(
            transport, names, tokens, chunk, layers, repeats, timeout,
            lambda line: bar.update(task, advance=1, description=line),
        )  # fmt: skip
    table = Table(
        "strategy", "s, p50 / p95", "CPU s, prefill / decode", "us a chunk", f"us a chunk, 1/{SMALLER} as many",
        title=f"{tokens:,} tokens in chunks of {chunk}",
    )  # fmt: skip
    for of in report.strategies:
        seconds = f"{of.seconds.p50:.2f} / {of.seconds.p95:.2f}"
        cpu = " / ".join(f"{one:.2f}" for one in of.cpu_s)
        table.add_row(of.strategy, seconds, cpu, f"{of.chunk_us:,.0f}", f"{of.shorter_chunk_us:,.0f}")
    machine = report.machine
    said = Text(f"OK: every byte was right ({machine.cpu}, {machine.cores} cores, commit {machine.commit})")
    emit({"ok": True, **attrs.asdict(report)}, table, said, as_json=as_json)
