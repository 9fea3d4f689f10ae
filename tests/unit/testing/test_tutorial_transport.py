"""The transport that the documentation builds passes the conformance suite, and its other code blocks run (D2)."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import Transport, registry

PAGE = Path(__file__).parents[3] / "docs" / "write-a-transport.md"


def blocks() -> list[str]:
    """Every Python block of the page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def marked() -> str:
    """The block that is the module ``tutorial_transport``."""
    (found,) = re.findall(
        r"^<!-- test: transport -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


@pytest.fixture(scope="module", autouse=True)
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the block importable, here and in child processes, which get the same ``sys.path``."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "tutorial_transport.py").write_text(marked())
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("tutorial_transport", None)


class TestTutorialTransport(TransportSuite):
    """As a reader of the page would run it."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        made: Callable[[], Transport] = importlib.import_module("tutorial_transport").make
        return made


def test_every_code_block_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page."""
    monkeypatch.setattr(registry, "_registered", {})
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), {"__name__": "tutorial"})
    assert registry.available()["cma"] is None
