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


def above(shares_of: Iterable[float], why: str) -> str:
    """The note below a table with a share above 100%; empty if there is none."""
    return f"\n\nA share above 100%: {why}" if max(shares_of, default=0.0) > 1 else ""


PLAIN_CEILING = (
    "each pair of ranks has one plain write in flight, and a transport may have several; the difference is less than "
    "the spread."
)
