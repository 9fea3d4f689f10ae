"""The store of key and value that the parent keeps and all its processes reach."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from .config import LOOPBACK


def host() -> TCPStore:
    """A new store at a free port of every address of this host."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def reach(address: str, port: int, timeout_s: float) -> TCPStore:
    """The store, from another process."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
