"""Where devices and network cards are, from a sysfs that a test writes."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from disagg_kv.cli.places import Nic, Place, bus_of, nearest, nics, nvlink_gb_s, place, place_of

NEAR, FAR = "0000:17:00.0", "0000:98:00.0"
SMI = """#!/bin/sh
case "$*" in
*query-gpu*) echo "GPU-aa, 00000000:18:00.0"; echo "GPU-bb, 00000000:99:00.0" ;;
*18:00.0*) echo "GPU 0: H100"; echo "	 Link 0: 26.562 GB/s"; echo "	 Link 1: 26.562 GB/s" ;;
*) exit 6 ;;
esac
"""


def device(sys: Path, path: str, numa: int) -> Path:
    """A PCI device at the end of a path of bridges."""
    folder = sys / "devices" / path
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    link = sys / "bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    return folder


def card(sys: Path, name: str, at: Path | None, **files: str) -> None:
    """A network device."""
    folder = sys / "class/net" / name
    folder.mkdir(parents=True)
    for file, text in {"type": "1", "operstate": "up", **files}.items():
        (folder / file).write_text(text + "\n")
    if at is not None:
        (folder / "device").symlink_to(at)


def rdma(sys: Path, name: str, at: Path, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
    """An RDMA card with one port."""
    port = sys / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "rate").write_text(rate + "\n")
    (port.parents[1] / "device").symlink_to(at)


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two sockets, each with a GPU and an RDMA card behind one bridge; Ethernet, a virtual card, two that are down."""
    for number, root in (("17", "pci0000:16/0000:16:01.0"), ("98", "pci0000:97/0000:97:01.0")):
        numa = int(number == "98")
        gpu = f"{root}/0000:{int(number, 16) + 1:02x}:00.0"
        device(tmp_path, gpu, numa)
        rdma(tmp_path, f"mlx5_{numa}", device(tmp_path, f"{root}/0000:{number}:00.0", numa))
    down = device(tmp_path, "pci0000:16/0000:20:00.0", 0)
    rdma(tmp_path, "mlx5_9", down, state="1: DOWN")
    card(tmp_path, "eth0", device(tmp_path, "pci0000:16/0000:30:00.0", 0), speed="25000")
    virtual = device(tmp_path, "pci0000:16/0000:31:00.0", -1) / "virtio2"
    virtual.mkdir()
    card(tmp_path, "veth", virtual, speed="-1", operstate="unknown")
    card(tmp_path, "lo", None, type="772")
    card(tmp_path, "eth1", None, operstate="down")
    return tmp_path


def test_cards_that_are_up_have_their_rates_and_places(sys: Path) -> None:
    assert nics(sys) == [
        Nic("mlx5_0:1", True, 50.0, ("0000:16:01.0", NEAR), 0),
        Nic("mlx5_1:1", True, 50.0, ("0000:97:01.0", FAR), 1),
        Nic("eth0", False, 3.125, ("0000:30:00.0",), 0),
        Nic("veth", False, None, ("0000:31:00.0",), None),
    ]
    assert [str(one) for one in nics(sys)][2:] == [
        "Ethernet, 3.125 GB/s, PCIe 0000:30:00.0, NUMA node 0",
        "Ethernet, nominal rate not known, PCIe 0000:31:00.0, NUMA node not known",
    ]


def test_the_nearest_card_shares_most_of_the_way_then_the_node_then_has_the_rate(sys: Path) -> None:
    cards = nics(sys)
    for bus, name in (("0000:18:00.0", "mlx5_0:1"), ("0000:99:00.0", "mlx5_1:1")):
        found = nearest(*place_of(bus, sys), cards)
        assert found is not None
        assert found.name == name
    by_node, by_rate = nearest((), 1, cards), nearest((), None, cards[2:])
    assert by_node is cards[1]
    assert by_rate is cards[2]
    assert nearest((), 0, []) is None


def test_a_device_has_the_card_that_ucx_net_devices_names_else_the_nearest(sys: Path) -> None:
    found = place("cpu", {}, sys)
    assert (found.numa, found.nic and found.nic.name, found.named) == (None, "mlx5_0:1", False)
    assert str(found).startswith("no PCI device, NUMA node not known; nearest is mlx5_0:1: RDMA, 50 GB/s")
    named = place("cpu", {"UCX_NET_DEVICES": "eth0,other"}, sys)
    assert (named.nic and named.nic.name, named.named) == ("eth0", True)
    assert "UCX_NET_DEVICES names eth0" in str(named)
    assert str(Place("cpu", (), None, None, False)) == "no PCI device, NUMA node not known; no network card is up"


def test_a_gpu_is_found_by_its_uuid_whatever_its_number_here(
    sys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES changes numbers. nvidia-smi is a program of the test's, as there is no GPU."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=("bb", "aa")[number]))
    assert [bus_of("cuda"), bus_of("cuda:1"), bus_of("cpu")] == ["0000:99:00.0", "0000:18:00.0", ""]
    found = place("cuda:1", {}, sys)
    assert (found.path, found.numa, found.nic and found.nic.name) == (
        ("0000:16:01.0", "0000:18:00.0"),
        0,
        "mlx5_0:1",
    )
    assert nvlink_gb_s("0000:18:00.0") == pytest.approx(53.124)
    assert nvlink_gb_s("0000:99:00.0") is None
    monkeypatch.setenv("PATH", "")
    assert bus_of("cuda:1") == ""
    assert place("cuda:1", {}, sys).path == ()
