"""Draws the gaps, or of SGLang the times to the first token, of one topology: a column for each size of a block."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables import Found
from pictures.drawing import Picture

from .cases import TOPOLOGIES
from .tables import medians, modes, runs

LEFT, TOP, BAR, NUMBER = 178, 62, 17, 44
WIDTH = 900


def kind(mode: str) -> str:
    """The style of a bar: ours stand out, and so does the order."""
    if mode.startswith(("ours", "other")):
        return "cell"
    return "box" if mode.endswith("at once") else "engine"


def plot(found: Found, topology: str) -> Picture:
    """Medians as bars; a thin line goes on to the 90 % quantile. A row has one scale, so its bars compare.

    Raises:
        ValueError: no run has this topology.
    """
    of = [run for run in runs(found) if run["topology"] == topology]
    if not of:
        raise ValueError(f"no run has the topology {topology}")
    every = list(dict.fromkeys(mode for run in of for mode in modes(run)))
    rows = sorted(every, key=lambda mode: (not mode.endswith("at once"), every.index(mode)))
    lengths = sorted({one["tokens"] for run in of for one in run["singles"]})
    height = TOP + len(lengths) * (len(rows) * BAR + 34) + 8
    prefill, decode = TOPOLOGIES[topology]
    sglang = of[0].get("engine") == "sglang"
    what, unit = ("Time to", "pages") if sglang else ("Gap between prefill's answer and", "blocks")
    picture = Picture(f"{what} decode's first token, TP {prefill}->{decode}", WIDTH, height)
    picture.text(16, 24, f"{picture.title}: ms, median, and to the 90% quantile", "title", "start")
    column = (WIDTH - LEFT) / len(of)
    for number, run in enumerate(of):
        picture.text(LEFT + number * column, TOP - 12, f"{unit} of {run['block']}", "small", "start")
    y = float(TOP)
    for length in lengths:
        picture.text(16, y + 12, f"{length:,} tokens", "title", "start")
        y += 22
        _row(picture, of, rows, length, y, column)
        y += len(rows) * BAR + 12
    return picture


def _row(picture: Picture, of: Sequence[Found], rows: Sequence[str], length: int, top: float, column: float) -> None:
    figures = [medians(run) for run in of]
    longest = max(one[key][1] for one in figures for key in one if key[1] == length)
    for line, mode in enumerate(rows):
        y = top + line * BAR
        picture.text(LEFT - 10, y + 11, mode, "small", "end")
        for number, one in enumerate(figures):
            if (mode, length) not in one:
                continue
            left = LEFT + number * column
            p50, p90 = (value / longest * (column - NUMBER - 6) for value in one[mode, length])
            picture.rect(kind(mode), left, y, max(p50, 1), BAR - 4, 1)
            if p90 > p50:
                picture.line("call", f"M{left + p50:.1f} {y + (BAR - 4) / 2:.1f}H{left + p90:.1f}", head=False)
            picture.text(left + max(p90, p50) + 5, y + 11, f"{one[mode, length][0]:.1f}", "small", "start")
