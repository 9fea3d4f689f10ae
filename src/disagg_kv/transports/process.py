"""Which process a peer is, and whether it still runs. Linux only."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

from ..errors import PeerLostError, TransportError


def _started(pid: int) -> int:
    """Field 22 of ``/proc/<pid>/stat``: clock ticks from boot to the start of the process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@frozen
class Process:
    """One life of one process; a process id alone may be used again.

    Args:
        pid: its id.
        started: clock ticks from the boot of the host to its start.
        host: the boot of the host and the PID namespace in which ``pid`` means something.
    """

    pid: int
    started: int
    host: str

    @classmethod
    def own(cls) -> Process:
        """The calling process."""
        return cls(os.getpid(), _started(os.getpid()), _host())

    def watch(self) -> int:
        """A file descriptor that becomes readable when the process has ended; the caller closes it.

        Once it is readable no thread of the process runs any more, so nothing that it copied itself lands later.

        Raises:
            PeerLostError: the process has ended.
            TransportError: it is not a process of this host and PID namespace.
        """
        here = _host()
        if self.host != here:
            raise TransportError(f"process {self.pid} is of host or PID namespace {self.host}, this one of {here}")
        try:
            watched = os.pidfd_open(self.pid)
        except OSError as error:
            raise PeerLostError(f"process {self.pid} has ended: {error}") from error
        # Started when the descriptor says, seen after the pidfd was opened: the pidfd cannot be of a later process.
        try:
            if _started(self.pid) == self.started:
                return watched
        except OSError:
            pass
        os.close(watched)
        raise PeerLostError(f"process {self.pid}, started at tick {self.started}, has ended")
