"""The share of a plain copy that whole transfers reach, against their size, from the committed results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import log2
from pathlib import Path

from .drawing import Picture

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LEFT, RIGHT, TOP, BOTTOM = 70, 640, 40, 330
MIB = (32, 64, 128, 256, 512, 1024)

Line = tuple[str, str, Sequence[tuple[float, float]]]
"""A kind of line, its name, and its points: MiB and share."""


KINDS = {"mapped, bells": "bytes", "mapped": "call", "staged": "frame"}
"""The runs that have a line, and how it is drawn."""

PLAIN = ("programs", "busy", "switch_us", "wire_GB_per_s", "decode_step_us")
"""What a case must be without."""


def lines() -> Iterator[Line]:
    """TP 1 to 1 between two GPUs, each run until decode's engine knows."""
    cases = json.loads((RESULTS / "h100_paths.json").read_text())["cases"]
    plain = [case for case in cases if case["tp"] == "1->1" and not any(case.get(name) for name in PLAIN)]
    for strategy, kind in KINDS.items():
        points = [(c["bytes"] / 2**20, c["copies_us"] / c["total_us"]) for c in plain if c["strategy"] == strategy]
        if points:
            yield kind, strategy.replace("bells", "flags"), sorted(points)


def place(mib: float, share: float) -> tuple[float, float]:
    """Where a point lies."""
    across = (log2(mib) - log2(MIB[0])) / (log2(MIB[-1]) - log2(MIB[0]))
    return LEFT + across * (RIGHT - LEFT), BOTTOM - share * (BOTTOM - TOP)


def paths() -> Picture:
    """Axes and a line for each path."""
    p = Picture("Share of a plain copy against the size of a request", 860, 390)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(MIB[0], share)
        p.line("life", f"M{LEFT} {y:g}L{RIGHT} {y:g}", head=False)
        p.text(LEFT - 10, y + 4, f"{share:.0%}", "small", "end")
    for mib in MIB:
        x, _ = place(mib, 0.0)
        p.text(x, BOTTOM + 18, f"{mib:,}", "small")
    p.text((LEFT + RIGHT) / 2, BOTTOM + 40, "MiB of a request, TP 1 to TP 1 over cuda_ipc, two H100s", "small")
    p.text(LEFT, TOP - 16, "share of a plain copy of the same bytes in the same run", "small", "start")
    for kind, name, points in lines():
        at = [place(*point) for point in points]
        p.line(kind, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at), head=False)
        p.text(at[-1][0] + 8, at[-1][1] + 4, name, "small", "start")
    return p
