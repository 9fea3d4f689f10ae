"""The page says what the class says."""

from __future__ import annotations

import inspect
from pathlib import Path

import attrs

from disagg_kv.transports.mooncake import MooncakeTransport
from disagg_kv.transports.mooncake_library import PACKAGES, SWITCHES

PAGE = (Path(__file__).parents[3] / "docs" / "transports-mooncake.md").read_text()


def tables() -> list[list[list[str]]]:
    """Table by table, the cells of each row below the head."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.splitlines():
        if line[:1] == "|":
            found[-1].append([cell.strip(" `") for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table[2:] for table in found if table]


def said(value: object) -> str:
    """A capability as the page writes it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case frozenset():
            return ", ".join(sorted(value))
        case None:
            return "none"
    return f"{value:.2g}" if isinstance(value, float) and value > 1e6 else str(value)


def test_the_capability_table_is_true() -> None:
    """Every capability has a row, and no row says anything else."""
    want = {name: said(value) for name, value in attrs.asdict(MooncakeTransport.caps, recurse=False).items()}
    want["options"] = ", ".join(inspect.signature(MooncakeTransport).parameters)
    assert {row[0]: row[1] for row in tables()[2]} == want


def test_every_option_is_told_with_its_default() -> None:
    """In the order of the signature."""
    parameters = inspect.signature(MooncakeTransport).parameters.values()
    want = [(p.name, "time.monotonic" if callable(p.default) else repr(p.default)) for p in parameters]
    assert [(row[0], row[1].replace('"', "'")) for row in tables()[1]] == want


def test_every_protocol_and_debian_package_is_named() -> None:
    """Each of them."""
    assert [word for word in (*SWITCHES, *PACKAGES.values()) if f"`{word}`" not in PAGE] == []
