"""``disagg-kv doctor --between`` and ``--peer``: which transports carry bytes to another process, and how fast.

As a program, the module is the other process of ``--between``.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, frozen
from rich.text import Text

from ..channels import Channel, Keys, UnixChannel, ZmqChannel
from ..core.wire.frames import VERSION
from ..errors import ConfigurationError
from .places import link_gb_s, nics, nvlink_gb_s, place
from .ucx import logged, only_tcp, settings

if TYPE_CHECKING:
    from .output import Json
    from .probe import About, Lane, Link

FAILED, FELL_BACK = "bold red", "FELL BACK TO TCP"
STARTS_S = 60.0
"""How long the two processes of ``--between`` wait for each other to start, and for the second one to end."""


LEAVES_S = 0.2
"""In which a last frame leaves this process."""

PEER_S = 10.0
"""How long a process at an address may take to answer."""


@frozen
class Row:
    """A lane, and what it is compared with.

    Args:
        lane: what was measured.
        over: what the bytes go over.
        fell_back: it is TCP, though there is something faster.
        most_gb_s: a nominal rate, or that of a copy; None: not known.
        most: what has that rate.
    """

    lane: Lane
    over: str
    fell_back: bool
    most_gb_s: float | None
    most: str

    @property
    def good(self) -> bool:
        """Whether it moved the bytes, over what it is for."""
        return not (self.lane.error or self.fell_back)

    def text(self) -> Text:
        """For people; what is wrong in red."""
        name = f"{'auto' if self.lane.auto else '':<5}{self.lane.transport:<9}"
        if self.lane.gb_s is None:
            return Text.assemble(name, (f"FAILED: {self.lane.error}", FAILED))
        share = (
            f"{self.lane.gb_s / self.most_gb_s:4.0%} of {self.most_gb_s:.4g} GB/s, {self.most}; " if self.most else ""
        )
        parts = Text(f"{name}{self.lane.gb_s:8.2f} GB/s  {share}over {self.over}")
        return parts.append(f"  {FELL_BACK}", FAILED) if self.fell_back else parts

    def document(self) -> Mapping[str, Json]:
        """The same as JSON."""
        rest = {"gb_s": self.lane.gb_s, "over": self.over, "fell_back_to_tcp": self.fell_back}
        return {**asdict(self.lane), **rest, "most_gb_s": self.most_gb_s, "most": self.most}


@frozen
class Probe:
    """The other side of a probe, and what all rows need.

    Args:
        link: to the other side.
        host: where the other side reaches this one; empty: all is on one host.
        here: this side.
        there: the other one.
        copy_gb_s: of a copy within this process, measured just now.
        log: the folder into which UCX logs.
    """

    link: Link
    host: str
    here: About
    there: About
    copy_gb_s: float
    log: str

    def names(self) -> Sequence[str]:
        """What is measured: what ``auto`` takes, then each transport for such memory."""
        from ..transports.registry import AUTO, IN_AUTO

        return AUTO, *IN_AUTO[self.here.place.device.partition(":")[0]]

    def row(self, name: str) -> Row:
        """Measure the transport of a name."""
        from .probe import measure

        lane = measure(self.link, name, self.here.place.device, self.host)
        near = self.here.where == self.there.where
        lanes = logged(self.log, str(os.getpid())) if lane.transport == "nixl" else []
        rdma = [card.name for card in nics() if card.rdma]
        fell_back = only_tcp(lanes) and (near or bool(rdma))
        over = self._over(lane.transport, lanes, rdma)
        return Row(lane, over, fell_back, *self._most(near, lane.transport, lanes))

    def end(self) -> None:
        """Let the other process end."""
        from .probe import Bye

        self.link.send(Bye())
        self.link.next(time.monotonic() + LEAVES_S)

    def head(self) -> Iterator[Text]:
        """What is known before anything is measured."""
        from .probe import NBYTES, TIMES

        yield Text(
            f"{NBYTES >> 20} MiB, median of up to {TIMES} writes; a copy within a process: {self.copy_gb_s:.4g} GB/s"
        )
        for side, name in ((self.here, "from"), (self.there, "to")):
            yield Text(f"{name:<5}{side.place.device} of {side.host}: {side.place}")
        ours, theirs = ({*side.versions.items()} for side in (self.here, self.there))
        for name, versions in (("both", ours & theirs), ("from", ours - theirs), ("to", theirs - ours)):
            if versions:
                found = ", ".join(f"{package} {number}" for package, number in sorted(versions))
                yield Text(f"{name:<5}{found}", FAILED if "protocol" in dict(versions) and name != "both" else "")

    def _over(self, transport: str, lanes: Sequence[str], rdma: Sequence[str]) -> str:
        if transport == "nixl":
            return f"UCX: {', '.join(lanes) or 'it does not log over what'}"
        if transport == "mooncake":
            near_gpu = self.here.place.device != "cpu" and not self.host
            better = f"; protocol='rdma' would use {', '.join(rdma)}" if rdma else ""
            return "nvlink_intra" if near_gpu else f"tcp, as configured{better}"
        return "memory of the other process, mapped here"

    def _most(self, near: bool, transport: str, lanes: Sequence[str]) -> tuple[float | None, str]:
        """The rate that a lane could reach, and of what."""
        here, there = self.here.place, self.there.place
        if near and (here.device == "cpu" or here.path == there.path):
            return self.copy_gb_s, "a copy within a process"
        if near and here.path:
            nvlink = nvlink_gb_s(here.path[-1])
            rate = link_gb_s(here.path[-1]) if nvlink is None else nvlink
            return (None, "") if rate is None else (rate, "PCIe" if nvlink is None else "NVLink")
        named = {name.partition("/")[2] for name in lanes}
        cards = [card for card in nics() if card.name in named or (transport != "nixl" and not card.rdma)]
        rates = [card.gb_s for card in cards if card.gb_s is not None]
        # Without the names of a library, it is one card only where there is no other.
        if len(rates) != len(cards) or not cards or (transport != "nixl" and len(cards) > 1):
            return None, ""
        return sum(rates), ", ".join(card.name for card in cards)

    def document(self, rows: Sequence[Row]) -> dict[str, Json]:
        """The result as JSON."""
        from .probe import NBYTES

        sides: dict[str, Json] = {
            name: {"host": side.host, "place": asdict(side.place), "versions": side.versions}
            for name, side in (("from", self.here), ("to", self.there))
        }
        return {
            "ok": rows[0].good,
            "bytes": NBYTES,
            "copy_gb_s": self.copy_gb_s,
            **sides,
            "transports": [row.document() for row in rows],
        }


def about(device: str) -> About:
    """This side."""
    from ..transports import Process
    from .probe import About

    libraries = {one.name: one.version for one in distributions() if one.name.startswith(("nixl", "mooncake"))}
    versions = {"disagg_kv": version("disagg_kv"), "protocol": str(VERSION), **libraries}
    return About(platform.node(), Process.own().host, place(device), versions)


def copies(device: str) -> float:
    """GB/s of copies within this process."""
    import torch

    from .probe import NBYTES, TIMES, finished, rate

    source, target = (torch.ones(NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(TIMES):
        finished(target)
        began = time.perf_counter()
        target.copy_(source)
        finished(target)
        seconds.append(time.perf_counter() - began)
    return rate(seconds)


@contextmanager
def between(device: str) -> Iterator[Probe]:
    """A probe to a second process of this host; of two GPUs, to the next one."""
    with tempfile.TemporaryDirectory() as folder, _logging(folder):
        channel = UnixChannel(f"unix://{folder}/from")
        address = f"unix://{folder}/to"
        program = [sys.executable, "-m", __name__, address, next_to(device)]
        with subprocess.Popen(program, stdout=sys.stderr) as process:
            try:
                probe = _greeted(channel, address, device, folder, STARTS_S, lambda: process.poll() is None)
                yield probe
                probe.end()
                process.wait(STARTS_S)
            finally:
                process.kill()
                channel.close()


def next_to(device: str) -> str:
    """The device of the other process of ``--between``."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device
    import torch

    return f"cuda:{(int(number or 0) + 1) % torch.cuda.device_count()}"


@contextmanager
def to_peer(address: str, device: str, keys: Keys | None) -> Iterator[Probe]:
    """A probe to a process that listens at an address."""
    with tempfile.TemporaryDirectory() as folder, _logging(folder):
        local = not re.match(r"tcp://(?!127\.|localhost|\[::1\])", address)
        bind = (
            f"unix://{folder}/from" if address.startswith("unix:") else f"tcp://{'127.0.0.1' if local else '0.0.0.0'}:0"
        )
        channel = listening(bind, keys)
        try:
            probe = _greeted(channel, address, device, folder, PEER_S, lambda: True)
            yield probe
            probe.end()
        finally:
            channel.close()


def listening(bind: str, keys: Keys | None) -> Channel:
    """The channel of an address."""
    return UnixChannel(bind) if bind.startswith("unix:") else ZmqChannel(bind, keys=keys)


def host_of(address: str) -> str:
    """The host of an address that others can reach; empty: they are on this host."""
    found = re.match(r"tcp://\[?(?!127\.|localhost|::1\])([^\]#]+?)\]?:\d+(#|$)", address)
    return found[1] if found else ""


def load_keys(folder: Path | None, name: str | None) -> Keys | None:
    """The pair ``name`` in a folder, which allows the other keys there; None: no folder."""
    if (folder is None) != (name is None):
        raise ConfigurationError("--keys needs --name, and --name needs --keys")
    return None if folder is None else Keys.load(folder / f"{name}.key_secret", folder)


@contextmanager
def _logging(folder: str) -> Iterator[None]:
    """Let UCX log in this process and in those that it starts."""
    before = dict(os.environ)
    os.environ.update(settings(folder))
    try:
        yield
    finally:
        for name in settings(folder):
            os.environ.pop(name)
        os.environ.update(before)


def _greeted(
    channel: Channel, address: str, device: str, folder: str, patience_s: float, alive: Callable[[], bool]
) -> Probe:
    from .probe import Link

    link, host = Link(channel, address), host_of(channel.address)
    there = link.greet(patience_s, alive)
    return Probe(link, host, about(device), there, copies(device), folder)


def listen(channel: Channel, device: str, wait_s: float) -> None:
    """Be the other side of one probe."""
    from .probe import serve

    try:
        serve(channel, about(device), device, host_of(channel.address), wait_s)
    finally:
        channel.close()


if __name__ == "__main__":
    listen(UnixChannel(sys.argv[1]), sys.argv[2], STARTS_S)
