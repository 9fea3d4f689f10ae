"""``disagg-kv doctor --between`` and ``--peer``: which transports carry bytes to another process, and how fast.

As a program, the module is the other process of ``--between``.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import distributions, version

import msgspec
import torch
from attrs import evolve, frozen
from rich.text import Text

from ..channels import Channel, Keys, UnixChannel, ZmqChannel
from ..channels.reach import reached_at
from ..core.wire.frames import VERSION
from ..errors import UnknownNameError
from ..memory import new_buffer
from ..transports import Process
from ..transports.registry import AUTO, IN_AUTO
from .output import Json
from .places import nics, nvlink_gb_s, place
from .probe import NBYTES, TIMES, About, Bye, Lane, Link, finished, measure, serve
from .ucx import SLOW, logged, only_tcp, settings

FAILED, FELL_BACK = "bold red", "FELL BACK TO TCP"
STARTS_S, PEER_S = 60.0, 10.0
"""How long the two processes of ``--between`` wait for each other to start, and ``--peer`` for an answer."""

LEAVES_S = 0.2
"""In which a last frame leaves this process."""

COPY = "a copy within a process"


def good(lane: Lane) -> bool:
    """Whether it moved the bytes, over what it is for."""
    return not (lane.error or lane.fell_back_to_tcp)


def text(lane: Lane) -> Text:
    """A lane for people; what is wrong in red."""
    name = f"{'auto' if lane.auto else '':<5}{lane.transport:<9}"
    if lane.gb_s is None:
        return Text.assemble(name, (f"FAILED: {lane.error}", FAILED))
    share = f"{lane.gb_s / lane.most_gb_s:.0%} of {lane.most_gb_s:.4g} GB/s, {lane.most}" if lane.most_gb_s else ""
    line = Text("; ".join(filter(None, [f"{name}{lane.gb_s:8.2f} GB/s", share, lane.over])))
    return line.append(f"  {FELL_BACK}", FAILED) if lane.fell_back_to_tcp else line


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
        return AUTO, *IN_AUTO[self.here.place.device.partition(":")[0]]

    def measured(self, name: str) -> Lane:
        """What the transport of a name does."""
        lane = measure(self.link, name, self.here.place.device, self.host)
        lane = evolve(lane, auto=name == AUTO, gb_s=rate(lane.seconds) if lane.seconds else None)
        near = self.here.where == self.there.where
        memory = self.here.place.device.partition(":")[0]
        lanes = logged(self.log, str(os.getpid()), memory) if lane.transport == "nixl" else []
        over = {
            "nixl": f"UCX: {', '.join(lanes) or 'it does not log over what'}",
            "mooncake": "tcp, as configured" if self.host or self.here.place.device == "cpu" else "nvlink_intra",
        }.get(lane.transport, "")
        tcp = only_tcp(lanes)
        fell_back = tcp and (near or any(card.rdma for card in nics()))
        most_gb_s, most = self._most(near, lanes)
        over += SLOW if tcp and near else ""
        return evolve(lane, over=over, fell_back_to_tcp=fell_back, most_gb_s=most_gb_s, most=most)

    def _most(self, near: bool, lanes: Sequence[str]) -> tuple[float | None, str]:
        """The rate that a lane could reach, and of what."""
        here, there = self.here.place, self.there.place
        if near and (here.device == "cpu" or here.path == there.path):
            return self.copy_gb_s, COPY
        if near:
            return nvlink_gb_s(here.path[-1]) if here.path else None, "NVLink"
        named = {name.partition("/")[2] for name in lanes}
        cards = {card.name: card.gb_s for card in nics() if card.name in named}
        known = [gb_s for gb_s in cards.values() if gb_s is not None]
        return (sum(known) if len(known) == len(cards) else None), ", ".join(cards)

    def head(self) -> Iterator[Text]:
        """What is known before anything is measured."""
        yield Text(f"{NBYTES >> 20} MiB, median of up to {TIMES} writes; {COPY}: {self.copy_gb_s:.4g} GB/s")
        for side, name in ((self.here, "from"), (self.there, "to")):
            yield Text(f"{name:<5}{side.place.device} of {side.host}: {side.place}")
        ours, theirs = ({*side.versions.items()} for side in (self.here, self.there))
        for name, versions in (("both", ours & theirs), ("from", ours - theirs), ("to", theirs - ours)):
            if versions:
                found = ", ".join(f"{package} {number}" for package, number in sorted(versions))
                yield Text(f"{name:<5}{found}", FAILED if "protocol" in dict(versions) and name != "both" else "")

    def document(self, lanes: Sequence[Lane]) -> dict[str, Json]:
        """The result as JSON."""
        found: dict[str, Json] = msgspec.to_builtins({"from": self.here, "to": self.there, "transports": lanes})
        return {"ok": good(lanes[0]), "bytes": NBYTES, "copy_gb_s": self.copy_gb_s, **found}


def rate(seconds: Sequence[float]) -> float:
    """GB/s of writes of NBYTES, by their median."""
    return NBYTES / statistics.median(seconds) / 1e9


def about(device: str) -> About:
    """This side."""
    libraries = {one.name: one.version for one in distributions() if one.name.startswith(("nixl", "mooncake"))}
    versions = {"disagg_kv": version("disagg_kv"), "protocol": str(VERSION), **libraries}
    return About(platform.node(), Process.own().host, place(device), versions)


@contextmanager
def between(device: str) -> Iterator[Probe]:
    """A probe to a second process of this host; of two GPUs, to the next one."""
    check_device(device)
    kind, _, number = device.partition(":")
    other = kind if kind == "cpu" else f"cuda:{(int(number or 0) + 1) % torch.cuda.device_count()}"
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", __name__, f"unix://{folder}/to", other]
        with subprocess.Popen(program, stdout=2) as process:
            try:
                with to_peer(program[3], device, None, STARTS_S, lambda: process.poll() is None) as probe:
                    yield probe
                with suppress(subprocess.TimeoutExpired):  # a side that hangs is killed
                    process.wait(STARTS_S)
            finally:
                process.kill()


@contextmanager
def to_peer(
    address: str, device: str, keys: Keys | None, patience_s: float = PEER_S, alive: Callable[[], bool] = lambda: True
) -> Iterator[Probe]:
    """A probe to a process that listens at an address, while that is alive."""
    check_device(device)
    before = dict(os.environ)
    host = reached_at(address)
    any_port = f"tcp://{('[::]' if ':' in host else '0.0.0.0') if host else '127.0.0.1'}:0"
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(listening(f"unix://{folder}/from" if address.startswith("unix:") else any_port, keys)) as channel,
    ):
        os.environ.update(settings(folder))
        try:
            link = Link(channel, address)
            there = link.greet(patience_s, alive)
            source, target = (torch.ones(NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
            seconds = timeit.repeat(lambda: finished(target.copy_(source)), number=1, repeat=TIMES)
            yield Probe(link, reached_at(channel.address), about(device), there, rate(seconds), folder)
            link.send(Bye())
            link.next(time.monotonic() + LEAVES_S)
        finally:
            os.environ.clear()
            os.environ.update(before)


def listen(bind: str, device: str, keys: Keys | None, wait_s: float, say: Callable[[str], None]) -> None:
    """Be the other side of one probe, which may come within ``wait_s``; ``say`` gets the address."""
    check_device(device)
    with closing(listening(bind, keys)) as channel:
        say(channel.address)
        serve(channel, about(device), device, reached_at(channel.address), wait_s)


def listening(bind: str, keys: Keys | None) -> Channel:
    """The channel of an address."""
    return UnixChannel(bind) if bind.startswith("unix:") else ZmqChannel(bind, keys=keys)


def check_device(device: str) -> None:
    """Raise a ConfigurationError unless there is such a device here, and a transport for it."""
    if device.partition(":")[0] not in IN_AUTO:
        raise UnknownNameError("device", device, IN_AUTO)
    new_buffer(1, device)


if __name__ == "__main__":
    listen(sys.argv[1], sys.argv[2], None, STARTS_S, lambda _: None)
