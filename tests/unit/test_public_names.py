"""What users may import, and its signatures, change only together with the file that lists them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from difflib import unified_diff

import pytest

import disagg_kv
from tests.support.public_names import COMMAND, ROOT, SNAPSHOT, entries, everything, homes, lines, snapshot


def test_names_and_signatures_are_those_of_the_file() -> None:
    known, found = SNAPSHOT.read_text().splitlines(), snapshot().splitlines()
    changed = "\n".join(unified_diff(known, found, "tests/unit/public_names.txt", "the code", lineterm="", n=0))
    if known != found:
        pytest.fail(f"public names or signatures changed; if that is meant, run: {COMMAND}\n{changed}", pytrace=False)


def test_what_an_engine_needs_is_about_thirty_names_each_of_which_a_documented_package_has() -> None:
    assert len(disagg_kv.__all__) == 30
    assert disagg_kv.__all__ == sorted(disagg_kv.__all__)
    assert [name for name, home in homes().items() if not home] == []


def test_the_reference_begins_with_the_names_that_an_engine_imports() -> None:
    table = (ROOT / "docs/reference.md").read_text().split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == disagg_kv.__all__


def test_every_public_method_says_what_it_does_where_it_is_defined() -> None:
    """A reader of the reference, or of ``help()``, needs no second page."""
    members = {
        f"{name}.{one}": inspect.getdoc(member) or ""
        for name, thing in everything().items()
        if inspect.isclass(thing)
        for one, member in inspect.getmembers(thing)
        if not one.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    assert len(members) > 500
    assert [name for name, text in members.items() if text.startswith("See ")] == []


def test_every_package_with_public_names_is_in_the_reference() -> None:
    """Of the protocol core, the reference lists the few names that users need."""
    source = ROOT / "src" / "disagg_kv"
    packages = {file.parent.name for file in source.glob("*/__init__.py") if "\n__all__ = " in file.read_text()}
    listed = {where.removeprefix("disagg_kv.") for where, name in entries() if not name}
    assert packages - listed == {"core"}


def test_importing_the_package_imports_neither_torch_nor_an_optional_package() -> None:
    """A scheduler's process and ``disagg-kv plan`` need none of them."""
    loaded = "import sys, disagg_kv; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) & {"torch", "triton", "nixl", "mooncake", "transformers", "vllm", "sglang"} == set()


class _Made:
    """Members of every kind."""

    limit = 3

    def __init__(self, size: int, *, name: str = "x") -> None:
        self._made = size, name

    @property
    def size(self) -> int:
        """Any."""
        return self._made[0]

    @classmethod
    def of(cls, name: str) -> _Made:
        """Any."""
        return cls(0, name=name)

    def call(self, what: bytes | None = None) -> list[int]:
        """Any."""
        return []

    def _hidden(self) -> None:
        """Any."""


def test_a_change_of_a_signature_or_a_member_changes_the_text() -> None:
    """Lines are made from the constructor, and every member without an underscore."""
    assert list(lines("a.B", _Made)) == [
        "a.B(size: int, *, name: str = 'x') -> None",
        "a.B.call(what: bytes | None = None) -> list[int]",
        "a.B.limit: int",
        "a.B.of(name: str) -> _Made  # of the class",
        "a.B.size: int",
    ]
