"""The tables of the pages about transports say what the classes say."""

from __future__ import annotations

import inspect
from pathlib import Path

import attrs
import pytest

from disagg_kv.transports import Capabilities, InprocTransport, LinkCost, ShmTransport
from disagg_kv.transports.cuda_ipc import CudaIpcTransport
from disagg_kv.transports.mooncake import MooncakeTransport
from disagg_kv.transports.mooncake_library import PACKAGES, SWITCHES
from disagg_kv.transports.nixl import NixlTransport
from disagg_kv.transports.nixl_library import ENVIRONMENT
from tests.support.pages import ROOT, tables

DOCS = ROOT / "docs"
MOONCAKE, NIXL = DOCS / "transports-mooncake.md", DOCS / "transports-nixl.md"
Made = type[MooncakeTransport | NixlTransport]


def said(value: object) -> str:
    """A capability as the pages write it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case frozenset():
            return ", ".join(sorted(value))
        case None:
            return "none"
        case LinkCost():
            return f"{value.nbytes:,} bytes, {value.descriptors} descriptors"
    return f"{value:.2g}" if isinstance(value, float) and value > 1e6 else str(value)


def test_the_table_of_capabilities_is_true() -> None:
    """Every capability has a row, every transport a column, and no cell says anything else."""
    every = (InprocTransport, ShmTransport, CudaIpcTransport, NixlTransport, MooncakeTransport)
    heads, found = "", tables(DOCS / "transports.md")["capability"]
    want = [[name] for name in attrs.asdict(every[0].caps, recurse=False)]
    for made in every:
        heads += f" {made.name} |"
        for row, value in zip(want, attrs.asdict(made.caps, recurse=False).values(), strict=True):
            row.append(said(value))
    assert sorted(found) == sorted(want)
    assert f"| capability |{heads}\n" in (DOCS / "transports.md").read_text()


@pytest.mark.parametrize(("made", "page"), [(MooncakeTransport, MOONCAKE), (NixlTransport, NIXL)])
def test_every_option_is_told_with_its_default(made: Made, page: Path) -> None:
    """In the order of the signature."""
    parameters = inspect.signature(made).parameters.values()
    want = [(p.name, "time.monotonic" if callable(p.default) else repr(p.default)) for p in parameters]
    assert [(row[0], row[1].replace('"', "'")) for row in tables(page)["option"]] == want


def test_the_environment_for_nixl_is_what_is_set() -> None:
    """Each variable and its value."""
    assert {row[0]: row[1] for row in tables(NIXL)["variable"]} == ENVIRONMENT


def test_every_protocol_and_debian_package_of_mooncake_is_named() -> None:
    """Each of them."""
    text = MOONCAKE.read_text()
    assert [word for word in (*SWITCHES, *PACKAGES.values()) if f"`{word}`" not in text] == []


def test_each_capability_is_explained_where_transports_are_written() -> None:
    """On the tutorial's page."""
    text = (DOCS / "write-a-transport.md").read_text()
    assert [f.name for f in attrs.fields(Capabilities) if f"`{f.name}`" not in text] == []
