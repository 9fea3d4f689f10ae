"""``doctor`` says what works here, and for what does not, why and what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from disagg_kv.cli.doctor import Finding, channel, mover, package, problems, system_libraries
from disagg_kv.cli.lanes import found as found_lanes
from disagg_kv.cli.main import run
from disagg_kv.errors import MissingDependencyError
from disagg_kv.transports import Transport, registry
from disagg_kv.transports.mooncake_library import PACKAGES
from tests.support.needs import needs_mooncake, needs_nixl


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
    assert {f["name"] for f in found["libraries"]} == set(PACKAGES)
    assert found["host"].keys() == {"python", "platform", "disagg_kv"}


@needs_nixl
@needs_mooncake
def test_the_libraries_behind_transports_and_their_lanes_are_told() -> None:
    """As a program: whatever libraries print, one document is on stdout; NIXL's lane is one that UCX logged."""
    done = subprocess.run(
        [sys.executable, "-c", "from disagg_kv.cli.main import main; main()", "doctor", "--json"],
        env=os.environ | {"NIXL_LOG_LEVEL": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    carriers = {f["name"]: f for f in found["transports"]}
    assert re.search(r"nixl\S* 1\.\S+, module nixl", carriers["nixl"]["library"])
    assert re.search(r"(cma|tcp|rc|dc|ud)\w*/\w+", carriers["nixl"]["lanes"]), carriers["nixl"]["lanes"]
    assert re.search(r"mooncake-transfer-engine\S* 0\.\S+, module mooncake", carriers["mooncake"]["library"])
    assert "tcp" in carriers["mooncake"]["lanes"]
    (problem,) = found["problems"]
    assert problem.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: GPU memory")


def test_expandable_segments_are_a_problem_whatever_the_variable() -> None:
    assert len(problems({"PYTORCH_ALLOC_CONF": "a:1, Expandable_Segments: True"})) == 1
    assert problems({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}) == []


LOG = """
[1.2] [host/1:9:0]  ucp_worker.c:1997 UCX  INFO  a intra-node cfg#1 rma_am(tcp/lo) am(tcp/lo cma/memory)
[1.2] [host/1:9:0]   +--------+
[1.2] [host/1:9:0]   | a self cfg#0 |
[1.2] [host/1:9:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [host/1:9:0]   +--------+
[1.2] [host/1:9:0]   | 0..inf | zero-copy | self/memory |
[1.2] [host/1:9:0]   +--------+
[1.2] [host/1:9:0]   | a intra-node cfg#1 |
[1.2] [host/1:9:0]   | remote memory write by ucp_put* from host memory to host |
[1.2] [host/1:9:0]   +--------+
[1.2] [host/1:9:0]   | Range | Description | Config |
[1.2] [host/1:9:0]   +--------+
[1.2] [host/1:9:0]   | 0..8184 | short | sysv/memory |
[1.2] [host/1:9:0]   | 8185..inf | zero-copy | 52% on tcp/lo and 48% on tcp/eth0 |
[1.2] [host/1:9:0]   +--------+
[1.2] [host/1:9:0]   | a intra-node cfg#1 |
[1.2] [host/1:9:0]   | active message by ucp_am_send* from host memory |
[1.2] [host/1:9:0]   | 0..inf | short | cma/memory |
"""


def test_lanes_are_those_of_writes_to_another_process() -> None:
    """Not those within a process, nor those of messages."""
    assert found_lanes(LOG) == ["sysv/memory", "tcp/eth0", "tcp/lo"]
    assert found_lanes("") == []


def test_a_system_library_that_is_missing_is_named_by_its_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "libnone.so.1", "libnone1")
    assert system_libraries()[-1] == Finding(
        "libnone.so.1",
        False,
        "Debian package libnone1 is missing; mooncake needs it",
        "apt-get install --no-install-recommends libnone1",
    )


def test_what_does_not_work_has_its_reason_and_its_remedy(fabric: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    (found,) = (f for f in json.loads(capsys.readouterr().out)["transports"] if f["name"] == fabric)
    assert found == {
        "name": "fabric",
        "works": False,
        "detail": "transport 'fabric': no module 'fabric'",
        "remedy": "pip install 'disagg_kv[fabric]'",
        "library": "",
        "lanes": "",
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


def test_what_serves_gpus_without_triton_is_said() -> None:
    """It works, and it is slow."""
    lacking, there = Finding("triton", False, "no module"), Finding("triton", True)
    assert mover(lacking).detail == "no module; memory of GPUs is moved by 'reference', many times slower"
    assert mover(there) is there
