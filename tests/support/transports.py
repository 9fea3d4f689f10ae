"""Transports that a child process can import by name."""

from __future__ import annotations

from disagg_kv.testing import FaultyTransport
from disagg_kv.transports import InprocTransport, ShmTransport


def faultless_inproc() -> FaultyTransport:
    """No fault is planned."""
    return FaultyTransport(InprocTransport())


def faultless_shm() -> FaultyTransport:
    """No fault is planned."""
    return FaultyTransport(ShmTransport())
