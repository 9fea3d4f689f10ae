"""What ``help`` shows of an endpoint is what engines and operators call."""

from __future__ import annotations

import pytest

from disagg_kv import DecodeEndpoint, PrefillEndpoint

BOTH = {
    "close", "closed", "confirm_terminated", "decides_alone", "fileno", "inspect", "open", "open_rooms", "peers",
    "poll", "status", "usage", "wait",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "own"),
    [(PrefillEndpoint, {"step"}), (DecodeEndpoint, set())],
)
def test_an_endpoint_has_no_public_name_for_its_own_parts(kind: type, own: set[str]) -> None:
    """Handles post their commands through an object of their own; each name has a docstring."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    assert names == BOTH | own
    assert [name for name in names if not getattr(kind, name).__doc__] == []
