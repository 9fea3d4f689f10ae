"""``python -m sim --fleet``: hundreds of real endpoints on a fake clock, network and store."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from rich.table import Table
from rich.text import Text

from bench.machine import Machine
from disagg_kv.cli.output import Json, emit

from . import FleetPlan, FleetResult, run_fleet

ROWS = (
    ("ranks usable after, simulated", "joined_s", "{:.2f} s"),
    ("requests", "requests", "{:,}"),
    ("failed", "failed", "{:,}"),
    ("failed, with a faulty rank", "excused", "{:,}"),
    ("handles that never ended", "unfinished", "{:,}"),
    ("restarts", "restarts", "{:,}"),
    ("control frames, per rank and second", "frames_per_rank_s", "{:.2f}"),
    ("control bytes, per rank and second", "bytes_per_rank_s", "{:,.0f}"),
    ("largest frame, bytes", "hello_bytes", "{:,}"),
    ("store requests, per rank and minute", "store_requests_per_rank_min", "{:.2f}"),
    ("look-ups in the own table, per rank and minute", "lookups_per_rank_min", "{:.2f}"),
    ("CPU, share of a core per rank", "cpu_share", "{:.2%}"),
    ("CPU while joining, seconds per rank", "joining_cpu_s", "{:.3f}"),
    ("leases withheld", "withheld", "{:,}"),
    ("peers per rank at the end", "peers_per_rank", "{:.1f}"),
    ("links per rank at the end", "links_per_rank", "{:.1f}"),
    ("links dropped, per rank", "links_dropped_per_rank", "{:,.1f}"),
    ("events simulated", "events", "{:,}"),
    ("wall time, seconds", "wall_s", "{:,.0f}"),
    ("memory, MiB", "memory_bytes", "{:,.0f}"),
)
"""The lines of the table: words, the field of the result, and its format."""


def fleet(plan: FleetPlan, *, as_json: bool) -> bool:
    """Simulate a fleet and print what it did; False: a limit does not hold."""
    result = run_fleet(plan)
    emit(fleet_document(plan, result), *_text(plan, result), as_json=as_json)
    return result.ok


def fleet_document(plan: FleetPlan, result: FleetResult) -> dict[str, Json]:
    """Plan, machine, result and limits as JSON."""
    faults = sorted(fault.value for fault in plan.faults)
    limits = {
        name: {"value": value, "limit": limit, "holds": holds} for name, (value, limit, holds) in result.limits.items()
    }
    return {
        "plan": attrs.asdict(plan) | {"faults": faults},
        "result": attrs.asdict(result, filter=lambda field, _: field.name != "plan"),
        "limits": limits,
        "machine": attrs.asdict(Machine.here()),
        "ok": result.ok,
    }


def _text(plan: FleetPlan, result: FleetResult) -> Sequence[Table | Text]:
    faults = ", ".join(sorted(fault.value for fault in plan.faults)) or "none"
    table = Table("", "", title=f"{plan.prefills:,} x {plan.decodes:,} ranks, {plan.seconds:g} s, faults: {faults}")
    table.columns[1].justify = "right"
    for words, name, form in ROWS:
        value = getattr(result, name)
        table.add_row(words, form.format(value / 2**20 if name == "memory_bytes" else value))
    lines = [Text(f"failed without a faulty rank: {line}") for line in result.errors]
    for name, (value, limit, holds) in result.limits.items():
        lines.append(Text(f"{name}: {value:g}, limit {limit:g}: {'holds' if holds else 'DOES NOT HOLD'}"))
    return [table, *lines]
