"""Which cores the threads of an endpoint, its channel and its transport run on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ... import arguments
from ...errors import ConfigurationError


@contextmanager
def threads_on(cores: Collection[int]) -> Iterator[None]:
    """Create a channel, a transport or an endpoint inside: the threads that they start run on these cores.

    A thread inherits the cores of the thread that starts it. So the calling thread moves to these cores, and gets its
    own ones back at the end. Engines use it where they pin a whole process to few cores.

    Args:
        cores: numbers of cores. Those that the host does not allow are left out.

    Raises:
        ConfigurationError: not numbers of cores, or the host allows none of them, or it cannot place threads.
    """
    wanted = arguments.counts(cores, "cores")
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError("cores: this host cannot place threads")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as exc:
        raise ConfigurationError(f"cores {sorted(set(wanted))} cannot be used: {exc}") from exc
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
