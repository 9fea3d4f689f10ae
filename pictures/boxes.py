"""Boxes of two prefill ranks and one decode rank, what they have in common, and its segments."""

from __future__ import annotations

from disagg_kv import CacheSpec, LayerId, shard
from disagg_kv.geometry import Shard

from .drawing import Picture

SPEC = CacheSpec.kv(num_layers=4, kv_heads=4, head_dim=16, dtype="bfloat16")
ROWS, CELL, HEAD = 6, 18, 46
"""Rows that are drawn, their height and a head's width in pixels."""


def boxes() -> Picture:
    """K of one layer on each rank; then the segments of one writer."""
    p = Picture("Boxes, their intersections, and segments", 880, 400)
    prefill = [shard(SPEC, tp=2, rank=rank) for rank in range(2)]
    p.text(86, 28, "prefill, TP 2", "title")
    p.text(392, 28, "decode, TP 1", "title")
    p.text(720, 28, "segments of the orange box", "title")
    _box(p, 40, 66, prefill[0], "cell", "rank 0")
    _box(p, 40, 236, prefill[1], "box", "rank 1")
    _decode(p, 300, 150, prefill)
    p.line("bytes", "M138 120C210 120 230 200 292 200")
    p.text(206, 112, "intersection", "small", "start")
    p.text(206, 128, "with decode", "small", "start")
    p.line("bytes", "M138 290C210 290 230 220 292 220")
    p.text(40, 384, "K of one layer: rows down, heads across. Each cell of decode has one writer.", "small", "start")
    _segments(p, 610, 80)
    return p


def _heads(held: Shard) -> range:
    (units,) = held.units(LayerId(0), "k")
    return units


def _box(p: Picture, x: float, y: float, held: Shard, kind: str, name: str) -> None:
    heads = _heads(held)
    p.text(x + len(heads) * HEAD / 2, y - 20, name, "small")
    for column, head in enumerate(heads):
        p.text(x + (column + 0.5) * HEAD, y - 5, f"head {head}", "small")
    for row in range(ROWS):
        p.cells(kind, x, y + row * CELL, HEAD, CELL, len(heads))


def _decode(p: Picture, x: float, y: float, writers: list[Shard]) -> None:
    """All heads; the colour of a cell is that of its writer."""
    for held, kind in zip(writers, ("cell", "box"), strict=True):
        heads = _heads(held)
        for head in heads:
            p.text(x + (head + 0.5) * HEAD, y - 5, f"head {head}", "small")
        for row in range(ROWS):
            p.cells(kind, x + heads.start * HEAD, y + row * CELL, HEAD, CELL, len(heads))
    p.text(x + 2 * HEAD, y - 20, "rank 0", "small")


def _segments(p: Picture, x: float, y: float) -> None:
    """Rows x layers, cut in both directions."""
    width, height = 52, 26
    for layer in range(4):
        p.text(x + (layer + 0.5) * (width + 4 * (layer > 1)) + 4, y - 6, f"layer {layer}", "small")
    for rows in range(3):
        for layers in range(2):
            left, top = x + layers * (2 * width + 12), y + rows * (3 * height + 12)
            tall = 3 if rows < 2 else 1
            p.rect("cell", left, top, 2 * width, tall * height, 0)
            p.text(left + width, top + tall * height / 2 + 4, f"segment {rows * 2 + layers}")
    for rows, text in enumerate(("rows 0 to 31", "rows 32 to 63", "rows 64 to 69")):
        tall = 3 if rows < 2 else 1
        p.text(x - 6, y + rows * (3 * height + 12) + tall * height / 2 + 4, text, "small", "end")
    p.text(x + 2 * width + 6, y + 230, "A segment is gathered, written", "small")
    p.text(x + 2 * width + 6, y + 246, "and scattered as one piece.", "small")
