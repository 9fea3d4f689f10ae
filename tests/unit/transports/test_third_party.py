"""Transports of others are held to the same contract and carry the same requests."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg_kv.cli.main import run
from disagg_kv.geometry import CacheSpec
from disagg_kv.testing.transport import TransportSuite
from disagg_kv.transports import Transport, registry, transport
from tests.support.pages import ROOT, marked
from tests.support.rig import Memory, Rig, tp_shards

PACKAGE = ROOT / "tests" / "support" / "package_with_entrypoint"
MODULE = "third_party_pipes"
PAGE = ROOT / "docs" / "write-a-transport.md"
SMALL = ["--prefill-tp", "2", "--requests", "1", "--max-new-tokens", "3", "--layers", "2"]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """The package on the path, as if it were installed; child processes get the same path."""
    sys.path.insert(0, str(PACKAGE))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(PACKAGE))
    sys.modules.pop(MODULE, None)


@pytest.fixture
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Adds a folder to the path of this process and of all programs that it starts."""

    def add(folder: Path) -> None:
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return add


class TestInstalledPackage(TransportSuite):
    """The transport of the installed package."""

    @classmethod
    def factory(cls) -> Callable[[], Transport]:
        made: Callable[[], Transport] = importlib.import_module(MODULE).PipesTransport
        return made


def made() -> Transport:
    """Found by the entry point of the package, like any other."""
    return transport("third-party")


def test_an_installed_transport_is_found_by_its_entry_point() -> None:
    """Nobody has to import or register it."""
    side = made()
    assert type(side).__module__ == MODULE
    side.close(0.0)


@pytest.mark.parametrize("path", ["staged", "slice"])
def test_endpoints_move_requests_over_an_installed_transport(path: str) -> None:
    """Two ranks to one, pages of other sizes, in batches no larger than it takes."""
    spec = CacheSpec.kv(4, 4, 8, "bfloat16")
    rig = Rig(spec, threaded=True)
    try:
        prefills = rig.prefill(tp_shards(spec, 2), memory=Memory(transport=made), strategy=path)
        decodes = rig.decode(tp_shards(spec, 1), memory=Memory(8, 32, transport=made), strategy=path)
        for name in ("first", "second"):
            rig.request(name, prefills, decodes, 101).start().landed()
        rig.quiet()
        rig.check()
    finally:
        rig.close()


def carried(capsys: pytest.CaptureFixture[str], *options: str) -> None:
    """A demo from two ranks to one has gone well."""
    assert run(["demo", *SMALL, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["wrong_bytes"] == found["stray_bytes"] == 0
    assert (found["paths"], found["prefill_tp"], found["decode_tp"]) == (["staged"], 2, 1)


def test_an_installed_transport_carries_the_demo(
    capsys: pytest.CaptureFixture[str], on_the_path: Callable[[Path], None]
) -> None:
    """By its name alone, between processes that each find it by themselves."""
    on_the_path(PACKAGE)
    carried(capsys, "--transport", "third-party")


def test_the_transport_of_the_documentation_carries_the_demo(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    on_the_path: Callable[[Path], None],
) -> None:
    """The page's module, and the two lines of it that give it a name."""
    name = 'from disagg_kv.transports import register_transport\n\nregister_transport("documented", CmaTransport)\n'
    (tmp_path / "documented_transport.py").write_text(f"{marked(PAGE, 'transport')}\n{name}")
    on_the_path(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.delitem(sys.modules, "documented_transport", raising=False)
    carried(capsys, "--transport", "documented", "--transport-module", "documented_transport")
