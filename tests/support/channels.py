"""Helpers for tests of channels: waiting for an event, a free port, and an inbox in a process of its own."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from disagg_kv.channels import Channel, News

_CHILD = """
import sys
from disagg_kv.channels import Arrived, UnixChannel, ZmqChannel
channel = (UnixChannel if sys.argv[1].startswith("unix:") else ZmqChannel)(sys.argv[1])
print(channel.address, flush=True)
while True:
    channel.wait(60)
    for event in channel.poll():
        if isinstance(event, Arrived):
            print(event.frame.decode(), flush=True)
"""


def unused_port() -> int:
    """A port that nobody has, below those that the kernel gives to connections and to whoever asks for any."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, max(given, 25_000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def take(channel: Channel, timeout_s: float) -> Sequence[News]:
    """What comes in; waits once, up to ``timeout_s``, and perhaps in vain."""
    channel.wait(timeout_s)
    return channel.poll()


def wait_for(channel: Channel, *wanted: News) -> list[News]:
    """Poll until all of ``wanted`` came; everything that came. The test's own timeout bounds it."""
    came: list[News] = []
    while not all(event in came for event in wanted):
        came.extend(take(channel, 60))
    return came


@contextmanager
def child_inbox(bind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that prints each frame it receives, and its address; killed at the end."""
    command = [sys.executable, "-c", _CHILD, bind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, read_line(process)
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")
