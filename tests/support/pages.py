"""Code blocks and tables of README and docs, for tests that run them or hold them against the code.

A block may have a marker in the line before its fence: ``<!-- test: skip <reason> -->``, ``<!-- test: output -->`` for
what the blocks of Python before it print, or a word by which :func:`marked` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def name_of(page: Path) -> str:
    """The path of a page in the repository, as the id of a test."""
    return str(page.relative_to(ROOT))


_FENCE = re.compile(
    r"^(?:<!-- test: (?P<marker>[^\n]+?) -->\n)?```(?P<language>\w+)[^\n]*\n(?P<source>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


@frozen
class Block:
    """One fenced block: its first line of code is line ``line`` of the page, counted from 1."""

    page: Path
    line: int
    language: str
    marker: str
    source: str

    @property
    def skipped(self) -> bool:
        """True where the page says, with a reason, that it is not run."""
        return self.marker.startswith("skip ")

    def run(self, namespace: dict[str, object]) -> None:
        """Execute it; tracebacks name the page and its line."""
        exec(compile("\n" * (self.line - 1) + self.source, str(self.page), "exec", dont_inherit=True), namespace)


def parse(text: str, page: Path) -> Sequence[Block]:
    """Every fenced block of ``text`` that names its language, in order."""
    return [
        Block(
            page=page,
            line=text.count("\n", 0, m.start("source")) + 1,
            language=m["language"],
            marker=m["marker"] or "",
            source=m["source"],
        )
        for m in _FENCE.finditer(text)
    ]


def blocks(page: Path) -> Sequence[Block]:
    """Every fenced block of a page that names its language, in order."""
    return parse(page.read_text(), page)


def marked(page: Path, marker: str) -> str:
    """The source of the page's blocks with that marker, as one text."""
    return "\n".join(block.source for block in blocks(page) if block.marker == marker)


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The cells of every table below its head, under the head's first cell; a later table replaces one of that name."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in (*page.read_text().splitlines(), ""):
        if line[:1] == "|":
            rows.append([cell.strip(" `") for cell in line.strip("|").split("|")])
        elif rows:
            found[rows[0][0]] = rows[2:]
            rows = []
    return found
