"""The transports that the documentation builds pass the conformance suite."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator

import pytest

from disagg_kv.testing.transport import TransportSuite
from disagg_kv.testing.transport_after import AfterwardsCases
from disagg_kv.testing.transport_data import DataCases
from disagg_kv.transports import Transport
from tests.support.pages import ROOT, marked

PAGE = ROOT / "docs" / "write-a-transport.md"
MODULES = {"transport": "tutorial_transport", "async": "async_transport"}


@pytest.fixture(scope="module", autouse=True)
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the blocks importable, here and in child processes, which get the same ``sys.path``."""
    folder = tmp_path_factory.mktemp("tutorial")
    for marker, name in MODULES.items():
        (folder / f"{name}.py").write_text(marked(PAGE, marker))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    for name in MODULES.values():
        sys.modules.pop(name, None)


class TestTutorialTransport(DataCases, AfterwardsCases):
    """The first one, whose copies end inside ``submit``: the second one has everything else from it."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        made: Callable[[], Transport] = importlib.import_module("tutorial_transport").CmaTransport
        return made


class TestAsynchronousTransport(TransportSuite):
    """The second one, whose tickets end on a thread of its own."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        made: Callable[[], Transport] = importlib.import_module("async_transport").AsyncCmaTransport
        return made


def test_the_second_transport_is_short() -> None:
    """60 to 90 lines: what the owner of a fabric writes."""
    assert 60 <= marked(PAGE, "async").count("\n") <= 90
