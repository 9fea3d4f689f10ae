"""Reads the status sockets of endpoints: what ``disagg-kv top`` shows. Needs no torch.

:class:`~disagg_kv.observe.status_socket.StatusSocket` is the other end.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, PeerLostError, RemoteProtocolError

FORMAT = 2
"""Of the document; changes with its fields."""

SUFFIX = ".status"
LONGEST = 107
"""Bytes of a path to a Unix socket, see unix(7)."""

MOST_BYTES = 64 << 20
"""Longest document that is read."""


def default_folder() -> Path:
    """Where the sockets of this user are: ``disagg_kv`` in ``XDG_RUNTIME_DIR``, else a folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "disagg_kv"
    return Path(tempfile.gettempdir()) / f"disagg_kv-{os.geteuid()}"


def check_folder(folder: Path, *, make: bool = False) -> None:
    """A folder of sockets must belong to this user, and let no other user in.

    Raises:
        ConfigurationError: it does not, or there is none.
    """
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigurationError(f"folder {str(folder)!r}: {exc.strerror}") from exc
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"folder {str(folder)!r}: it is no folder")
    if found.st_uid != os.geteuid():
        raise ConfigurationError(f"folder {str(folder)!r}: it belongs to user {found.st_uid}, not {os.geteuid()}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigurationError(f"folder {str(folder)!r}: mode {mode:04o} lets other users in; 0700 is needed")


def sockets(folder: Path) -> Sequence[Path]:
    """The sockets in a folder, in the order of their names; of those with numbers, the ninth comes before the tenth.

    Raises:
        ConfigurationError: see :func:`check_folder`.
    """
    check_folder(folder)
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (len(path.name), path.name))


def _connect(connection: socket.socket, path: Path, until: float) -> None:
    """Connect; a socket whose queue is full says so at once, see connect(2) on EAGAIN."""
    connection.setblocking(False)
    while True:
        try:
            connection.connect(os.fspath(path))
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


def read_status(path: Path, timeout_s: float = 5.0) -> dict[str, Any]:
    """The document of an endpoint.

    Raises:
        ConfigurationError: the endpoint belongs to another user, or there is no socket.
        PeerLostError: nothing listens, or does not answer in time.
        RemoteProtocolError: the answer is no document of this version.
    """
    until = time.monotonic() + timeout_s
    chunks: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _connect(connection, path, until)
            connection.settimeout(timeout_s)
            while chunk := connection.recv(1 << 16):
                chunks.append(chunk)
                left = until - time.monotonic()
                if left <= 0 or sum(map(len, chunks)) > MOST_BYTES:
                    raise RemoteProtocolError(f"{path}: no end after {timeout_s:g} s or {MOST_BYTES} bytes")
                connection.settimeout(left)
        except (PermissionError, FileNotFoundError) as exc:
            raise ConfigurationError(f"{path}: {exc.strerror}") from exc
        except OSError as exc:
            raise PeerLostError(f"{path}: no endpoint answers: {exc}") from exc
    try:
        found = json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"{path}: {b''.join(chunks)[:64]!r} is no JSON") from exc
    match found:
        case {"format": 2, "ok": False, "error": {"type": "refused", "message": str(message)}}:
            raise ConfigurationError(f"{path}: {message}")
        case {"format": 2, "ok": False, "error": {"message": str(message)}}:
            raise RemoteProtocolError(f"{path}: {message}")
        case {"format": 2, "ok": True, "rooms": list(), "peers": list()}:
            return dict(found)
        case {"format": other}:
            raise RemoteProtocolError(f"{path}: format {other!r} of another version, not {FORMAT}")
    raise RemoteProtocolError(f"{path}: {b''.join(chunks)[:64]!r} is no status of an endpoint")
