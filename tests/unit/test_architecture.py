"""The page and the picture of the architecture name what is there: files, classes, functions, Protocols."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from xml.etree import ElementTree

import pytest

from benchmarks.walk import SIDES, measure
from tests.support.pages import ROOT

LIBRARY = ROOT / "src/disagg_kv"
PAGE = (ROOT / "docs/architecture.md").read_text()
PICTURE = ROOT / "docs/images/architecture.svg"
PROTOCOLS = {
    "MemoryPool", "StagingAllocator", "TransferPlanner", "Schedule", "Selection", "Transport", "Channel", "Receiver",
}  # fmt: skip
MOST_STEPS, MOST_WIDTH = 15, 900

FILE = re.compile(r"`([\w/]+\.py)`")
NAMED = re.compile(r"`([\w/]+\.py)`\s+`(\w+(?:\.\w+)*)`")
STEP = re.compile(r"^(\d+)\. (.*?)(?=^\d+\. |^\S|\Z)", re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """What stands below a heading of the page, up to the next."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[str]:
    """The rows of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return lines[2:]


@cache
def names(path: str) -> frozenset[str]:
    """The classes and functions of a module; of a class, its methods and what it annotates, with its name."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif prefix and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse((LIBRARY / path).read_text()).body, "")
    return frozenset(found)


@cache
def classes() -> frozenset[str]:
    """Every class of the library."""
    files = (str(path.relative_to(LIBRARY)) for path in LIBRARY.rglob("*.py"))
    return frozenset(name for file in files for name in names(file) if name[0].isupper() and "." not in name)


def test_every_file_that_the_page_names_exists() -> None:
    files = set(FILE.findall(PAGE))
    assert len(files) > 20
    assert [file for file in sorted(files) if not (LIBRARY / file).is_file()] == []


def test_every_name_beside_a_file_is_in_it() -> None:
    named = sorted(set(NAMED.findall(PAGE)))
    assert len(named) > 30
    assert [f"{name} in {file}" for file, name in named if name not in names(file)] == []


def test_a_name_that_is_not_in_its_file_would_be_noticed() -> None:
    assert "Slot.reusable" in names("endpoints/prefill/movers/posts.py")
    assert "Capabilities.devices" in names("transports/base.py")
    assert "Slot.free" not in names("endpoints/prefill/movers/posts.py")
    assert "PathChooser" not in names("endpoints/prefill/routes.py")


@pytest.mark.parametrize("title", ["The walk of one request", "The walk of a failure"])
def test_a_walk_has_few_steps_in_order_and_each_names_where_it_happens(title: str) -> None:
    steps = STEP.findall(section(title))
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert 5 < len(steps) <= MOST_STEPS
    assert [number for number, text in steps if not NAMED.search(text)] == []


@pytest.mark.parametrize("title", ["Where your own class takes its place", "Who decides"])
def test_every_row_of_a_table_names_where_it_happens(title: str) -> None:
    assert len(rows(title)) >= 5
    assert [row for row in rows(title) if not NAMED.search(row.split("|")[2])] == []


def test_what_an_engine_calls_is_named_with_its_file() -> None:
    calls = [row.split("|")[1] for row in rows("What an engine calls in each step")]
    assert len(calls) >= 4
    assert [call for call in calls if not NAMED.search(call)] == []


def test_page_and_picture_name_the_protocols() -> None:
    assert {row.split("`")[1] for row in rows("Where your own class takes its place")} == PROTOCOLS
    assert words() >= PROTOCOLS


def words() -> set[str]:
    """Every word of the picture's text; raises where it is no well-formed XML."""
    texts = ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}text")
    return {word for text in texts for word in re.findall(r"\w+", text.text or "")}


def test_every_class_in_the_picture_exists() -> None:
    shown = {word for word in words() if re.fullmatch(r"([A-Z][a-z]+){2,}", word)}
    assert len(shown) > 10
    assert shown <= classes()


def test_the_picture_names_who_chooses_the_path_who_moves_and_the_engines_step() -> None:
    assert {"PathChooser", "Mover", "step"} <= words()


def test_the_picture_fits_a_page_in_light_and_dark_and_readers_are_led_to_it() -> None:
    root = ElementTree.parse(PICTURE).getroot()
    assert int(root.attrib["width"]) <= MOST_WIDTH
    assert "prefers-color-scheme: dark" in PICTURE.read_text()
    assert "](images/architecture.svg)" in PAGE
    for page, link in (("README.md", "docs/architecture.md"), ("docs/index.md", "architecture.md")):
        assert f"]({link})" in (ROOT / page).read_text()


def test_the_walk_in_numbers_counts_the_same_each_time() -> None:
    """The page shows what the script prints: every part, in its order."""
    measure()  # plans are shared between endpoints of a process: the first walk makes them
    first, second = measure(), measure()
    assert first == second
    assert all((LIBRARY / file).is_file() for file in SIDES)
    shown = [row.split(" | ")[0].removeprefix("| ") for row in rows("The walk in numbers")]
    assert shown == [counted.name for counted in first]
    assert all(counted.calls for counted in first)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the page shows the calls of Python 3.11")
def test_the_numbers_of_the_walk_are_those_of_the_code() -> None:
    """In a process of its own, where no earlier request has filled a cache."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walk", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
