"""Files that are the addresses of Unix-domain sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigurationError

_BUSY_S = 1.0
"""How long another process of our user may take to bind a socket in a folder."""

_LOCK = ".disagg_kv-{}.lock"
"""The lock file, by user number. Other users cannot open it; a folder could be locked by every user who can read it."""

_NO_LISTENER = (errno.ECONNREFUSED, errno.ENOENT)


@contextmanager
def claimed(bind: str, path: Path) -> Iterator[None]:
    """Inside, no other process of this user binds a socket in that folder; a file of an ended process is removed.

    A file may outlive the process that listened there, and replacing it takes more than one step.

    Raises:
        ConfigurationError: a process listens there, the file is no socket, or another user prevents the lock.
        OSError: there is no such folder, or this user may not use it.
    """
    file = path.parent / _LOCK.format(os.geteuid())
    lock = _lock(bind, file)
    try:
        if path.exists():
            _refuse_in_use(bind, path)
            path.unlink()
        yield
    finally:
        try:
            # While it is locked: the next process makes another one, and sees that it waited for this one in vain.
            file.unlink(missing_ok=True)
        finally:
            # Not by closing alone: a process that was forked meanwhile would keep it.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _lock(bind: str, file: Path) -> int:
    """Our user's lock file of a folder, locked; as a descriptor."""
    until = time.monotonic() + _BUSY_S
    while True:
        lock = _open(bind, file)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:
            pass  # the process that had it has just taken it away
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(lock)
                raise ConfigurationError(f"channel {bind!r}: another process keeps {file} locked") from None
            time.sleep(0.01)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _open(bind: str, file: Path) -> int:
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (PermissionError, IsADirectoryError) as error:
        raise ConfigurationError(f"channel {bind!r}: {file} cannot be locked by this user: {error}") from error
    found = os.fstat(lock)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not stat.S_ISREG(found.st_mode):
        os.close(lock)
        raise ConfigurationError(f"channel {bind!r}: {file} is open to other users; use a private folder")
    return lock


def listening(path: Path, backlog: int) -> socket.socket:
    """A socket that listens at a file which was never open to other users, whatever the process's umask.

    Linux gives the file the mode of the bound socket, minus the umask.

    Raises:
        OSError: it cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)
        sock.setblocking(False)
        sock.bind(str(path))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _refuse_in_use(bind: str, path: Path) -> None:
    if not path.is_socket():
        raise ConfigurationError(f"channel {bind!r}: the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a process that has stopped accepting is still there
        if probe.connect_ex(str(path)) not in _NO_LISTENER:
            raise ConfigurationError(f"channel {bind!r}: the address is in use, or this user may not connect to it")
