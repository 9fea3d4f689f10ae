"""``python -m sim``: thousands of failures of the real endpoints in a minute, each repeatable from its seed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from disagg_kv.cli import main as cli
from disagg_kv.cli.options import number
from disagg_kv.cli.output import Json, JsonFlag, emit, log, progress
from disagg_kv.errors import ConfigurationError

from . import EVERY, GATE, FaultClass, Kind, Summary, simulate_many, trace
from .fault import named
from .fleet import FleetPlan, fleet_size, named_faults
from .fleet.command import fleet


def build(argv: Sequence[str]) -> typer.Typer:
    """The application with its one command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(simulate)
    return app


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code, as :func:`disagg_kv.cli.main.run` does."""
    return cli.run(argv, build, "python -m sim")


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of worlds to run.")] = 1000,
    seed_from: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    faults: Annotated[
        str,
        typer.Option(
            help="Classes of faults that may happen, separated by commas; default: all, of a fleet none. "
            "A fleet knows restarts, store, rack, and all."
        ),
    ] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    trace_one: Annotated[bool, typer.Option("--trace", help="Run one seed and print every event.")] = False,
    fleet_of: Annotated[
        str, typer.Option("--fleet", help="Simulate one fleet in place of worlds: PREFILLSxDECODES, such as 200x200.")
    ] = "",
    seconds: Annotated[float, number(0, text="Simulated seconds of a fleet's traffic.")] = 60.0,
    links: Annotated[
        int, typer.Option(min=0, help="Budget of links of each rank of a fleet; 0: that of an endpoint.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Run the real endpoints on a fake clock, network, DMA engine and memory, and check the rules."""
    if fleet_of:
        if seeds != 1000 or jobs != 1 or trace_one:
            raise ConfigurationError("--fleet is one simulation: without --seeds, --jobs and --trace")
        prefills, decodes = fleet_size(fleet_of)
        plan = FleetPlan(prefills, decodes, seconds=seconds, faults=named_faults(faults), seed=seed_from, links=links)
        if not fleet(plan, as_json=as_json):
            raise typer.Exit(1)
        return
    if links:
        raise ConfigurationError("--links is of a --fleet")
    _worlds(seeds, seed_from, faults, jobs, trace_one, as_json=as_json)


def _worlds(seeds: int, seed_from: int, faults: str, jobs: int, trace_one: bool, *, as_json: bool) -> None:
    allowed = named(faults.split(",")) if faults else EVERY
    if trace_one:
        if seeds != 1:
            raise ConfigurationError(f"--trace prints the events of one seed: --seeds 1, not {seeds}")
        trace(seed_from, log, allowed)
    with progress() as bar:
        task = bar.add_task("seeds", total=seeds)
        summary = simulate_many(
            seeds, seed_from, faults=allowed, jobs=jobs, done=lambda count: bar.advance(task, count)
        )
    missing = summary.missing() if allowed == EVERY and seeds >= GATE else None
    ok = not summary.violated and not missing
    replay = [f"python -m sim --seeds 1 --seed-from {f.seed} --trace" for f in summary.found]
    if faults:
        replay = [f"{line} --faults {faults}" for line in replay]
    emit(
        document(summary, seed_from, allowed, missing, replay) | {"ok": ok},
        *_text(summary, missing, replay),
        as_json=as_json,
    )
    if not ok:
        raise typer.Exit(1)


def document(
    summary: Summary, first: int, allowed: frozenset[FaultClass], missing: list[str] | None, replay: list[str]
) -> dict[str, Json]:
    """The run as JSON; ``coverage_missing`` is null for a run too small, or too tame, to be judged by it."""
    s = summary
    return {
        "seeds": s.seeds,
        "seed_from": first,
        "violations": s.violated,
        "found": [
            {"seed": f.seed, "rule": f.rule, "at_s": f.at, "message": f.message, "replay": line}
            for f, line in zip(s.found, replay, strict=True)
        ],
        "coverage_missing": missing,
        "seeds_per_second": s.seeds / s.wall_s,
        "seeds_per_cpu_second": s.seeds / s.cpu_s,
        "events": s.events,
        "events_per_second": s.events / s.wall_s,
        "simulated_seconds": s.simulated_s,
        "rooms_per_seed": s.rooms / s.seeds,
        "ranks_per_seed": s.ranks / s.seeds,
        "segments_per_room": s.landed / max(1, s.finished),
        "faults": {f.name.lower(): s.faults[f] for f in FaultClass if f in allowed},
        "kinds": {k.name.lower(): s.kinds[k] for k in Kind},
        "trace_digest": s.trace_digest,
    }


def _text(summary: Summary, missing: list[str] | None, replay: list[str]) -> list[Table | Text]:
    s = summary
    table = Table(
        "fault", "happened", title=f"{s.seeds:,} seeds, {s.events:,} events, {s.simulated_s:,.0f} s simulated"
    )
    table.columns[1].justify = "right"
    for fault, count in s.faults.most_common():
        table.add_row(fault.name.lower(), f"{count:,}")
    lines = [
        Text(
            f"{s.seeds / s.wall_s:,.0f} seeds/s ({s.seeds / s.cpu_s:,.0f} per CPU second), digest {s.trace_digest}; "
            f"rooms {s.rooms / s.seeds:.1f}, ranks {s.ranks / s.seeds:.1f}, "
            f"segments a room {s.landed / max(1, s.finished):.1f}"
        ),
        Text(f"violations: {s.violated}"),
    ]
    for found, line in zip(s.found, replay, strict=True):
        lines.append(Text(f"seed {found.seed}: {found.rule} at {found.at:.4f} s: {found.message}\n  {line}"))
    if missing is not None:
        lines.append(Text(f"not reached: {', '.join(missing) or 'nothing'}"))
    return [table, *lines]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
