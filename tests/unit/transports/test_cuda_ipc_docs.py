"""The page says what the class says."""

from __future__ import annotations

import inspect
from pathlib import Path

import attrs

from disagg_kv.transports.cuda_ipc import CudaIpcTransport

PAGE = (Path(__file__).parents[3] / "docs" / "transports-cuda-ipc.md").read_text()


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
    rows = [[c.strip(" `") for c in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    want = {name: said(value) for name, value in attrs.asdict(CudaIpcTransport.caps, recurse=False).items()}
    want["options"] = ", ".join(inspect.signature(CudaIpcTransport).parameters)
    assert {row[0]: row[1] for row in rows[2:]} == want
