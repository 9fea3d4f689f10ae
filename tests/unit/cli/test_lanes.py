"""``doctor --between``, ``--peer`` and ``--listen``: which transports carry bytes, and what is wrong in red."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from msgspec import structs

from disagg_kv.channels import Keys, write_keys
from disagg_kv.cli import lanes, probe
from disagg_kv.cli.lanes import FAILED, FELL_BACK, Probe, good, rate, text
from disagg_kv.cli.main import run
from disagg_kv.cli.places import Nic, Place
from disagg_kv.cli.probe import About, Lane
from disagg_kv.errors import PeerLostError
from tests.support.needs import needs_mooncake, needs_nixl

ETH = Nic("eth0", False, 3.125, (), 0)
RDMA = Nic("mlx5_0:1", True, 50.0, (), 0)
HERE = About("one", "boot", Place("cpu", (), 0, ETH, False), {"disagg_kv": "1", "protocol": "1", "nixl": "1.5.1"})
FAR = structs.replace(HERE, host="two", where="other boot")
DOCTOR = (sys.executable, "-c", "from disagg_kv.cli.main import main; main()", "doctor")


@needs_nixl
@needs_mooncake
def test_between_two_processes_each_transport_is_measured() -> None:
    """As a program: the document is all of stdout, and it has what UCX wrote over."""
    done = subprocess.run(
        [*DOCTOR, "--between", "--json"],
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (found["ok"], found["bytes"]) == (True, 1 << 28)
    assert found["copy_gb_s"] > 0
    assert found["from"] == found["to"]
    rows = {row["transport"]: row for row in found["transports"]}
    assert list(rows) == ["shm", "nixl", "mooncake"]
    assert [row["auto"] for row in rows.values()] == [True, False, False]
    assert all(row["gb_s"] > 0 and row["error"] == "" for row in rows.values())
    assert rows["nixl"]["over"].startswith("UCX: tcp/")
    assert [row["fell_back_to_tcp"] for row in rows.values()] == [False, True, False]


@contextmanager
def listener(bind: str, keys: Keys | None = None) -> Iterator[str]:
    """The address of a listening thread."""
    address = Queue[str]()
    thread = threading.Thread(target=lanes.listen, args=(bind, "cpu", keys, 60.0, address.put))
    thread.start()
    yield address.get(timeout=60.0)
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of 1 MiB, of ``auto`` alone."""
    monkeypatch.setattr(probe, "NBYTES", 1 << 20)
    monkeypatch.setattr(lanes, "NBYTES", 1 << 20)
    monkeypatch.setattr(Probe, "names", lambda _: ("auto", "shm"))


@pytest.mark.usefixtures("small")
def test_a_process_that_listens_is_measured_over_sockets_and_over_encrypted_tcp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prefill", "decode"):
        write_keys(tmp_path / "keys", name)
    with listener(f"unix://{tmp_path}/to") as address:
        assert run(["doctor", "--peer", address]) == 0
    shown = capsys.readouterr().out
    assert "GB/s, a copy within a process" in shown
    assert shown.count("shm") == 1
    keys = tmp_path / "keys"
    with listener("tcp://127.0.0.1:0", Keys.load(keys / "decode.key_secret", keys)) as address:
        assert run(["doctor", "--peer", address, "--secret", str(keys / "prefill.key_secret"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["transports"][0]["transport"] == "shm"


def test_a_listener_ends_with_its_probe(tmp_path: Path) -> None:
    """As two programs; the one that listens says where."""
    address = f"unix://{tmp_path}/to"
    with subprocess.Popen([*DOCTOR, "--listen", address, "--json"], stdout=subprocess.PIPE, text=True) as other:
        link = probe.Link(lanes.listening(f"unix://{tmp_path}/from", None), address)
        assert link.greet(120.0, lambda: other.poll() is None).versions["protocol"] == "1"
        link.send(probe.Bye())
        out, _ = other.communicate(timeout=120)
        link.channel.close()
    assert json.loads(out) == {"ok": True, "listened": address}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--between --listen tcp://127.0.0.1:0", "exclude each other"),
        ("--peer tcp://127.0.0.1:1 --secret here", "keys of here"),
        ("--peer tcp://127.0.0.1:1 --device disk", "unknown device 'disk'"),
        ("--between --device cuda:7", "on device 'cuda:7'"),
        ("--listen tcp://0.0.0.0:0", "keys"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a device cuda:7")
def test_what_cannot_be_probed_is_refused(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *line.split(), "--json"]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_lane_is_a_line_with_what_is_wrong_in_red() -> None:
    fine = Lane("shm", seconds=(0.1, 0.1), auto=True, gb_s=rate((0.1, 0.1)), most_gb_s=5.0, most="a copy")
    assert good(fine)
    assert str(text(fine)) == "auto shm          2.68 GB/s; 54% of 5 GB/s, a copy"
    assert text(fine).spans == []
    slow = evolve(fine, fell_back_to_tcp=True, most_gb_s=None, most="", over="UCX: tcp/lo")
    assert not good(slow)
    assert str(text(slow)).endswith(f"2.68 GB/s; UCX: tcp/lo  {FELL_BACK}")
    bad = Lane("nixl", error="no route")
    assert not good(bad)
    assert str(text(bad)) == "     nixl     FAILED: no route"
    assert [span.style for line in (text(slow), text(bad)) for span in line.spans] == [FAILED, FAILED]


def probing(here: About = HERE, there: About = HERE, log: str = "/nowhere") -> Probe:
    return Probe(SimpleNamespace(), "" if here.where == there.where else "10.0.0.1", here, there, 8.0, log)  # type: ignore[arg-type]


def on(side: About, device: str, *path: str) -> About:
    """The same with a GPU."""
    return structs.replace(side, place=evolve(side.place, device=device, path=path))


def test_both_sides_are_shown_and_different_protocols_in_red() -> None:
    same, other = probing(), probing(there=structs.replace(FAR, versions={**HERE.versions, "protocol": "2"}))
    lines = [str(line) for line in same.head()]
    assert lines[0] == "256 MiB, median of up to 5 writes; a copy within a process: 8 GB/s"
    assert lines[1].startswith("from cpu of one: no PCI device, NUMA node 0; nearest is eth0")
    assert lines[3:] == ["both disagg_kv 1, nixl 1.5.1, protocol 1"]
    versions = list(other.head())[3:]
    assert [str(line) for line in versions] == ["both disagg_kv 1, nixl 1.5.1", "from protocol 1", "to   protocol 2"]
    assert [str(line.style) for line in versions] == ["", FAILED, FAILED]


UCX = """x |  {kind}-node cfg#1 |
x | remote memory write by ucp_put* from host memory to host |
x | 0..inf | zero-copy | {names} |
"""


@pytest.mark.parametrize(
    ("names", "near", "cards", "fell_back", "most"),
    [
        ("cma/memory", True, [ETH], False, (8.0, "a copy within a process")),
        ("tcp/lo", True, [ETH], True, (8.0, "a copy within a process")),
        ("tcp/eth0", False, [ETH], False, (3.125, "eth0")),
        ("tcp/eth0", False, [RDMA, ETH], True, (3.125, "eth0")),
        ("rc_mlx5/mlx5_0:1", False, [RDMA, ETH], False, (50.0, "mlx5_0:1")),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on tcp/eth0", False, [RDMA, ETH], False, (53.125, "mlx5_0:1, eth0")),
        ("tcp/eth1", False, [ETH, evolve(ETH, name="eth1", gb_s=None)], False, (None, "eth1")),
    ],
)
def test_nixl_over_tcp_has_fallen_back_where_there_is_something_faster(
    names: str,
    near: bool,
    cards: list[Nic],
    fell_back: bool,
    most: tuple[float | None, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what UCX logs; and the rate of the cards that it names stands beside what was measured."""
    monkeypatch.setattr(lanes, "nics", lambda: cards)
    monkeypatch.setattr(lanes, "measure", lambda *_: Lane("nixl", seconds=(0.1,)))
    (tmp_path / str(os.getpid())).write_text(UCX.format(kind="intra" if near else "inter", names=names))
    row = probing(there=HERE if near else FAR, log=str(tmp_path)).measured("auto")
    assert (row.fell_back_to_tcp, row.most_gb_s, row.most) == (fell_back, *most)
    assert row.over.startswith("UCX: ")
    unknown = probing(there=HERE if near else FAR).measured("auto")
    assert (unknown.fell_back_to_tcp, unknown.over) == (False, "UCX: it does not log over what")


def test_what_mooncake_writes_over_is_what_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library does not report it."""
    monkeypatch.setattr(lanes, "measure", lambda *_: Lane("mooncake", seconds=(0.1,)))
    found = probing(there=FAR).measured("mooncake")
    assert (found.over, found.fell_back_to_tcp, found.most) == ("tcp, as configured", False, "")
    assert probing(on(HERE, "cuda:0"), on(HERE, "cuda:1", "0000:99:00.0")).measured("mooncake").over == "nvlink_intra"


def test_between_gpus_the_nominal_rate_is_that_of_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi says it: no GPU is needed here, and none was seen."""
    monkeypatch.setattr(lanes, "nvlink_gb_s", lambda _: 478.0)
    monkeypatch.setattr(lanes, "measure", lambda *_: Lane("cuda_ipc", seconds=(0.1,)))
    first, second = on(HERE, "cuda:0", "0000:18:00.0"), on(HERE, "cuda:1", "0000:99:00.0")
    row = probing(first, second).measured("auto")
    assert (row.most_gb_s, row.most) == (478.0, "NVLink")
    assert probing(first, first).measured("auto").most == "a copy within a process", "two processes of one GPU"
    unknown = probing(on(HERE, "cuda:0"), second).measured("auto")
    assert unknown.most_gb_s is None


def test_a_probe_of_which_auto_is_bad_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def opened(*_: Any) -> Iterator[Probe]:
        yield probing()

    monkeypatch.setattr(lanes, "between", opened)
    monkeypatch.setattr(lanes, "measure", lambda *_: Lane("auto", error="none of them starts"))
    assert run(["doctor", "--between"]) == 1
    assert capsys.readouterr().out.count("FAILED: none of them starts") == 4
    assert run(["doctor", "--between", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_second_process_that_does_not_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerLostError, match="nothing answers"), lanes.between("cpu"):
        pass
