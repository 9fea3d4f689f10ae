"""The UCX transports of NIXL's writes to another process, from UCX's log."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_NAME = re.compile(r"\w+/[\w.:-]+")

SLOW = " (faster within a host is cma: UCX_TLS must allow it, and containers one PID namespace and SYS_PTRACE)"
"""Appended if only sockets carry writes within a host."""


def settings(folder: str) -> Mapping[str, str]:
    """The environment in which UCX logs its transports into a folder; UCX reads it when NIXL is imported."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"{folder}/%p"}


def logged(folder: str, pid: str, memory: str) -> Sequence[str]:
    """What :func:`found` finds in the log of this process, ``pid``; nothing if there is none."""
    ctypes.CDLL(None).fflush(None)  # UCX's last tables may still be in the buffer of its file
    log = Path(folder) / pid
    return found(log.read_text(), memory) if log.is_file() else []


def only_tcp(names: Sequence[str]) -> bool:
    """Whether nothing but sockets leaves the process; ``cuda_copy`` moves bytes within it."""
    kinds = {name.partition("/")[0] for name in names}
    return "tcp" in kinds and kinds <= {"tcp", "cuda_copy"}


def found(log: str, memory: str) -> Sequence[str]:
    """The transports, each with its device, in UCX's tables of writes to another process.

    ``memory`` is that of the bytes: ``cpu`` or ``cuda``.
    """
    source = "from host" if memory == "cpu" else f"from {memory}"
    names: set[str] = set()
    to_another = writes = False
    for line in log.splitlines():
        _, edge, row = line.partition("|")
        if "cfg#" in row:
            to_another, writes = "intra-node" in row or "inter-node" in row, False
        elif "by ucp_" in row:
            writes = to_another and "remote memory write" in row and source in row
        elif edge and writes:
            names.update(_NAME.findall(row))
    return sorted(names)
