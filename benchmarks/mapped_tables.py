"""The tables of mapped memory between processes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.tables import Found, table


def gpu_proof(found: Found) -> str:
    """What was shown of correctness: tokens of a model, processes that were killed, the last write of one."""
    demos, kills, late = found["demos"], found["kills"], found["last_write"]
    head = ["`" + found["transport"] + "`", "TP", "requests", "KiB", "tokens", "wrong bytes"]
    rows = (
        [
            f"`{row['strategy']}`",
            row["tp"],
            str(row["requests"]),
            f"{row['kv_bytes'] >> 10:,}",
            "equal" if row["tokens_equal"] else "differ",
            str(row["wrong_bytes"]),
        ]
        for row in demos["rows"]
    )
    rooms, most = kills["rooms_of_survivors"], late["last_write_ms"]["most"]
    said = (
        f"`{kills['command']}` killed {kills['writers']} writers and {kills['owners']} owners of memory, "
        f"{kills['pairs_at_once']} pairs of instances at once. Of the others' rooms {rooms['DONE']} succeeded and "
        f"{rooms['FAILED']} failed. Wrong bytes in what succeeded, and in free pages: {kills['wrong_bytes']}."
    )
    seen = f"The last write was seen {most:g} ms after the exit." if most else "No write was seen after the exit."
    last = (
        f"`{late['command']}`: {late['kills']} writers were killed with {late['kernels_ahead']} or more kernels of "
        f"{late['bytes'] >> 20} MiB launched. {seen}"
    )
    return f"{table([head, *rows])}\n\n{said}\n\n{last}"


def gpu_flags(found: Found) -> str:
    """Until decode's engine sees its room released, whose engine waits or computes between two polls."""
    cases: dict[tuple[str, str, int], dict[bool, list[Found]]] = {}
    for case in found["cases"]:
        key = case["strategy"], case["tp"], case["bytes"]
        cases.setdefault(key, {}).setdefault(case["busy"], []).append(case)

    def rows() -> Iterator[list[str]]:
        for (strategy, tp, nbytes), modes in cases.items():
            some = (
                " and ".join(f"{case['total_us']:,.0f} ({case['total_p95_us']:,.0f})" for case in modes[busy])
                for busy in (False, True)
            )
            copy = median(case["copies_us"] for of in modes.values() for case in of)
            yield [f"{strategy}, TP {tp}, {nbytes >> 20:,} MiB", f"{copy:,.0f}", *some]

    calls = [case["call_us"] for case in found["cases"]]
    said = "20 repeats a round; two rounds, each on a host of its own. The engine's call that closes the forward pass "
    said += f"takes {min(calls):,.0f} to {max(calls):,.0f} us (p50), as it begins the copy."
    return f"{said}\n\n{table([['us, p50 (p95)', 'plain copy', 'waiting', 'busy'], *rows()])}"


def gpu_staging(found: Found) -> str:
    """What `staged` reaches with other sizes of staging memory: shares of a plain copy, or of the wire."""
    cases: dict[tuple[int, int, int], dict[tuple[str, int], float]] = {}
    for case in found["cases"]:
        wire = case["wire_GB_per_s"]
        ceiling = case["copies_us"] if wire is None else case["bytes"] / wire / 1e3
        size = case["slots"], case["slot_mib"], case["ring_mib"]
        cases.setdefault(size, {})[case["kind"], case["bytes"] >> 20] = ceiling / case["total_us"]
    kinds = {"ipc": "`cuda_ipc`", "busy": "`cuda_ipc`, busy", "nixl": "NIXL", "wire": "50 GB/s"}
    columns = [(kind, mib) for kind in kinds for mib in (256, 1024)]
    head = ["slots, ring", *(f"{kinds[kind]}, {mib:,} MiB" for kind, mib in columns)]
    rows = [
        [f"{slots} x {slot} MiB, {ring:,} MiB", *(f"{of[one]:.2f}" if one in of else "" for one in columns)]
        for (slots, slot, ring), of in sorted(cases.items())
    ]
    return table([head, *rows])


def gpu_contact(found: Found) -> str:
    """The first requests of two ranks whose kernels were never compiled."""
    made = " and ".join(f"{found['constructor_s'][role]:.1f} s ({role})" for role in ("prefill", "decode"))
    requests = ", ".join(f"{seconds * 1e3:,.1f}" for seconds in found["requests_s"])
    said = (
        f"The constructors compile {sum(found['kernels'].values())} kernels in {made}. Requests of 1,024 tokens after "
    )
    said += f"that take {requests} ms; the first of them connects the ranks. "
    return f"{said}They compile {found['compiled_later']} kernels."


def gpu_launch(found: Found) -> str:
    """A copy into mapped pages: the call that launches it, and the launch alone by both ways."""
    cases = {(c["what"], c["beside"], c["cold"]): c["us"] for c in found["cases"]}
    (whole,) = {part for (what, _, _), us in cases.items() if what == "whole" for part in us}
    columns = (
        ("whole", whole),
        ("in parts", "the driver's call"),
        ("in parts, by Triton's launcher", "Triton's launcher"),
    )
    rows = [
        [
            f"{beside}, {'after a sleep' if cold else 'at work'}",
            *(
                f"{cases[what, beside, cold][part]['p50']:,.0f} / {cases[what, beside, cold][part]['p95']:,.0f}"
                for what, part in columns
            ),
        ]
        for beside in dict.fromkeys(c["beside"] for c in found["cases"])
        for cold in (False, True)
    ]
    head = ["us, p50 / p95; beside", "the whole call", "the driver's call alone", "Triton's launcher alone"]
    return table([head, *rows])


def gpu_paths_by_size(found: Found) -> str:
    """Every case of transfers between GPUs: each path, and its share of a plain copy, until decode knows.

    A column is a path over the first transport of the file, or names another one, too.
    """
    first = found["cases"][0]["transport"]

    def column(case: Found) -> str:
        by = str(case["strategy"]).replace("bells", "flags")
        return by if case["transport"] == first else f"{by}, {case['transport']}"

    cases: dict[tuple[object, ...], dict[str, Found]] = {}
    for case in found["cases"]:
        shape = tuple(case.get(name) for name in ("tp", "bytes", "programs", "busy"))
        cases.setdefault(shape, {})[column(case)] = case
    strategies = list(dict.fromkeys(map(column, found["cases"])))

    def cell(case: Found | None) -> str:
        if case is None:
            return ""
        return f"{case['total_us']:,.0f} / {case['total_p95_us']:,.0f} ({case['copies_us'] / case['total_us']:.0%})"

    def rows() -> Iterator[list[str]]:
        for of in cases.values():
            one = next(iter(of.values()))
            extra = [
                f"{one['programs']} programs" if one.get("programs") else "",
                "busy" if one.get("busy") else "",
            ]
            said = ", ".join([f"TP {one['tp']}, {one['bytes'] >> 20:,} MiB", *filter(None, extra)])
            yield [said, f"{one['copies_us']:,.0f}", *(cell(of.get(name)) for name in strategies)]

    pages, repeats = found["pages"], found["settings"]["repeats"]
    head = ["us, p50 / p95 (share of the copy)", "plain copy", *strategies]
    return f"{repeats} repeats in turns; pages of {pages[0]} into {pages[1]}.\n\n{table([head, *rows()])}"


def gpu_instead_in_short(found: Found) -> str:
    """The fastest of ours beside a plain copy and NIXL, at the sizes of most requests."""
    rows = (
        [
            f"{row['tokens']:,} tokens ({row['bytes'] >> 20:,} MiB), pages of {row['page']}",
            *(f"{row[way] / 1e3:,.2f}" for way in ("copy_us", "mapped_bells_us", "nixl_us")),
        ]
        for row in found["rows"]
        if row["tokens"] in (1024, 8192)
    )
    return table([["ms, median", "plain copy", "`disagg_kv`", "NIXL, a descriptor a page and layer"], *rows])


def gpu_instead(found: Found) -> str:
    """What a user would take instead, for the same pages."""
    ways = ("copy_us", "mapped_bells_us", "mapped_us", "staged_us", "nixl_us", "nccl_us")
    head = [
        "us, median",
        "plain copy",
        "mapped, flags",
        "mapped",
        "staged",
        "NIXL, a descriptor a page and layer",
        "NCCL",
    ]
    rows = (
        [
            f"{row['tokens']:,} tokens, pages of {row['page']}",
            *(f"{row[way]:,.0f}" if way in row else "" for way in ways),
        ]
        for row in found["rows"]
    )
    return table([head, *rows])
