"""The transport that the documentation builds passes the conformance suite."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator

import pytest

from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import Transport
from tests.support.pages import ROOT, marked

PAGE = ROOT / "docs" / "write-a-transport.md"


@pytest.fixture(scope="module", autouse=True)
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the block importable, here and in child processes, which get the same ``sys.path``."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "tutorial_transport.py").write_text(marked(PAGE, "transport"))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("tutorial_transport", None)


class TestTutorialTransport(TransportSuite):
    """As a reader of the page would run it."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        made: Callable[[], Transport] = importlib.import_module("tutorial_transport").CmaTransport
        return made
