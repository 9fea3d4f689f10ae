"""The table of a simulated fleet."""

from __future__ import annotations

from benchmarks.tables import Found, table

FLEET_ROWS = (
    ("ranks usable after the last start, simulated s", "joined_s", "{:.2f}"),
    ("requests", "requests", "{:,}"),
    ("failed requests, all with a faulty rank", "excused", "{:,}"),
    ("other failed requests", "others", "{:,}"),
    ("leases withheld", "withheld", "{:,}"),
    ("control frames per rank and second", "frames_per_rank_s", "{:.1f}"),
    ("control bytes per rank and second", "bytes_per_rank_s", "{:,.0f}"),
    ("processor time per rank, share of a core", "cpu_share", "{:.2%}"),
    ("processor time per rank while joining, s", "joining_cpu_s", "{:.3f}"),
    ("store requests per rank and minute", "store_requests_per_rank_min", "{:.2f}"),
    ("memory of the simulation, MB", "memory_mb", "{:,.0f}"),
)


def fleet(found: Found) -> str:
    """A simulated fleet."""
    plan, result = found["plan"], dict(found["result"])
    result["others"] = result["failed"] - result["excused"] + result["unfinished"]
    result["memory_mb"] = result["memory_bytes"] / 1e6
    faults = ", ".join(plan["faults"]) or "none"
    head = [f"{plan['prefills']:,} x {plan['decodes']:,} ranks, {plan['seconds']:g} s, faults: {faults}", ""]
    return table([head, *([words, form.format(result[name])] for words, name, form in FLEET_ROWS)])
