"""The tables of what is measured on CPUs: transfers, the endpoint's parts, prefixes, simulated worlds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

from benchmarks.tables import Found, table


def _ms(of: Mapping[str, float]) -> str:
    """The p50 and p95 of seconds."""
    return f"{of['p50'] * 1e3:,.1f} / {of['p95'] * 1e3:,.1f}"


def _us(of: Mapping[str, float]) -> str:
    return f"{of['p50'] * 1e6:,.0f} / {of['p95'] * 1e6:,.0f}"


def transfer(found: Found) -> str:
    """The phases of each strategy."""
    names, ceiling = list(found["strategies"]), found["ceiling"]
    each = [found["strategies"][name] for name in names]

    def rows() -> Iterator[list[str]]:
        yield ["ms, p50 / p95", *names, "plain writes"]
        for phase in (name for name in each[0]["phases"] if any(of["phases"][name]["p95"] for of in each)):
            plain = _ms(ceiling[phase]) if phase in ceiling else ""
            yield [phase, *(_ms(of["phases"][phase]) for of in each), plain]
        yield ["wire, without copies", *(_ms(of["wire_s"]) for of in each), _ms(ceiling["wire"])]

    return table(rows())


def lanes(found: Found) -> str:
    """What each transport carries between two processes."""
    head = ["transport", "GB/s", "of a copy within a process", "over"]
    rows = (
        [of["transport"], f"{of['gb_s']:.2f}", f"{of['gb_s'] / found['copy_gb_s']:.0%}", of["over"] or "mapped memory"]
        for of in found["transports"]
    )
    return table([head, *rows])


def gpu_lanes(found: Found) -> str:
    """What each transport carries between two GPUs, beside the nominal rate of what connects them."""
    rows = (
        [
            of["transport"],
            f"{of['gb_s']:.0f}",
            f"{of['gb_s'] / of['most_gb_s']:.0%} of {of['most_gb_s']:.0f}, {of['most']}",
        ]
        for of in found["transports"]
    )
    return table([["transport", "GB/s", "of the nominal rate"], *rows])


def adapter(found: Found) -> str:
    """What a transport adds to its library."""
    head = [f"{found['transport']}: us, p50 / p95", "library", "transport", "added"]
    rows = (
        [
            f"{of['nbytes'] >> 10:,} KiB",
            _us(of["raw"]),
            _us(of["adapter"]),
            f"{of['overhead_s'] * 1e6:,.0f} ({of['overhead_share']:.1%})",
        ]
        for of in found["sizes"]
    )
    return table([head, *rows])


def grant(found: Found) -> str:
    """How long a grant takes, beside ZeroMQ alone."""
    in_a_row, after_pause = found["in_a_row"], found["after_pause"]
    rows = (
        [name, _us(of["grant"]), _us(of["zeromq"]), f"{of['ratio']:.2f}"]
        for name, of in (("in a row", in_a_row), (f"after {after_pause['pause_s'] * 1e3:g} ms of silence", after_pause))
    )
    p50 = in_a_row["grant"]["p50"]
    said = f"In a row: **{p50 * 1e6:,.0f} us**; the limit of 300 us is {'missed' if p50 >= 300e-6 else 'met'}."
    return f"{said}\n\n{table([['us, p50 / p95', 'grant', 'bare ZeroMQ', 'ratio'], *rows])}"


def chunks(found: Found) -> str:
    """What a chunk costs, however many there are."""
    rows = (
        [
            of["strategy"],
            f"{of['seconds']['p50']:.2f} / {of['seconds']['p95']:.2f}",
            " / ".join(f"{one:.2f}" for one in of["cpu_s"]),
            f"{of['chunk_us']:,.0f}",
            f"{of['shorter_chunk_us']:,.0f}",
        ]
        for of in found["strategies"]
    )
    head = [
        "strategy",
        "s, p50 / p95",
        "CPU s, prefill / decode",
        "us per chunk",
        "us per chunk, a quarter of the chunks",
    ]
    slowest = max(of["seconds"]["p50"] for of in found["strategies"])
    said = (
        f"{found['tokens']:,} tokens in chunks of {found['chunk']}: **{slowest:.1f} s**; the limit of 5 s is "
        f"{'missed' if slowest >= 5 else 'met'}."
    )
    return f"{said}\n\n{table([head, *rows])}"


def kernels(found: Found) -> str:
    """Gather, scatter and checksum, case by case."""
    head = ["order, page size, pages", "copy_ GB/s", "gather / copy_", "scatter / copy_", "checksum / copy_"]
    rows = (
        [
            f"{case['layout']}, {case['page_size']}, {case['pages']}",
            f"{case['copy_GB_per_s']:.2f}",
            *(f"{case[f'{op}_ratio']:.2f}" for op in ("gather", "scatter", "checksum")),
        ]
        for case in found["cases"]
    )
    return table([head, *rows])


def planning(found: Found) -> str:
    """What a plan costs."""
    steps = [[name, f"{ms:.2f}"] for name, ms in found["median_ms"].items()]
    replicas = [["replicas", "ms"], *([n, f"{ms:,.1f}"] for n, ms in found["elect_ms_by_replicas"].items())]
    plan = table([["step", "ms, median"], *steps, ["all", f"{found['total_ms']:.2f}"]])
    return f"{plan}\n\n{table(replicas)}"


def page_tables(found: Found) -> str:
    """What page tables cost on the wire."""
    head = ["pages that follow one another", "bytes", "encode, ms", "decode, ms", "check, ms"]
    rows = (
        [
            *(f"{one[name]:,}" for name in ("together", "bytes")),
            *(f"{one[f'{name}_ms']:.1f}" for name in ("encode", "decode", "check")),
        ]
        for one in found["tables"]
    )
    return f"Tables of {found['pages']:,} pages. Medians of processor time.\n\n{table([head, *rows])}"


def observer(found: Found) -> str:
    """What an event costs, and what observers cost a transfer."""
    head = ["event, ns", "`Silent`", "`Recorder`", "`PrometheusObserver`", "limit", "of the limit"]
    limit = found["limit_ns"]
    rows = (
        [one["event"], *(f"{one[name]:.0f}" for name in ("silent", "recorder", "prometheus")), f"{limit:.0f}",
         f"{one['prometheus'] / limit:.2f}"]
        for one in found["events_ns"]
    )  # fmt: skip
    moved = found["transfer_s"]
    turns = ([name, f"{s * 1e3:.2f}", f"{s / moved['silent']:.3f}"] for name, s in moved.items())
    said = f"One `observe` of a histogram of `prometheus_client` takes {found['library_ns']:.0f} ns."
    return f"{table([head, *rows])}\n\n{said}\n\n{table([['transfer', 'ms, median', 'of silent'], *turns])}"


def prefix_index(found: Found) -> str:
    """What the prefix index costs."""
    times = [("miss and insert", "miss_and_insert_ms"), ("hit", "hit_ms")]
    return table(
        [
            ["of the prefix index", "measured", "limit"],
            *([name, f"{found[key]:.2f} ms", f"{found['limit_ms']:.0f} ms"] for name, key in times),
            *(
                [f"bytes a page, {name}", f"{size:.0f}", f"{found['limit_bytes']}"]
                for name, size in found["bytes_per_page"].items()
            ),
        ]
    )


def prefix_workload(found: Found) -> str:
    """With held prefixes and without, beside the ideal and the published figures; ratios; what a step may take."""
    runs = [found[name] for name in ("off", "on", "ideal")]

    def row(name: str, key: str, form: str, scale: float = 1.0) -> list[str]:
        theirs = [found["published"][name].get(key) for name in ("off", "on")]
        published = ["" if value is None else form.format(value * scale) for value in theirs]
        return [name, *(form.format(run[key] * scale) for run in runs), *published]

    requests = found["shape"]["groups"] * found["shape"]["prompts"]
    figures = [
        [f"of {requests} requests", "off", "on", "ideal", "published off", "published on"],
        row("tokens that decode held", "hit_ratio", "{:.1f}%", 100),
        row("GB on the wire", "kv_bytes", "{:,.1f}", 1e-9),
        row("GB at best", "kv_bytes_ideal", "{:,.1f}", 1e-9),
        row("TTFT mean, s", "ttft_mean", "{:.2f}"),
        row("TTFT p50, s", "ttft_p50", "{:.2f}"),
        row("TTFT p99, s", "ttft_p99", "{:.2f}"),
        row("between tokens, ms", "latency", "{:.1f}", 1e3),
        row("that, over the same batches without arrivals", "latency_at_equal_batch", "{:.4f}"),
        row("longest step, over one without arrivals", "worst_step", "{:.3f}"),
        row("requests running", "batch", "{:.0f}"),
        row("requests/s", "requests_per_s", "{:.2f}"),
    ]
    over = [["on over off", "here", "published"]]
    for name, key in (("TTFT mean", "ttft_mean"), ("requests/s", "requests_per_s"), ("between tokens", "latency")):
        both = [f"{side['on'][key] / side['off'][key]:.2f}" for side in (found, found["published"])]
        over.append([name, *both])
    limits = [["of the ideal", "here", "limit"]]
    for name, key in (
        ("bytes on the wire", "bytes_over_ideal"),
        ("TTFT", "ttft_over_ideal"),
        ("latency at equal batch", "latency_at_equal_batch"),
    ):
        limits.append([name, f"{found['ratios'][key]:.3f}", f"{found['limits'][key]:.2f}"])
    tables = (figures, over, limits, arrivals(found))
    return "\n\n".join(map(table, tables))


def arrivals(found: Found) -> Sequence[Sequence[str]]:
    """What it does to decoding how many requests may join a step."""
    default = str(found["emulation"]["arrivals_per_step"])
    runs = {"1": found["arrivals"]["one"], default: found["on"], "any number": found["arrivals"]["any"]}
    rows = (
        [most, f"{of['worst_step']:.3f}", f"{of['latency_at_equal_batch']:.4f}", f"{of['ttft_mean']:.2f}"]
        for most, of in runs.items()
    )
    return [["arrivals in a step", "longest step", "between tokens", "TTFT mean, s"], *rows]


def verify(found: Found) -> str:
    """What checksums cost."""
    names = list(found["strategies"])
    each = [found["strategies"][name]["phases"] for name in names]
    rows = [[phase, *(f"{of[phase]['p50'] * 1e3:,.1f}" for of in each)] for phase in ("checksum", "total")]
    longer = f"`staged` takes **{found['verify_cost']['staged']:.2f} times** as long."
    return f"{longer}\n\n{table([['ms, p50', *names], *rows])}"


def pipeline(found: Found) -> str:
    """Layer groups: ratios of wire to compute, then prompt lengths."""

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:,.1f}"

    def row(of: Found) -> list[str]:
        times = [ms(of[how]["p50"]) for how in ("per_chunk", "pipelined")]
        return [*times, str(of["groups"]), ms(of["bound_s"])]

    head = ["per chunk, ms", "pipelined, ms", "groups", "bound, ms"]
    overlaps = ([f"{of['ratio']:g}", *row(of), f"{of['over_bound']:.3f}", f"{of['hidden']:.1%}"]
                for of in found["overlaps"])  # fmt: skip
    lengths = ([f"{of['tokens']:,}", *row(of), f"{of['ratio']:.3f}"] for of in found["lengths"])
    ratios = table([["T / C", *head, "over the bound", "hidden"], *overlaps])
    sweep = table([["tokens", *head, "pipelined / per chunk"], *lengths])
    return f"A group cost {found['group_s'] * 1e6:,.0f} us.\n\n{ratios}\n\n{sweep}"


def worlds(found: Found) -> str:
    """The amount of simulation in a sentence."""
    hours, faults = found["simulated_seconds"] / 3600, found["faults"]
    return (
        f"**{found['seeds']:,} worlds, {found['violations']:,} violations**: {found['events']:,} events in {hours:.1f} "
        f"simulated hours, with {sum(faults.values()):,} faults of {len(faults)} kinds, at least "
        f"{min(faults.values()):,} of each. A world has {found['rooms_per_seed']:.1f} rooms and "
        f"{found['ranks_per_seed']:.1f} ranks."
    )


def mutants(found: Found) -> str:
    """The cost of finding planted bugs: the simulator's figure of merit, then the bugs of each rule."""
    per_minute = f"**{found['killed_per_cpu_minute']:.1f} planted bugs found per CPU minute**"
    said = f"{per_minute}: {found['killed']} of {found['planted']} in {found['cpu_seconds']:,.0f} CPU seconds."

    def rule(bug: Found) -> str:
        return str(bug["rule"] or "survives")

    rows = (
        [name, f"{len(of)}", f"{median(bug['seeds'] for bug in of):,.0f}", f"{max(bug['seeds'] for bug in of):,}",
         f"{sum(bug['cpu_seconds'] for bug in of):,.1f}"]
        for name, of in ((name, list(group)) for name, group in groupby(sorted(found["bugs"], key=rule), rule))
    )  # fmt: skip
    return f"{said}\n\n{table([['rule', 'planted bugs', 'seeds, median', 'most', 'CPU seconds'], *rows])}"


def idle(found: Found) -> str:
    """The idle policy without each of its knobs: ratios over the policy as it is, of all cases."""
    figures = [(mode, name) for mode in ("idle", "busy") for name in ("p50", "throughput", "cpu")]
    cells: dict[str, list[list[Mapping[str, float]]]] = {}
    for case in found["cases"]:
        for knob, of in case["variants"].items():
            if knob != "as it is":
                of_case = [of["idle_cpu"], *(of[f"all, {mode}"][name] for mode, name in figures)]
                cells.setdefault(knob, []).append(of_case)

    def cell(every: Sequence[Mapping[str, float]]) -> str:
        ratios = [of["ratio"] for of in every]
        return f"{min(ratios):.2f} to {max(ratios):.2f} ({sum(not of['low'] <= 1 <= of['high'] for of in every)})"

    head = ["without", "cases", "idle CPU", *(f"{name}, {mode}" for mode, name in figures)]
    return table([head, *([knob, f"{len(of)}", *map(cell, zip(*of, strict=True))] for knob, of in cells.items())])


def pairs(found: Found) -> str:
    """Versions of the library in turns."""
    rows = (
        [
            f"`{row['transport']}`, {row['tokens']:,} tokens: `{row['old']}`, `{row['new']}`",
            f"{row['old_ms']:.2f}",
            f"{row['new_ms']:.2f}",
            f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
        ]
        for row in found["rows"]
    )
    return table([["old, new", "old, ms", "new, ms", "new / old"], *rows])
