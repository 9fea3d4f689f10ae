"""Your engine, disagg_kv and the wire: what the README shows first."""

from __future__ import annotations

from .drawing import Picture


def overview() -> Picture:
    """Two engines, an endpoint below each, and between them frames and one write."""
    p = Picture("Your engine, disagg_kv, the wire", 880, 260)
    for x, side, calls in ((20, "prefill", "step, finish, poll"), (580, "decode", "open, expect, poll")):
        p.rect("panel", x, 10, 280, 240, 10)
        p.text(x + 140, 32, f"{side}, on its own GPUs", "title")
        p.box("engine", x + 20, 46, 240, 46, "your engine", calls)
        p.line("call", f"M{x + 140} 92V118")
        p.box("box", x + 20, 122, 240, 46, "disagg_kv", "any TP, page size, layout, dtype")
        p.cells("cell", x + 20, 200, 30, 26, 8)
        p.text(x + 140, 244, "pages of your cache, in place", "small")
    p.line("frame", "M302 138H576")
    p.line("frame", "M578 154H304")
    p.text(440, 130, "control frames", "small")
    p.line("bytes", "M302 213H576")
    p.text(440, 184, "the wire: NVLink, shared memory,", "small")
    p.text(440, 200, "NIXL, Mooncake, or yours", "small")
    p.text(440, 234, "few large writes, or one kernel", "small")
    p.line("call", "M160 168V196")
    p.line("call", "M720 168V196")
    return p
