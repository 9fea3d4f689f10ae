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


def lines() -> Iterator[Line]:
    """TP 1 to 1: both paths inside one GPU, and ``staged`` between two."""
    for name, places in (("h100_mapped.json", "one H100"), ("h200_transfer_two.json", "two H200s")):
        cases = json.loads((RESULTS / name).read_text())["cases"]
        for kind, strategy in (("bytes", "mapped"), ("call" if places == "one H100" else "frame", "staged")):
            points = [
                (case["bytes"] / 2**20, case["share"])
                for case in cases
                if (case.get("transport"), case.get("tp"), case["strategy"]) == ("cuda_ipc", "1->1", strategy)
            ]
            if points:
                yield kind, f"{strategy}, {places}", sorted(points)


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
    p.text((LEFT + RIGHT) / 2, BOTTOM + 40, "MiB of a request, TP 1 to TP 1 over cuda_ipc", "small")
    p.text(LEFT, TOP - 16, "share of a plain copy of the same bytes in the same run", "small", "start")
    for kind, name, points in lines():
        at = [place(*point) for point in points]
        p.line(kind, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at), head=False)
        p.text(at[-1][0] + 8, at[-1][1] + 4, name, "small", "start")
    return p
