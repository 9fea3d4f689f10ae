"""``doctor`` says what works here, and for what does not, why and what to do."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from disagg_kv.cli import doctor, output
from disagg_kv.cli.doctor import (
    Finding,
    channel,
    engine,
    limits,
    mover,
    problems,
    rivals,
    system_libraries,
)
from disagg_kv.cli.main import run
from disagg_kv.cli.places import Nic, Place
from disagg_kv.cli.ucx import found, logged, only_tcp
from disagg_kv.engines.versions import ENGINES, Engine
from disagg_kv.errors import MissingDependencyError
from disagg_kv.transports import Transport, registry
from disagg_kv.transports.mooncake_library import PACKAGES
from disagg_kv.transports.nixl_library import MODULES
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
    for kind, names in (("transports", {"inproc", "shm"}), ("kernels", {"cpu"}), ("channels", {"tcp", "ipc", "unix"})):
        assert names <= {f["name"] for f in found[kind] if f["works"]}
    assert {f["name"] for f in found["libraries"]} == set(PACKAGES)
    assert {f["name"] for f in found["engines"]} == set(ENGINES)
    assert found["host"].keys() == {"python", "platform", "disagg_kv"}


def test_the_links_that_an_endpoint_keeps_are_named_with_what_more_of_them_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A host on which limits are low can run the library: links that no room uses are dropped."""
    many = resource.RLIM_INFINITY
    assert [f.works for f in limits(10, 1024, 4096)] == [True, True]
    assert [f.works for f in limits(10_000, many, many)] == [False, False], "the budget of bytes ends it"
    _, low = limits(200, 1024, 4096)
    assert (low.name, low.works, low.remedy) == ("links, zeromq", False, "ulimit -n 2256")
    assert "of 200 peers, the 76 used last keep their links when idle" in low.detail
    assert "soft limit is 1,024" in low.detail
    assert limits(200, 2256, 4096)[1].works
    assert "after the hard limit of 4,096 is raised" in limits(2000, 1024, 4096)[0].remedy
    assert "raised" not in limits(2000, 1024, many)[0].remedy
    assert "Options(link_bytes=" in limits(20_000, many, many)[1].remedy
    assert run(["doctor", "--json", "--peers", "1000000000"]) == 0
    found = json.loads(capsys.readouterr().out)["limits"]
    assert [f["works"] for f in found] == [False, False]


@needs_nixl
@needs_mooncake
def test_the_libraries_behind_transports_are_told() -> None:
    """As a program: whatever libraries print, one document is on stdout."""
    done = subprocess.run(
        [sys.executable, "-c", "from disagg_kv.cli.main import main; main()", "doctor", "--json"],
        env=os.environ | {"NIXL_LOG_LEVEL": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    found = json.loads(done.stdout)
    carriers = {f["name"]: f for f in found["transports"]}
    assert re.search(r"nixl\S* 1\.\S+, module nixl", carriers["nixl"]["library"])
    assert re.search(r"mooncake-transfer-engine\S* 0\.\S+, module mooncake", carriers["mooncake"]["library"])
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
[1.2] [host/1:9:0]   | a intra-node cfg#1 |
[1.2] [host/1:9:0]   | remote memory write by ucp_put* from cuda/dev[2] to cuda/dev[3] |
[1.2] [host/1:9:0]   | 0..inf | zero-copy | cuda_ipc/cuda |
"""


def test_lanes_are_those_of_writes_to_another_process(tmp_path: Path) -> None:
    """Not those within a process, nor those of messages, nor those of other memory."""
    assert found(LOG, "cpu") == ["sysv/memory", "tcp/eth0", "tcp/lo"]
    assert found(LOG.replace("intra-node", "inter-node"), "cpu") == ["sysv/memory", "tcp/eth0", "tcp/lo"]
    assert found(LOG, "cuda") == ["cuda_ipc/cuda"]
    assert found("", "cpu") == []
    (tmp_path / "7").write_text(LOG)
    assert logged(str(tmp_path), "7", "cpu") == found(LOG, "cpu")
    assert logged(str(tmp_path), "8", "cpu") == []


def test_only_sockets_leave_the_process() -> None:
    """A copy between a GPU and its host does not."""
    assert only_tcp(["tcp/lo", "tcp/eth0", "cuda_copy/cuda"])
    assert not only_tcp(["tcp/lo", "cma/memory"])
    assert not only_tcp(["cuda_copy/cuda"])
    assert not only_tcp([])


def test_what_is_checked_is_said_and_what_is_found_is_shown_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on stderr for a check that takes long; a result is there before the next check begins."""
    seen: list[tuple[str, str]] = []

    def slow() -> list[Finding]:
        time.sleep(0.3)
        return [Finding("one", True, "found")]

    def last() -> list[Finding]:
        seen.append(capsys.readouterr())
        return []

    monkeypatch.setattr(output, "FIRST_S", 0.1)
    monkeypatch.setattr(doctor, "CHECKS", {"transports": slow, "kernels": last, "channels": list})
    assert run(["doctor"]) == 1
    ((out, err),) = seen
    assert "transports  one             works  found" in out
    assert "checking transports, 0 s" in err
    assert "None of these works: kernels, channels." in capsys.readouterr().out


def test_places_of_cards_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """And which is nearest to each GPU; there is none here."""
    card = Nic("mlx5_0:1", True, 50.0, ("0000:17:00.0",), 0)
    monkeypatch.setattr(doctor, "nics", lambda: [card])
    monkeypatch.setattr(doctor, "place", lambda device: Place(device, ("0000:18:00.0",), 0, card, False))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [str(one) for one in doctor.CHECKS["places"]()] == [
        "mlx5_0:1        works  RDMA, 50 GB/s, PCIe 0000:17:00.0, NUMA node 0",
        "cuda:0          works  PCIe 0000:18:00.0, NUMA node 0; "
        "nearest is mlx5_0:1: RDMA, 50 GB/s, PCIe 0000:17:00.0, NUMA node 0",
    ]


def put(folder: Path, name: str, version: str, module: str, text: str) -> None:
    """A package as pip installs it."""
    where = folder / Path(*module.split("."))
    if where.parent != folder:
        where.parent.mkdir()
        (where.parent / "__init__.py").touch()
    where.with_suffix(".py").write_text(text)
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "top_level.txt").write_text(module.partition(".")[0])


def carriers(folder: Path) -> dict[str, dict[str, str]]:
    """What ``doctor --json`` says of transports where these packages come before all others."""
    hidden = [name for name in MODULES if not (folder / f"{name}.py").exists()]
    code = f"import sys; sys.modules |= dict.fromkeys({hidden})\nfrom disagg_kv.cli.main import main; main()"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return {f["name"]: f for f in json.loads(done.stdout)["transports"]}


def test_libraries_that_are_too_old_are_told_with_what_to_install(tmp_path: Path) -> None:
    """A NIXL that cannot be told to be safe for threads, a Mooncake that does not say what it was built with."""
    put(tmp_path, "nixl-cu12", "0.4.1", "nixl_cu12", "class nixl_agent_config: pass")
    put(tmp_path, "mooncake-transfer-engine", "0.3.7", "mooncake.engine", "class TransferEngine: pass")
    found = carriers(tmp_path)
    assert not found["nixl"]["works"]
    assert "NIXL 0.4 is too old" in found["nixl"]["detail"]
    assert found["nixl"]["remedy"] == "pip install 'nixl>=1.5'"
    assert not found["mooncake"]["works"]
    assert "too old: mooncake.engine has no SUPPORT_CUDA, SUPPORT_INTRA_NVLINK" in found["mooncake"]["detail"]
    assert "0.3.13 or later" in found["mooncake"]["remedy"]


def test_libraries_that_are_missing_or_lack_a_system_library_are_told_with_what_to_install(tmp_path: Path) -> None:
    """The Debian package, in the dynamic linker's own case."""
    linker = "raise ImportError('libnuma.so.1: cannot open shared object file: No such file or directory')"
    put(tmp_path, "mooncake-transfer-engine", "0.3.13", "mooncake.engine", linker)
    found = carriers(tmp_path)
    assert "nixl_cu13: " in found["nixl"]["detail"]
    assert found["nixl"]["remedy"] == "pip install nixl (or nixl-cu13, nixl-cu12)"
    assert "system library libnuma.so.1 is missing (Debian package libnuma1)" in found["mooncake"]["detail"]
    assert found["mooncake"]["remedy"] == "apt-get install --no-install-recommends libnuma1"


def test_packages_that_replace_each_others_files_are_a_problem() -> None:
    """Mooncake with CUDA and without it are one module."""
    both = ["mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"]
    (trouble,) = rivals("mooncake", {"mooncake": both})
    assert trouble.startswith("mooncake-transfer-engine and mooncake-transfer-engine-non-cuda all install the module")
    assert rivals("mooncake", {"mooncake": both[:1] * 2}) == []
    assert rivals("mooncake", {}) == []


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
    }


def test_a_host_where_no_transport_works_cannot_run_the_library(
    fabric: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_BUILTIN", {})
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "None of these works: transports." in out
    assert "[fabric]" in out


def test_a_channel_that_cannot_be_bound_says_why() -> None:
    assert "loopback" in (channel("tcp://10.0.0.1:0") or "")


def engine_of(module: str, least: str, below: str) -> Finding:
    return engine(Engine(module, ("attrs",), least, below, "pip install it"))


def test_an_engine_is_checked_against_its_tested_versions() -> None:
    """By a package that is here, under ranges that its version is in, before and after."""
    assert engine_of("attrs", "20", "99").works
    assert engine_of("attrs", "99", "100") == Finding(
        "attrs",
        False,
        f"attrs {version('attrs')} is older than the tested versions; tested with attrs >=99,<100",
        "pip install it",
    )
    newer = engine_of("attrs", "1", "2")
    assert newer.works
    assert "is newer than" in newer.detail
    assert newer.remedy == "pip install it"
    missing = engine_of("no_such_engine", "1", "2")
    assert missing.detail == "not installed; only needed for its adapter; tested with no_such_engine >=1,<2"


def test_what_serves_gpus_without_triton_is_said() -> None:
    """It works, and it is slow."""
    lacking, there = Finding("triton", False, "no module"), Finding("triton", True)
    assert mover(lacking).detail == "no module; GPU memory uses 'reference', which is many times slower"
    assert mover(there) is there
