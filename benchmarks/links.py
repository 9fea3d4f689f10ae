"""What a link costs: bytes and descriptors of this process for one connected peer, by channel and by transport.

Another process holds the peers. This process connects to all of them, and each of them sends a frame back: the first
columns. Then both sides drop these links and make them again, several times. The other columns are what is left after
the last round, and what of it stays when the C library gives back what it has free (``malloc_trim``).

    python -m benchmarks.links --json benchmarks/results/cpu_links.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import attrs
from attrs import frozen

from bench.machine import Machine
from disagg_kv.channels import Arrived, Channel, UnixChannel, ZmqChannel
from disagg_kv.errors import DeadlineError
from disagg_kv.transports import Transport
from disagg_kv.transports.registry import transport

A = TypeVar("A")
WAIT_S = 60.0
ROUNDS = 8
BEFORE = 4
"""Peers that are connected before anything is measured."""

PAUSE_S = 0.5
"""Seconds in which libraries drop what is closed, on their own threads."""


@frozen
class Link:
    """One kind: what a peer adds, and what is left of that after all rounds, before and after ``malloc_trim``."""

    kind: str
    nbytes: float
    descriptors: float
    left_bytes: float
    left_descriptors: float
    trimmed_bytes: float


def held() -> tuple[int, int]:
    """Bytes of this process in memory, and its descriptors."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resident, len(list(Path("/proc/self/fd").iterdir()))


def channel(kind: str, folder: str, name: str) -> Channel:
    """A channel of a kind."""
    return UnixChannel(f"unix://{folder}/{name}") if kind == "unix" else ZmqChannel(f"ipc://{folder}/{name}")


def answer(pipe: Connection, kind: str, folder: str, peers: int) -> None:
    """The process of the channels: each sends a frame to whatever address a frame names."""
    channels = [channel(kind, folder, f"p{number}") for number in range(peers)]
    pipe.send([one.address for one in channels])
    while not pipe.poll():
        for one in channels:
            for event in one.poll():
                if isinstance(event, Arrived) and event.frame:
                    one.send(event.frame.decode(), b"answer")
                elif isinstance(event, Arrived):
                    one.forget(f"{'unix' if kind == 'unix' else 'ipc'}://{folder}/me")
        time.sleep(0.01)


def until(good: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + WAIT_S
    while not good():
        if time.monotonic() > end:
            raise DeadlineError(f"nothing has come for {WAIT_S:g} s")
        time.sleep(0.01)


def of_channel(kind: str, peers: int) -> Link:
    """What a peer costs a channel."""
    with tempfile.TemporaryDirectory(prefix="disagg-kv-links-") as folder:
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(target=answer, args=(theirs, kind, folder, peers))
        process.start()
        addresses: Sequence[str] = ours.recv()
        me = channel(kind, folder, "me")

        def meet(some: Sequence[str]) -> None:
            came = 0

            def good() -> bool:
                nonlocal came
                came += sum(isinstance(one, Arrived) for one in me.poll())
                return came >= len(some)

            for address in some:
                me.send(address, me.address.encode())
            until(good)

        def part(some: Sequence[str]) -> None:
            for address in some:
                me.send(address, b"")
            time.sleep(PAUSE_S)
            for address in some:
                me.forget(address)
            time.sleep(PAUSE_S)
            me.poll()

        meet(addresses[:BEFORE])
        found = rounds(kind, addresses[BEFORE:], meet, part)
        me.close()
        ours.send("end")
        process.join()
    return found


def rounds(
    kind: str, some: Sequence[A], meet: Callable[[Sequence[A]], None], part: Callable[[Sequence[A]], None]
) -> Link:
    """Make and drop the links of these peers, several times."""
    ctypes.CDLL(None).malloc_trim(0)
    series = [held()]
    for _ in range(ROUNDS):
        for act in (meet, part):
            act(some)
            series.append(held())
    ctypes.CDLL(None).malloc_trim(0)
    series.append(held())
    grown = [[(value - first) / len(some) for value, first in zip(one, series[0], strict=True)] for one in series]
    (nbytes, descriptors), (left_bytes, left_descriptors), (trimmed_bytes, _) = grown[1], grown[-2], grown[-1]
    return Link(kind, nbytes, descriptors, left_bytes, left_descriptors, trimmed_bytes)


def register(pipe: Connection, kind: str, peers: int) -> None:
    """The process of the transports: each registers a small buffer."""
    made = [transport(kind) for _ in range(peers)]
    for one in made:
        one.register([one.allocate(4096)])  # type: ignore[attr-defined]
    pipe.send([one.local_descriptor() for one in made])
    pipe.recv()


def of_transport(kind: str, peers: int) -> Link:
    """What a peer costs a transport."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=register, args=(theirs, kind, peers))
    process.start()
    descriptors: Sequence[bytes] = ours.recv()
    me: Transport = transport(kind)

    def meet(some: Sequence[bytes]) -> None:
        for one in some:
            me.connect(one, 10.0)
        time.sleep(PAUSE_S)

    def part(some: Sequence[bytes]) -> None:
        for one in some:
            me.disconnect(me.peer_of(one))
        time.sleep(PAUSE_S)

    meet(descriptors[:BEFORE])
    found = rounds(kind, descriptors[BEFORE:], meet, part)
    ours.send("end")
    process.join()
    me.close(0.0)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    results = [of_channel(kind, given.peers) for kind in ("unix", "zeromq")]
    results.append(of_transport("shm", given.peers))
    document = {
        "peers": given.peers,
        "rounds": ROUNDS,
        "links": [attrs.asdict(one) for one in results],
        "machine": attrs.asdict(Machine.here()),
    }
    text = json.dumps(document, indent=2) + "\n"
    if given.json is not None:
        given.json.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
