"""Processes that never outlive their parent, and a clock that they share."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

GRACE_S = 5.0
"""Seconds that a process gets between SIGTERM and SIGKILL."""

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent, which must be ``parent``, ends (Linux prctl(2)).

    SIGTERM becomes ``SystemExit``, so that open resources are closed; the parent handles SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"parent {parent} ended before this process began")


def now() -> float:
    """Seconds of a clock that all processes of the host share (CLOCK_MONOTONIC)."""
    return time.monotonic()


def _leave(number: int, _: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)
