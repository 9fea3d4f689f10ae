"""The table of conversions through a wire."""

from __future__ import annotations

from benchmarks.tables import Found, table


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
