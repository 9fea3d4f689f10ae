"""The size of the library: lines as readers count them, mechanisms by their words, limits that fail, a true ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import size

SOURCE = '''"""A module."""

# a comment
VALUE = """two
lines"""
"""What it is."""


class FlagWatch:
    """A class."""

    def ring_all(self) -> None:
        """A method."""
        print("flag", HTTPFlags)
'''


def test_lines_of_code_are_neither_documentation_nor_comments_nor_blank() -> None:
    assert size.code_lines(SOURCE) == 5


def test_a_name_counts_by_its_words_and_text_does_not() -> None:
    assert size.names(SOURCE) >= {"_flag_watch_", "_ring_all_", "_http_flags_", "_value_"}
    assert size.names('x = "flag"  # flag') == {"_x_"}


def test_every_mechanism_is_known_to_some_file_and_has_a_row_in_the_ledger() -> None:
    assert [mechanism for mechanism in size.words() if not size.files_of(mechanism)] == []
    text = size.LEDGER.read_text()
    assert [row["name"] for row in size.ROW.finditer(text)] == list(size.words())


def test_the_ledger_counts_the_files_of_today() -> None:
    """``python -m benchmarks.size --ledger`` writes them."""
    text = size.LEDGER.read_text()
    assert size.ledger(text) == text


def test_a_measure_above_its_limit_is_named() -> None:
    found = size.measures()
    assert size.broken(found) == []
    found["options"] += 100
    assert size.broken(found) == [f"options: {found['options']}, limit {found['options'] - 100}"]


def test_the_tables_name_every_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main([]) == 0
    out = capsys.readouterr().out
    packages = [path.parent.name for path in size.WHEEL.glob("*/__init__.py")]
    assert [name for name in packages if f"  {name}\n" not in out] == []


def test_the_files_of_a_mechanism_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main(["layer", "groups"]) == 0
    listed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert listed == size.files_of("layer groups")
    assert Path("planning/grouping.py") in listed
