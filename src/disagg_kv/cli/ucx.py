"""The UCX transports of this host, from UCX's log of a real write between two processes.

As a program, the module makes that write and prints the id of the writing process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

TIMEOUT_S = 120.0

_NAME = re.compile(r"\w+/[\w.:-]+")


SLOW = " (slow within a host; faster is cma: UCX_TLS must allow it, and containers one PID namespace and SYS_PTRACE)"
"""Appended if only sockets carry the writes."""

WRITE = (sys.executable, "-m", __name__)
"""The program that makes a write."""


def ucx_transports(program: Sequence[str] = WRITE, timeout_s: float = TIMEOUT_S) -> str:
    """The UCX transports of NIXL's writes of CPU memory between two processes here, or why they are not known."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                program,
                env={**os.environ, **settings(folder)},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=True,
            )
        except subprocess.TimeoutExpired:
            return f"not known: a write between two processes did not end within {timeout_s:g} s"
        except subprocess.CalledProcessError as error:
            return f"not known: a write between two processes failed: {(error.stderr.splitlines() or ['?'])[-1]}"
        names = logged(folder, done.stdout.strip())
    if not names:
        return "not known: UCX does not log them"
    return ", ".join(names) + (SLOW if only_tcp(names) else "")


def settings(folder: str) -> Mapping[str, str]:
    """The environment in which UCX logs its transports into a folder; UCX reads it when NIXL is imported."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"{folder}/%p"}


def logged(folder: str, pid: str) -> Sequence[str]:
    """What :func:`found` finds in the log of a process; nothing if there is none."""
    log = Path(folder) / pid
    return found(log.read_text()) if log.is_file() else []


def only_tcp(names: Sequence[str]) -> bool:
    """Whether nothing but sockets leaves the process; ``cuda_copy`` moves bytes within it."""
    kinds = {name.partition("/")[0] for name in names}
    return "tcp" in kinds and kinds <= {"tcp", "cuda_copy"}


def found(log: str) -> Sequence[str]:
    """The transports, each with its device, in UCX's tables of writes to another process."""
    names: set[str] = set()
    to_another = writes = False
    for line in log.splitlines():
        _, edge, row = line.partition("|")
        if "cfg#" in row:
            to_another, writes = "intra-node" in row or "inter-node" in row, False
        elif "by ucp_" in row:
            writes = to_another and "remote memory write" in row
        elif edge and writes:
            names.update(_NAME.findall(row))
    return sorted(names)


def write() -> None:
    """One MiB from this process to a child, over NIXL."""
    from ..testing.ends import Child, End, HostMemory
    from ..testing.pair import batch
    from ..transports import WriteEnded
    from ..transports.nixl import NixlTransport

    memory, data = HostMemory(), np.full(1 << 20, 1, np.uint8)
    child = Child(NixlTransport, memory, TIMEOUT_S)
    source = End(NixlTransport, memory)
    child.open()
    local, remote = source.add(data), child.add(np.zeros_like(data))
    ticket = source.submit(source.connect(child.descriptor(), TIMEOUT_S), batch(local, remote, [(0, 0, data.nbytes)]))
    ended: list[WriteEnded] = []
    while not ended:
        ended = [event for event in source.events() if isinstance(event, WriteEnded) and event.ticket == ticket]
        time.sleep(0.001)
    if ended[0].error is not None:
        raise ended[0].error
    source.close(1.0)
    child.stop()


if __name__ == "__main__":
    write()
    print(os.getpid())
