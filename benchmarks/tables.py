"""What the tables of all results have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]


def table(rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first row is the head."""
    head, *body = rows
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))
