"""``python -m bench grant``: how long a grant takes, beside what ZeroMQ alone takes."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer
from rich.table import Table
from rich.text import Text

from disagg_kv.cli.options import number
from disagg_kv.cli.output import JsonFlag, emit, progress


def grant(
    transport: Annotated[str, typer.Option(help="Carries the bytes, after the grants were measured.")] = "shm",
    repeats: Annotated[int, typer.Option(min=1, help="Round trips of each kind, rounded up to whole rooms.")] = 1000,
    pause: Annotated[float, number(0, text="Seconds of silence before each request of the second rhythm.")] = 0.01,
    timeout: Annotated[float, number(1, text="Seconds after which a grant or a room has failed.")] = 60.0,
    as_json: JsonFlag = False,
) -> None:
    """Request one grant after another, and send bare ZeroMQ frames of the same number, sizes and rhythm.

    Every room is sent with the measured grants, and its bytes are checked. If they are wrong, nothing is printed and
    the exit code is 1.
    """
    from ..grant import rooms, run_grant

    with progress() as bar:
        task = bar.add_task("starting", total=rooms(repeats))
        report = run_grant(
            transport, repeats, pause, timeout, lambda line: bar.update(task, advance=1, description=line)
        )
    table = Table(
        "us, p50 / p95", "grant", "bare ZeroMQ", "ratio", title=f"{report.repeats:,} round trips of each kind"
    )
    for name, of in (("in a row", report.in_a_row), (f"after {pause * 1e3:g} ms of silence", report.after_pause)):
        cells = (f"{q.p50 * 1e6:,.0f} / {q.p95 * 1e6:,.0f}" for q in (of.grant, of.zeromq))
        table.add_row(name, *cells, f"{of.ratio:.2f}")
    machine = report.machine
    said = Text(f"OK: every byte was right ({machine.cpu}, {machine.cores} cores, commit {machine.commit})")
    emit({"ok": True, **attrs.asdict(report)}, table, said, as_json=as_json)
