"""Which process a peer is, and whether it still runs. Linux only."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
import time
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import msgspec
from attrs import frozen

from ..errors import LocalProtocolError, PeerLostError, TransportError

LOOK_S = 0.005
"""Seconds between two polls of a process: every poll is a system call that releases the GIL."""

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
"""Errors that say that this process, or its host, has no descriptor or memory left: the same may succeed later."""


def _started(pid: int) -> int:
    """Field 22 of ``/proc/<pid>/stat``: clock ticks from boot to the start of the process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@cache
def _host() -> str:
    """Names the boot of the host and the namespaces: two processes with equal results can compare ids and start times.

    Read once, since no process moves to another of these namespaces; only its children do.

    A time namespace shifts the clock since boot, and the starts of processes in ``/proc``.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Before Linux 5.6 there is no time namespace.
    return " ".join(filter(None, [boot, namespace("pid"), namespace("time")]))


def namespace(kind: str) -> str:
    """The name of this process's namespace of a kind; empty where the kernel has none."""
    link = Path(f"/proc/self/ns/{kind}")
    return str(link.readlink()) if link.is_symlink() else ""


def _unwatchable(what: str, error: Exception) -> TransportError:
    """Why a process cannot be watched; ``retryable``: for now, for want of descriptors or memory."""
    scarce = isinstance(error, OSError) and error.errno in SCARCE
    return TransportError(f"{what} cannot be watched: {error}", retryable=scarce)


class Watch:
    """Reports the end of one process; from :meth:`Process.watch`. Owns a pidfd, which is closed with this object."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._look_at = 0.0
        self._ended = False
        self._polling = threading.Lock()

    def ended(self, *, at_once: bool = False) -> bool:
        """Whether the process had ended at the last poll, at most LOOK_S ago; with ``at_once``, it is polled now.

        Any thread may call it.

        After the end no thread of it runs any more, so nothing that it copied itself lands later.
        """
        now = time.monotonic()
        if (at_once or now >= self._look_at) and not self._ended:
            self._look_at = now + LOOK_S
            with self._polling:  # a poll object refuses a second thread
                self._ended = bool(self._poll.poll(0))
        return self._ended

    def fileno(self) -> int:
        """Readable once the process has ended."""
        return self._pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)


class Ending(Protocol):
    """Reports the end of one process."""

    def ended(self, *, at_once: bool = False) -> bool:
        """Whether it has, perhaps a moment ago or (``at_once``) now; nothing that it copied itself lands later."""
        ...


@runtime_checkable
class HasDescriptor(Protocol):
    """One that has a descriptor, which is readable after the end."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


K = TypeVar("K", bound=Hashable)


class Exits(Generic[K]):
    """The ends of many processes, by one ``epoll``: a process that lives costs nothing.

    One thread calls :meth:`ended`; :meth:`add` and :meth:`remove` may be called by others meanwhile. An
    :class:`Ending` without a descriptor is asked each time.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._lock = Lock()
        self._watched: dict[K, Ending] = {}
        self._keys: dict[int, K] = {}
        self._asked: dict[K, Ending] = {}
        self._look_at = 0.0

    def add(self, key: K, ending: Ending) -> None:
        """Watch a process; replaces an earlier one of that key.

        Raises:
            TransportError: the process is not watched, since no descriptor or memory is left (``retryable``).
        """
        self.remove(key)
        with self._lock:
            if not isinstance(ending, HasDescriptor):
                self._watched[key] = self._asked[key] = ending
                return
            try:
                if self._epoll is None:
                    self._epoll = select.epoll()
                self._epoll.register(ending.fileno(), select.EPOLLIN)
            except OSError as error:
                raise _unwatchable("a process", error) from error
            self._watched[key] = ending
            self._keys[ending.fileno()] = key

    def remove(self, key: K) -> None:
        """Watch a process no more; harmless if it is not watched."""
        with self._lock:
            ending = self._watched.pop(key, None)
            if ending is None or self._asked.pop(key, None) is not None:
                return
            assert isinstance(ending, HasDescriptor)
            assert self._epoll is not None
            del self._keys[ending.fileno()]
            self._epoll.unregister(ending.fileno())

    def __len__(self) -> int:
        return len(self._watched)

    def __contains__(self, key: object) -> bool:
        return key in self._watched

    def ended(self, *, at_once: bool = False) -> list[K]:
        """Those that ended since the last call, each once; unless ``at_once``, an end within LOOK_S may be missing."""
        found = [key for key, one in list(self._asked.items()) if one.ended(at_once=at_once)] if self._asked else []
        if self._epoll is not None and self._keys:
            now = time.monotonic()
            if at_once or now >= self._look_at:
                self._look_at = now + LOOK_S
                ready = self._epoll.poll(0)
                if ready:
                    found += [key for fd, _ in ready if (key := self._keys.get(fd)) is not None]
        for key in found:
            self.remove(key)
        return found

    def clear(self) -> None:
        """Watch no process any more."""
        for key in list(self._watched):
            self.remove(key)
        with self._lock:
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None


@frozen
class Process:
    """One life of one process; a process id alone may be used again.

    Args:
        pid: its id.
        started: clock ticks from the boot of the host to its start.
        host: the boot of the host, the PID namespace in which ``pid`` means something, and the time namespace in which
            ``started`` does.
    """

    pid: int
    started: int
    host: str

    @classmethod
    def own(cls) -> Process:
        """The calling process."""
        return cls(os.getpid(), _started(os.getpid()), _host())

    def watch(self) -> Watch:
        """Return an object that reports the end of the process.

        Raises:
            PeerLostError: it has ended already.
            TransportError: it is not a process of this host and its PID and time namespaces, or cannot be watched;
                ``retryable``: no descriptor or memory is left for that.
        """
        try:
            here = _host()
            if self.host != here:
                raise TransportError(f"process {self.pid} is of host or namespace {self.host}, this one of {here}")
            watch = Watch(os.pidfd_open(self.pid))
            # Looked at after the pidfd was opened: if this is the process, the pidfd cannot be of a later one.
            started = _started(self.pid)
        except (ProcessLookupError, FileNotFoundError) as error:
            raise PeerLostError(f"process {self.pid} has ended: {error}") from error
        except (OSError, OverflowError) as error:
            raise _unwatchable(f"process {self.pid}", error) from error
        if started != self.started:
            raise PeerLostError(f"process {self.pid} of tick {self.started} has ended; another has its id")
        if watch.ended():
            raise PeerLostError(f"process {self.pid} has ended, but nobody has waited for it yet")
        return watch


PROCESS = msgspec.msgpack.Decoder(Process)
"""Shared by every transport that sends one."""


class Home:
    """The process that made something. A child that it forks has a copy, without the threads, of the same sockets.

    Args:
        what: for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self.closed = False

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise unless this is that process.

        Raises:
            LocalProtocolError: it is a child of it.
        """
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"{self._what} belongs to process {self._pid}; its forked child {os.getpid()} cannot use it, "
                "and has to make one of its own"
            )

    def check_open(self) -> None:
        """Raise unless this is that process, and the thing is open.

        Raises:
            LocalProtocolError: this is a child of it.
            TransportError: it is ``closed``.
        """
        self.check()
        if self.closed:
            raise TransportError(f"{self._what} is closed")


_kept: WeakSet[object] = WeakSet()


def keep_in_children(thing: object) -> None:
    """Keep a thing alive in forked children: to destroy their copy would break resources that this process uses."""
    _kept.add(thing)


def _keep() -> None:
    for thing in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep)
os.register_at_fork(after_in_child=_host.cache_clear)
