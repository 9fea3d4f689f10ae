"""The table of the documentation says what the classes say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import attrs
import pytest

from disagg_kv.transports import Capabilities, InprocTransport, ShmTransport

PAGE = Path(__file__).parents[3] / "docs" / "transports.md"


def table() -> dict[str, dict[str, str]]:
    """Row name to column name to cell."""
    rows = [
        [c.strip(" `") for c in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line[:1] == "|"
    ]
    head = rows[0]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows[2:]}


def said(value: object) -> str:
    """A capability as the page writes it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case frozenset():
            return ", ".join(sorted(value))
        case None:
            return "none"
    return str(value).replace("8000000000.0", "8e+09")


@pytest.mark.parametrize("made", [InprocTransport, ShmTransport])
def test_the_capability_table_is_true(made: type[InprocTransport] | type[ShmTransport]) -> None:
    """Every capability has a row, and no row says anything else."""
    want = {name: said(value) for name, value in attrs.asdict(made.caps, recurse=False).items()}
    want["options"] = ", ".join(inspect.signature(made).parameters) or "none"
    assert {row: cells[made.name] for row, cells in table().items()} == want


def test_the_code_of_the_page_runs() -> None:
    """Every block."""
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), {})


def test_each_capability_is_explained_where_transports_are_written() -> None:
    """On the tutorial's page."""
    text = (PAGE.parent / "write-a-transport.md").read_text()
    assert [f.name for f in attrs.fields(Capabilities) if f"`{f.name}`" not in text] == []
