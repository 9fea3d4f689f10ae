"""The page about NIXL says what the class says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import attrs

from disagg_kv.transports.nixl import NixlTransport
from disagg_kv.transports.nixl_library import ENVIRONMENT
from tests.support.needs import needs_nixl

PAGE = (Path(__file__).parents[3] / "docs" / "transports-nixl.md").read_text()


def table(first: str) -> dict[str, str]:
    """The first two columns of the table whose head begins with ``first``."""
    lines = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1] for row in cells[2:]}


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


def test_the_capability_table_is_true() -> None:
    """Every capability has a row, and no row says anything else."""
    caps = attrs.asdict(NixlTransport.caps, recurse=False)
    assert table("capability") == {name: said(value) for name, value in caps.items()}


def test_the_options_are_those_that_there_are() -> None:
    """With their defaults."""
    parameters = inspect.signature(NixlTransport).parameters
    assert table("option") == {name: str(p.default) for name, p in parameters.items()}


def test_the_environment_is_what_is_set() -> None:
    """Each variable and its value."""
    assert table("variable") == ENVIRONMENT


@needs_nixl
def test_the_code_of_the_page_runs() -> None:
    """Every block."""
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/transports-nixl.md", "exec"), {})
