"""The tables of fleets, simulated and real."""

from __future__ import annotations

from statistics import median

from benchmarks.tables import Found, table

FLEET = (
    ("requests", "requests", "{:,}"),
    ("failed, with a faulty rank", "excused", "{:,}"),
    ("failed, others", "others", "{:,}"),
    ("simulated s until all usable", "joined_s", "{:.2f}"),
    ("control frames per rank and s", "frames_per_rank_s", "{:.1f}"),
    ("bytes", "bytes_per_rank_s", "{:,.0f}"),
    ("share of a core per rank", "cpu_share", "{:.2%}"),
    ("CPU s while joining", "joining_cpu_s", "{:.3f}"),
    ("store requests per rank and minute", "store_requests_per_rank_min", "{:.2f}"),
)


def fleets(*every: Found) -> str:
    """Simulated fleets, one in a row."""

    def row(found: Found) -> list[str]:
        plan, of = found["plan"], found["result"]
        result = {**of, "others": of["failed"] - of["excused"] + of["unfinished"]}
        faults = f", {', '.join(plan['faults'])}" if plan["faults"] else ""
        what = f"{plan['prefills']:,} x {plan['decodes']:,}, {plan['seconds']:g} s{faults}"
        return [what, *(form.format(result[name]) for _, name, form in FLEET)]

    return table([["ranks, time, faults", *(words for words, _, _ in FLEET)], *map(row, every)])


def scale(found: Found) -> str:
    """Real endpoints: what many idle peers cost beside few."""
    times = (f"{what}, us, {n} peers" for what in ("poll", "step", "grant") for n in (found["few"], found["peers"]))
    head = ["channel", *times, "bytes per peer", "descriptors per peer"]
    rows = (
        [
            one["kind"],
            *(f"{one[side][name]:,.1f}" for name in ("poll_us", "step_us", "grant_us") for side in ("few", "many")),
            f"{one['memory_per_peer']:,.0f}",
            f"{one['descriptors_per_peer']:.0f}",
        ]
        for one in found["results"]
    )
    worst = max(max(one["ratios"].values()) for one in found["results"])
    limits = found["limits"]
    said = (
        f"{found['peers']} prefill endpoints in {found['processes']} processes. The largest ratio of many to few is "
        f"{worst:.2f}, with a limit of {limits['ratio']:g}. The limit of memory is {limits['memory_per_peer']:,} bytes "
        "per peer."
    )
    return f"{said}\n\n{table([head, *rows])}"


def recovery(found: Found) -> str:
    """How long a killed prefill process keeps pages of a decode engine."""
    head = ["transport", "strategy", "path", "failed, s", "released, s", "at most, s"]
    rows = (
        [
            *(one[name] for name in ("transport", "strategy", "path")),
            *(f"{median(one[name]):.3f}" for name in ("failed", "released")),
            f"{max(one['released']):.3f}",
        ]
        for one in found["rows"]
    )
    return f"{len(found['rows'][0]['failed'])} kills of each kind; medians.\n\n{table([head, *rows])}"


def links(found: Found) -> str:
    """What a connected peer costs a channel or a transport, and what is left of that."""
    head = ["link", "bytes", "descriptors", "left: bytes", "descriptors", "bytes after `malloc_trim`"]
    rows = (
        [
            one["kind"],
            *(f"{one[name]:,.0f}" for name in ("nbytes", "descriptors", "left_bytes", "left_descriptors")),
            f"{one['trimmed_bytes']:,.0f}",
        ]
        for one in found["links"]
    )
    return f"Per peer, of {found['peers']}; left after {found['rounds']} rounds.\n\n{table([head, *rows])}"
