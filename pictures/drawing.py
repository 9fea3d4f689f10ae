"""Draws a picture as SVG text: boxes, lines and words, with the colours of light and dark themes.

Widths of words are estimates for a common sans-serif font, so that :meth:`Picture.clashes` finds words that overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import cos, pi, sin
from typing import Literal
from xml.sax.saxutils import escape

from attrs import Factory, define, frozen

Anchor = Literal["start", "middle", "end"]

STYLE = """
text { fill: #1f2937; }
.bg { fill: #ffffff; }
.panel { fill: #f8fafc; stroke: #cbd5e1; }
.title { font-weight: bold; }
.small { font-size: 11px; fill: #475569; }
.box { fill: #e0e7ff; stroke: #4f46e5; }
.engine { fill: #e2e8f0; stroke: #64748b; }
.cell { fill: #ffedd5; stroke: #c2410c; }
.port { fill: #dcfce7; stroke: #15803d; }
.portname { font-size: 12px; fill: #14532d; }
.hole { fill: #fee2e2; stroke: #b91c1c; stroke-dasharray: 4 3; }
.free { fill: none; stroke: #94a3b8; }
.life { fill: none; stroke: #94a3b8; stroke-dasharray: 2 4; }
.call { fill: none; stroke: #475569; stroke-width: 1.4; }
.frame { fill: none; stroke: #475569; stroke-width: 1.4; stroke-dasharray: 5 4; }
.bytes { fill: none; stroke: #c2410c; stroke-width: 3; }
.head { fill: #475569; }
.bytehead { fill: #c2410c; }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb; }
  .bg { fill: #0f172a; }
  .panel { fill: #1e293b; stroke: #475569; }
  .small { fill: #cbd5e1; }
  .box { fill: #312e81; stroke: #a5b4fc; }
  .engine { fill: #334155; stroke: #94a3b8; }
  .cell { fill: #7c2d12; stroke: #fdba74; }
  .port { fill: #14532d; stroke: #86efac; }
  .portname { fill: #dcfce7; }
  .hole { fill: #7f1d1d; stroke: #fca5a5; }
  .call, .frame { stroke: #cbd5e1; }
  .bytes { stroke: #fdba74; }
  .head { fill: #cbd5e1; }
  .bytehead { fill: #fdba74; }
}
""".strip()

MARKERS = """<defs>
<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>
<marker id="b" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="4" markerHeight="4" orient="auto"><path class="bytehead" d="M0 0L8 4L0 8z"/></marker>
</defs>"""  # noqa: E501

SIZES = {"small": 11.0, "portname": 12.0}
EM = 0.55
"""Width of an average letter, in font sizes."""


@frozen
class Words:
    """A line of text at its place, and the rectangle that it takes."""

    text: str
    x: float
    y: float
    kind: str
    anchor: Anchor

    @property
    def size(self) -> float:
        """Of the font, in pixels."""
        return SIZES.get(self.kind, 13.0)

    @property
    def left(self) -> float:
        """Where it begins."""
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]
        return self.x - share * self.width

    @property
    def width(self) -> float:
        """Estimated."""
        return len(self.text) * self.size * EM * (1.1 if self.kind == "title" else 1.0)

    def meets(self, other: Words) -> bool:
        """Whether the two overlap."""
        across = self.left < other.left + other.width and other.left < self.left + self.width
        return across and self.y - 0.8 * self.size < other.y and other.y - 0.8 * other.size < self.y


@define
class Picture:
    """A drawing of ``width`` x ``height`` pixels; later parts lie above earlier ones."""

    title: str
    width: int
    height: int
    _parts: list[str] = Factory(list)
    _words: list[Words] = Factory(list)

    def rect(self, kind: str, x: float, y: float, width: float, height: float, rx: float = 6) -> None:
        """A box."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx:g}"/>'
        )

    def box(self, kind: str, x: float, y: float, width: float, height: float, name: str, below: str = "") -> None:
        """A box with its name, and a smaller line below that."""
        self.rect(kind, x, y, width, height)
        middle = x + width / 2
        if below:
            self.text(middle, y + height / 2 - 4, name)
            self.text(middle, y + height / 2 + 12, below, "small")
        else:
            self.text(middle, y + height / 2 + 5, name)

    def port(self, x: float, y: float, name: str) -> None:
        """A place for the user's own class, around a middle."""
        width = len(name) * 7.0 + 20
        self.rect("port", x - width / 2, y, width, 20, 10)
        self.text(x, y + 14, name, "portname")

    def cells(self, kind: str, x: float, y: float, width: float, height: float, count: int) -> None:
        """Boxes in a row."""
        for i in range(count):
            self.rect(kind, x + i * width, y, width, height, 0)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: Anchor = "middle") -> None:
        """A line of words; ``y`` is their base line."""
        self._words.append(Words(text, x, y, kind, anchor))
        of_kind = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{of_kind} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, kind: str, path: str, head: bool = True) -> None:
        """A line along an SVG path, with an arrow at its end."""
        marker = f' marker-end="url(#{"b" if kind == "bytes" else "a"})"' if head else ""
        self._parts.append(f'<path class="{kind}" d="{path}"{marker}/>')

    def arc(self, kind: str, x: float, y: float, inner: float, outer: float, start: float, stop: float) -> None:
        """A part of a ring around (x, y); ``start`` and ``stop`` are shares of a turn, clockwise from the top."""
        large = int(stop - start > 0.5)
        (a, b), (c, d) = at_turn(x, y, outer, start), at_turn(x, y, outer, stop)
        (e, f), (g, h) = at_turn(x, y, inner, stop), at_turn(x, y, inner, start)
        path = (
            f"M{a:.1f} {b:.1f}A{outer:g} {outer:g} 0 {large} 1 {c:.1f} {d:.1f}"
            f"L{e:.1f} {f:.1f}A{inner:g} {inner:g} 0 {large} 0 {g:.1f} {h:.1f}Z"
        )
        self.line(kind, path, head=False)

    def clashes(self) -> Iterator[str]:
        """Words that overlap other words, or leave the picture."""
        for one, other in combinations(self._words, 2):
            if one.meets(other):
                yield f"{one.text!r} meets {other.text!r}"
        for one in self._words:
            if one.left < 0 or one.left + one.width > self.width or not 0 < one.y < self.height:
                yield f"{one.text!r} leaves the picture"

    def svg(self) -> str:
        """The whole file."""
        lines: Sequence[str] = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="13" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            MARKERS,
            f'<rect class="bg" width="{self.width}" height="{self.height}" rx="8"/>',
            *self._parts,
            "</svg>\n",
        )
        return "\n".join(lines)


def at_turn(x: float, y: float, radius: float, turn: float) -> tuple[float, float]:
    """The point of a circle, ``turn`` of a turn clockwise from its top."""
    return x + radius * sin(2 * pi * turn), y - radius * cos(2 * pi * turn)
