"""``doctor`` says what works here, and for what does not, why and what to do."""

from __future__ import annotations

import json

import pytest

from disagg_kv.cli.doctor import Finding, channel, package
from disagg_kv.cli.main import run
from disagg_kv.errors import MissingDependencyError
from disagg_kv.transports import Transport, registry


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a registered transport whose library is not there."""

    def make() -> Transport:
        raise MissingDependencyError("transport 'fabric'", "no module 'fabric'", "pip install 'disagg_kv[fabric]'")

    monkeypatch.setitem(registry._registered, "fabric", make)
    return "fabric"


def test_a_host_that_runs_the_tests_can_run_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    for kind, names in (("transports", {"inproc", "shm"}), ("kernels", {"cpu"}), ("channels", {"tcp", "ipc"})):
        assert names <= {f["name"] for f in found[kind] if f["works"]}
    assert found["host"].keys() == {"python", "platform", "disagg_kv"}


def test_what_does_not_work_has_its_reason_and_its_remedy(fabric: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    (found,) = (f for f in json.loads(capsys.readouterr().out)["transports"] if f["name"] == fabric)
    assert found == {
        "name": "fabric",
        "works": False,
        "detail": "transport 'fabric': no module 'fabric'",
        "remedy": "pip install 'disagg_kv[fabric]'",
    }


def test_a_host_where_no_transport_works_cannot_run_the_library(
    fabric: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_BUILTIN", {})
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Nothing works of: transports." in out
    assert "[fabric]" in out


def test_a_channel_that_cannot_be_bound_says_why() -> None:
    assert "loopback" in (channel("tcp://10.0.0.1:0") or "")


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    assert package("hf", "no-such-package", "tests") == Finding(
        "no-such-package", False, "not installed; only needed for tests", "pip install 'disagg_kv[hf]'"
    )
