"""Files that are the addresses of Unix-domain sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigurationError

_BUSY_S = 1.0
"""How long somebody else may keep a folder to bind a socket in it."""

_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)


@contextmanager
def claimed(bind: str, path: Path) -> Iterator[None]:
    """Inside, nobody else of ours binds a socket in that folder; what is left of one that has ended is gone.

    A file may outlive who listened there, and to take its place is no single step.

    Raises:
        ConfigurationError: something lives there, or is no socket.
        OSError: there is no such folder, or it is not ours to use.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(bind, folder)
        if path.exists():
            _refuse_in_use(bind, path)
            path.unlink()
        yield
    finally:
        # Not by closing alone: a process that was forked meanwhile would keep it.
        fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)


def _lock(bind: str, folder: int) -> None:
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise ConfigurationError(f"channel {bind!r}: somebody keeps its folder locked") from None
            time.sleep(0.01)


def _refuse_in_use(bind: str, path: Path) -> None:
    if not path.is_socket():
        raise ConfigurationError(f"channel {bind!r}: the file is there and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # whoever has stopped accepting is still there
        if probe.connect_ex(str(path)) not in _NOBODY:
            raise ConfigurationError(f"channel {bind!r}: the address is in use, or not ours to ask")
