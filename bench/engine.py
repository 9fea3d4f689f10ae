"""A rank's engine thread while a room is under way: it polls the endpoint once per step, and acts on the handle."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from disagg_kv.endpoints.handle import RoomHandle
from disagg_kv.errors import DeadlineError
from disagg_kv.ids import room_name

POLL_S = 20e-6
"""Seconds for which an engine thread that waits sleeps between two polls."""

LOOK_S = 0.0005
"""The same where the instant of the end is not measured."""

SELDOM_S = 0.002
"""The same where each poll would take time from the endpoints that are measured."""

BUSY_S = 0.0003
"""Seconds of Python code that a busy engine thread runs between two polls."""


def between_polls(*, busy: bool, pause_s: float = POLL_S) -> Callable[[], object]:
    """What an engine thread does between two polls: it sleeps for ``pause_s``, or runs Python code if ``busy``."""
    return partial(run_python, BUSY_S) if busy else partial(time.sleep, pause_s)


def run_python(seconds: float) -> None:
    """Run Python code, as an engine does; other threads get the interpreter when they ask for it.

    It is not given away in between: a thread that gives it away for instants, more often than once in a switch
    interval, may keep all others out, as each instant begins their wait anew (CPython's ``take_gil``).
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def wait_until(
    poll: Callable[[], object],
    good: Callable[[], bool],
    handle: RoomHandle,
    timeout_s: float,
    between: Callable[[], object],
) -> None:
    """Poll and look, step by step, until it is good.

    Args:
        poll: the endpoint's.
        good: whether the wait is over, by what the handle shows.
        handle: a room of that endpoint.
        timeout_s: seconds that this may take.
        between: what the engine's thread does between two polls.

    Raises:
        DisaggKVError: the room has failed.
        DeadlineError: it is not good in time.
    """
    until = time.monotonic() + timeout_s
    poll()
    while not good():
        if handle.error is not None:
            raise handle.error
        if time.monotonic() > until:
            raise DeadlineError(f"{room_name(handle.room)}: not done after {timeout_s:g} s")
        between()
        poll()
    if handle.error is not None:
        raise handle.error
