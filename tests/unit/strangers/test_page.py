"""The parts that the documentation writes pass the suites that it names."""

from __future__ import annotations

from types import ModuleType

from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "replace.md"
SUITES = {"TestArrayPool", "TestSlots", "TestEvenWrites", "TestLimited"}

_page = ModuleType("page_parts")
for _block in blocks(PAGE):
    if _block.marker == "parts":
        _block.run(_page.__dict__)
globals().update({name: found for name, found in vars(_page).items() if name.startswith("Test")})


def test_the_page_runs_a_suite_on_each_part_that_it_writes() -> None:
    """They are the tests beside this one; the transport's page has its own."""
    assert {name for name in globals() if name.startswith("Test")} == SUITES
