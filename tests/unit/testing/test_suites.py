"""The page of the conformance suites is complete, and the suites need only pytest."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil

import disagg_kv.testing
from disagg_kv.testing.transport import TransportSuite
from disagg_kv.testing.transport_cases import TransportCases
from tests.support.pages import ROOT, tables

PAGE = ROOT / "docs" / "suites.md"
MODULES = [name for _, name, _ in pkgutil.iter_modules(disagg_kv.testing.__path__)]


def test_every_suite_is_on_the_page() -> None:
    """By its module and its name."""
    made = set()
    for name in MODULES:
        module = importlib.import_module(f"disagg_kv.testing.{name}")
        suites = [one for one in vars(module) if one.endswith("Suite") and inspect.isclass(getattr(module, one))]
        made |= {f"{name}.{one}" for one in suites if getattr(module, one).__module__ == module.__name__}
    assert {row[0].strip("`") for row in tables(PAGE)["suite in `disagg_kv.testing"]} == made


def test_every_member_to_override_is_on_the_page() -> None:
    """Plain values and class methods of the transport's suite, but for the factory."""
    own = [name for name in vars(TransportCases) if not name.startswith("_")]
    made = {name for name in own if not hasattr(vars(TransportCases)[name], "_fixture_function")} - {"factory"}
    written = {row[0].strip("`").partition("(")[0] for row in tables(PAGE)["member"]}
    assert written == made
    assert issubclass(TransportSuite, TransportCases)


def test_the_suites_need_only_pytest() -> None:
    """Of packages that the library does not need itself."""
    for name in MODULES:
        spec = importlib.util.find_spec(f"disagg_kv.testing.{name}")
        assert spec is not None
        assert spec.origin is not None
        if spec.submodule_search_locations is not None:
            continue  # the simulator
        with open(spec.origin) as source:
            tree = ast.parse(source.read())
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        assert "hypothesis" not in {one.partition(".")[0] for one in found}, name
