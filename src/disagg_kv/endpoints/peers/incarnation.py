"""The incarnation of an endpoint: each start is another one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from attrs import field, frozen

from ...ids import Epoch
from ...transports.process import Ending, Process


def new_epoch() -> Epoch:
    """Sixteen bytes that were never used before."""
    return Epoch(os.urandom(16))


def boot_ns() -> int:
    """Nanoseconds since the boot of this host."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@frozen
class Incarnation:
    """All that an endpoint does not choose itself. Simulations give their own.

    Args:
        epoch: its name, never used before or after.
        process: what it runs in.
        watch: how the process of a peer is watched; raises PeerLostError if it has ended, and TransportError if it
            cannot be seen from here, or (``retryable``) cannot be watched now.
        born: when it began, in nanoseconds since the boot of ``process.host``: of two there the later one counts.
    """

    epoch: Epoch = field(factory=new_epoch)
    process: Process = field(factory=Process.own)
    watch: Callable[[Process], Ending] = Process.watch
    born: int = field(factory=boot_ns)
