"""The tables of kernels, of staged transfers and of layer groups on GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks.tables import PLAIN_CEILING, Found, above, table

COPY_CEILING = (
    "the copy has the same number of contiguous bytes and is measured beside the kernel. It does not bound the memory."
)


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


def _shares(values: Iterable[float]) -> str:
    """From the least to the most of them."""
    least, most = min(values := list(values)), max(values)
    return f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"


def _near(cases: Sequence[Found]) -> Iterator[str]:
    """Staged transfers of each size a pair of ranks that has a limit, against it."""
    for mib, limit in ((256, 0.70), (1024, 0.85)):
        of = [c for c in cases if c["strategy"] == "staged" and _mib_a_pair(c) == mib and c["tp"] != "1->1"]
        if of:
            met = sum(c["share"] >= limit for c in of)
            yield (
                f"With {mib:,} MiB per pair of ranks, without TP 1->1: {_shares(c['share'] for c in of)} "
                f"of plain copies; in the wire phase {_shares(c['share_of_wire'] for c in of)}. "
                f"{met} of {len(of)} cases meet the limit of {limit:.0%}."
            )


def _mib_a_pair(case: Found) -> int:
    pairs: int = max(map(int, case["tp"].split("->")))
    mib: int = case["bytes"] // pairs >> 20
    return mib


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
    cases = found["cases"]
    paths = {c.get("path", "staged") for c in cases}

    def wire(case: Found) -> str:
        speed = case["wire_GB_per_s"]
        said = "none emulated" if speed is None else f"{speed:g} GB/s"
        return f"{said}, `{case['path']}`" if len(paths) > 1 and "path" in case else said

    def row(case: Found) -> list[str]:
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

    near = sum(c["over_bound"] <= 1.05 for c in cases)
    even = [c for c in cases if 0.5 <= c["transfer_ms"] / c["compute_ms"] <= 2 and "quiet" in c]
    quiet = sum(c["quiet"]["over_bound"] <= 1.05 for c in even)
    where = (
        f", and {quiet} of the {len(even)} with T/C from 0.5 to 2 in the quiet quarter of their turns" if even else ""
    )
    slower = sum(c["pipelined_over_per_chunk"] > 1.03 for c in cases)
    said = (
        f"{near} of {len(cases)} cases are within 5% of the bound{where}; {slower} of {len(cases)} are more than 3% "
        f"slower than per chunk. Devices: {', '.join(found['settings']['devices'])}."
    )
    said += "".join(_models(cases))
    names = ("wire", "tokens", "C, ms", "T, ms", "per chunk, ms", "pipelined, ms", "groups", "bound, ms")
    head = [*names, "over the bound", "quiet", "hidden", "pipelined / per chunk"]
    return f"{said}\n\n{table([head, *map(row, cases)])}"


def _models(cases: Sequence[Found]) -> Iterator[str]:
    """What a path costs the model more than the first path does."""
    others = [c for c in cases if c.get("model_over_first", 1) != 1]
    if others:
        ratios = ((c["tokens"], c["model_per_chunk_over_first"], c["model_over_first"]) for c in others)
        of = ", ".join(f"{tokens:,} tokens: {one:.3f}, {grouped:.3f}" for tokens, one, grouped in ratios)
        yield f"\n\nThe forward pass with `{others[0]['path']}` over that with `{cases[0]['path']}`, at once and in "
        yield f"groups: {of}."


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


def converted(found: Found) -> str:
    """Whole transfers with a conversion on the way and without one, through the same wire."""
    shape = found["shape"]
    rows = (
        [
            f"{row['wire_GB_per_s']:g} GB/s",
            *(f"{row['ms'][name]:,.1f}" for name in ("bfloat16", "float8_e4m3fn")),
            f"{row['ratio']:.2f}",
        ]
        for row in found["rows"]
    )
    said = f"{shape['tokens']:,} tokens, {shape['layers']} layers, {shape['heads']} heads of {shape['head_dim']}."
    return f"{said}\n\n{table([['wire', 'bfloat16, ms', 'to float8_e4m3fn, ms', 'ratio'], *rows])}"
