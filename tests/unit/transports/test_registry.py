"""Transports by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from disagg_kv.errors import ConfigurationError, MissingDependencyError, UnknownNameError
from disagg_kv.transports import InprocTransport, ShmTransport, available, register_transport, registry, transport


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, module: str = "") -> None:
    """Put an installed package with these entry points and this module on the path."""
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{text}\n")
    (folder / "third_party_transport.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "third_party_transport", raising=False)


def test_built_in_transports_have_names() -> None:
    """And work on this host."""
    assert isinstance(transport("inproc"), InprocTransport)
    assert isinstance(transport("shm"), ShmTransport)
    found = available()
    assert found["inproc"] is None
    assert found["shm"] is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    """Those registered by a call among them."""
    register_transport("mine", InprocTransport)
    with pytest.raises(UnknownNameError, match=r"unknown transport 'shn'; known: .*inproc, mine.*, shm") as caught:
        transport("shn")
    assert {"inproc", "mine", "shm"} <= set(caught.value.known)


def test_an_unknown_option_lists_the_known_ones() -> None:
    """The parameters of the factory are the options; one that takes any gets them all."""
    given = []

    def make(depth: int = 1, *, lanes: int = 2) -> InprocTransport:
        given.append((depth, lanes))
        return InprocTransport()

    def make_any(**options: object) -> InprocTransport:
        given.append((len(options), 0))
        return InprocTransport()

    register_transport("mine", make)
    register_transport("any", make_any)
    transport("mine", depth=3, lanes=4)
    transport("any", x=1, y=2)
    assert given == [(3, 4), (2, 0)]
    with pytest.raises(UnknownNameError, match="unknown option of transport 'mine' 'deep'; known: depth, lanes"):
        transport("mine", deep=3)
    with pytest.raises(UnknownNameError, match="known: none"):
        transport("inproc", depth=1)


def test_an_installed_package_names_its_transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry-point group, loaded only when asked for."""
    module = "from disagg_kv.transports import InprocTransport as Made\n"
    entry_points(tmp_path, monkeypatch, "theirs = third_party_transport:Made", module)
    assert "third_party_transport" not in sys.modules
    assert isinstance(transport("theirs"), InprocTransport)
    assert available()["theirs"] is None


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, and it does not hide the others."""
    entry_points(tmp_path, monkeypatch, "theirs = third_party_transport:Made", "raise OSError('no card')")
    with pytest.raises(ConfigurationError, match=r"transport 'theirs': third_party_transport:Made .*no card"):
        transport("theirs")
    found = available()
    assert found["shm"] is None
    assert "no card" in str(found["theirs"])


def test_a_host_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: a system without memfd_create."""
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(MissingDependencyError, match="memfd_create"):
        transport("shm")
    assert "Linux" in str(available()["shm"])
