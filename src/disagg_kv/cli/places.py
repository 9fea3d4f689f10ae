"""Where GPUs and network cards of this host are, by Linux' sysfs, and nominal rates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from attrs import frozen

SYS = Path("/sys")
LOOPBACK = "772"
"""Linux' type of the loopback device (ARPHRD_LOOPBACK)."""


@frozen
class Nic:
    """A network card, or one port of an RDMA card.

    Args:
        name: as UCX_NET_DEVICES has it: ``eth0``, ``mlx5_0:1``.
        rdma: whether it is a port of an RDMA card.
        gb_s: its nominal rate in GB/s; None: the driver does not say.
        path: the PCI devices from the root to it; empty: it is no PCI device.
        numa: the NUMA node; None: not known.
    """

    name: str
    rdma: bool
    gb_s: float | None
    path: tuple[str, ...]
    numa: int | None

    def __str__(self) -> str:
        kind = "RDMA" if self.rdma else "Ethernet"
        rate = "nominal rate not known" if self.gb_s is None else f"{self.gb_s:g} GB/s"
        return f"{kind}, {rate}, {at(self.path, self.numa)}"


@frozen
class Place:
    """Where a device is, and the card that is nearest to it.

    Args:
        device: ``cpu``, ``cuda:0`` ...
        path: the PCI devices from the root to it; empty: it is no PCI device, or nvidia-smi does not say.
        numa: its NUMA node; None: not known, or no PCI device.
        nic: the card; None: there is none.
        named: the environment variable UCX_NET_DEVICES names the card.
    """

    device: str
    path: tuple[str, ...]
    numa: int | None
    nic: Nic | None
    named: bool

    def __str__(self) -> str:
        if self.nic is None:
            return f"{at(self.path, self.numa)}; no network card is up"
        which = "UCX_NET_DEVICES names" if self.named else "nearest is"
        return f"{at(self.path, self.numa)}; {which} {self.nic.name}: {self.nic}"


def place(device: str, environment: Mapping[str, str] = os.environ, sys: Path = SYS) -> Place:
    """Where a device of this process is; of the cards that UCX_NET_DEVICES names, else of all, the nearest."""
    bus = bus_of(device)
    path, numa = place_of(bus, sys) if bus else ((), None)
    cards, names = nics(sys), environment.get("UCX_NET_DEVICES", "").split(",")
    named = [card for card in cards if card.name in names]
    return Place(device, path, numa, nearest(path, numa, named or cards), bool(named))


def at(path: Sequence[str], numa: int | None) -> str:
    """A place for people."""
    return f"{f'PCIe {path[-1]}' if path else 'no PCI device'}, NUMA node {'not known' if numa is None else numa}"


def nics(sys: Path = SYS) -> Sequence[Nic]:
    """The cards that are up, RDMA first. A card that is both is listed as both."""
    found = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        card = port.parents[1]
        if _text(port / "state").endswith("ACTIVE"):
            gbit = re.match(r"[\d.]+", _text(port / "rate"))
            rate = float(gbit[0]) / 8 if gbit else None
            found.append(Nic(f"{card.name}:{port.name}", True, rate, *_place(card / "device")))
    for card in sorted(sys.glob("class/net/*")):
        if _text(card / "type") != LOOPBACK and _text(card / "operstate") in ("up", "unknown"):
            mbit = _text(card / "speed")
            rate = int(mbit) / 8000 if mbit.isdecimal() else None
            found.append(Nic(card.name, False, rate, *_place(card / "device")))
    return found


def nearest(path: Sequence[str], numa: int | None, cards: Iterable[Nic]) -> Nic | None:
    """The card that shares most of the way through PCIe with a device; of equal ones RDMA, the NUMA node, the rate."""

    def closeness(card: Nic) -> tuple[bool, int, bool, float]:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, card.path, strict=False)))
        return card.rdma, shared, numa is not None and card.numa == numa, card.gb_s or 0.0

    return max(cards, key=closeness, default=None)


def place_of(bus: str, sys: Path = SYS) -> tuple[tuple[str, ...], int | None]:
    """Path and NUMA node of the PCI device at an address."""
    return _place(sys / "bus/pci/devices" / bus)


def nvidia_smi(*arguments: str) -> str:
    """What the program prints; empty where there is none, or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""  # it hangs where a GPU is lost
    return done.stdout if done.returncode == 0 else ""


def buses() -> Mapping[str, str]:
    """The PCI address of each GPU of this host, by its UUID without the prefix ``GPU-``, as torch has it."""
    rows = nvidia_smi("--query-gpu=uuid,pci.bus_id", "--format=csv,noheader").splitlines()
    # The program writes eight digits of the domain, sysfs four.
    return {uuid.removeprefix("GPU-"): bus.strip().lower()[4:] for uuid, _, bus in (row.partition(",") for row in rows)}


def nvlink_gb_s(bus: str) -> float | None:
    """The sum of the rates of a GPU's NVLinks in each direction; None: it has none."""
    rates = re.findall(r"Link \d+: ([\d.]+) GB/s", nvidia_smi("nvlink", "--status", "-i", bus))
    return sum(map(float, rates)) or None


def bus_of(device: str) -> str:
    """The PCI address of a GPU as this process numbers it; empty: not known, or no GPU."""
    if not device.startswith("cuda"):
        return ""
    import torch

    number = int(device.partition(":")[2] or 0)
    return buses().get(str(torch.cuda.get_device_properties(number).uuid), "")


def _text(file: Path) -> str:
    """What a file of sysfs says; empty where it cannot be read: a card that is down has no speed."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _place(link: Path) -> tuple[tuple[str, ...], int | None]:
    """The PCI devices from the root to one, and its NUMA node."""
    real = link.resolve()
    path = tuple(part for part in real.parts if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part))
    # A virtual card's device lies below the PCI device, which has the node.
    node = next(filter(None, (_text(folder / "numa_node") for folder in (real, *real.parents))), "")
    return path, int(node) if node.isdecimal() else None
