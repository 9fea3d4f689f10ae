"""A request whose first rows decode holds already: what counts, and what is sent."""

from __future__ import annotations

from .drawing import Picture

ROWS, HELD, PREFILL_PAGE, DECODE_PAGE = 60, 45, 4, 16
"""As in the example of docs/incremental.md."""

LEFT, ROW = 150, 11.5


def prefix() -> Picture:
    """Rows from left to right, on both sides."""
    p = Picture("A prefix that decode holds", 880, 290)
    counts = HELD // DECODE_PAGE * DECODE_PAGE

    def x(row: float) -> float:
        return LEFT + row * ROW

    p.text(x(0), 30, "row 0", "small")
    p.text(x(counts), 30, f"row {counts}", "small")
    p.text(x(HELD), 30, f"row {HELD}", "small")
    p.text(x(ROWS), 30, f"row {ROWS}", "small")
    for row in (0, counts, ROWS):
        p.line("life", f"M{x(row)} 36V236", head=False)

    p.text(LEFT - 12, 62, "decode holds", "", "end")
    p.rect("port", x(0), 46, x(HELD) - x(0), 26, 2)
    p.text(x(HELD / 2), 63, f"held={HELD}", "portname")

    p.text(LEFT - 12, 112, "decode's pages", "", "end")
    for page in range(-(-ROWS // DECODE_PAGE)):
        stop = min((page + 1) * DECODE_PAGE, ROWS)
        kind = "port" if stop <= counts else "cell"
        p.rect(kind, x(page * DECODE_PAGE), 96, x(stop) - x(page * DECODE_PAGE), 26, 2)
    p.text(x(counts / 2), 90, f"expect returns {counts}: whole pages only", "small")
    p.text(x((counts + ROWS) / 2), 90, "written again, or for the first time", "small")

    p.text(LEFT - 12, 202, "prefill's pages", "", "end")
    for page in range(ROWS // PREFILL_PAGE):
        kind = "engine" if page * PREFILL_PAGE < counts else "cell"
        p.rect(kind, x(page * PREFILL_PAGE), 186, PREFILL_PAGE * ROW, 26, 2)
    p.text(x(counts / 2), 230, "handed over, and dropped", "small")
    p.text(x((counts + ROWS) / 2), 230, f"sent: {ROWS - counts} rows", "small")
    p.line("bytes", f"M{x((counts + ROWS) / 2)} 182V128")
    p.text(LEFT, 256, f"Pages of {DECODE_PAGE} rows on decode, of {PREFILL_PAGE} on prefill.", "small", "start")
    p.text(LEFT, 274, "Prefill hands over all rows; decode says which of them are sent.", "small", "start")
    return p
