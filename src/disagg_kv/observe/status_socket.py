"""Shows an endpoint to ``disagg-kv top``, over a Unix socket for processes of the same user.

A client connects, and gets one JSON document and the end of the stream. It sends nothing; what it sends is not read.
One thread serves all clients. It reads the endpoint by :meth:`~disagg_kv.endpoints.SupportsStatus.status`, which any
thread may call, and writes without waiting. So a client that stalls delays neither the endpoint nor other clients.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from attrs import define

from .. import arguments
from ..closing import Closing
from ..core import Phase
from ..endpoints import EndpointStatus, PeerInfo, RoomInfo, SupportsStatus
from ..errors import ConfigurationError, DisaggKVError, text_of
from ..ids import room_text
from ..transports.process import Home
from .status import FORMAT, LONGEST, SUFFIX, check_folder, default_folder

log = logging.getLogger("disagg_kv")

ROOMS = 200
"""Rooms in a document: those that were opened first."""

CLIENTS = 16
"""Clients that are served at once; beyond them the one that waits longest is dropped."""

CLIENT_S = 5.0
"""Seconds in which a client must have read its document."""

FRESH_S = 0.2
"""Seconds for which a document is given out again, so that many clients cost an endpoint no more than one."""

STARTING = ".new"
"""Suffix of a socket that has no final name yet: its process has not called ``listen``."""

STARTING_S = 60.0
"""Age from which the socket of a process that was killed before it listened is removed."""

_numbers = count()


@define
class _Client:
    """A client, and what it has not read."""

    left: memoryview
    until: float


class StatusSocket(Closing):
    """A socket on which ``disagg-kv top`` reads an endpoint; a context closes it.

    Args:
        endpoint: it may end before or after the socket.
        folder: for the socket. It is created with mode 0700; None: that in which ``disagg-kv top`` looks.

    Attributes:
        path: where it is.

    Raises:
        ConfigurationError: no endpoint; or a folder of another user, or that others may enter; or too long a path; or
            the system gives no socket there.
    """

    def __init__(self, endpoint: SupportsStatus, folder: str | os.PathLike[str] | None = None) -> None:
        arguments.methods(endpoint, "endpoint", "an endpoint", "status")
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise ConfigurationError(f"folder: a path is needed, not {arguments.shown(folder)}")
        place = default_folder() if folder is None else Path(folder)
        self._endpoint = endpoint
        self._home = Home("a status socket")
        check_folder(place, make=True)
        try:
            _sweep(place)
            self._listener, self.path = _listen(place)
        except OSError as exc:
            raise ConfigurationError(f"folder {str(place)!r}: no socket can be made there: {text_of(exc)}") from exc
        self._wake, self._woken = socket.socketpair()
        self._document = (b"", -FRESH_S)
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="disagg_kv status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it and remove its file. May be repeated.

        Raises:
            LocalProtocolError: this is a forked child of the process that has it.
        """
        self._home.check()
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self.path.unlink(missing_ok=True)
        self._wake.close()

    # On the thread.

    def _serve(self) -> None:
        with self._selector as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._patience()):
                    if key.fileobj is self._woken:
                        self._drop_all()
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._write(key.fileobj)  # type: ignore[arg-type]
                self._drop_late()

    def _patience(self) -> float | None:
        untils = [client.until for client in self._clients.values()]
        return max(0.0, min(untils) - time.monotonic()) if untils else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as exc:
            log.warning("%s: a client could not be accepted: %s", self.path, text_of(exc))
            time.sleep(FRESH_S)  # no descriptor is free: the connection stays in the queue
            return
        connection.setblocking(False)
        if len(self._clients) >= CLIENTS:
            self._drop(min(self._clients, key=lambda one: self._clients[one].until))
        user = _user_of(connection)
        if user == os.geteuid():
            text = self._current()
        else:
            text = _encoded(
                _failure("refused", f"user {user} is not user {os.geteuid()}, to whom this endpoint belongs")
            )
        self._clients[connection] = _Client(memoryview(text), time.monotonic() + CLIENT_S)
        self._selector.register(connection, selectors.EVENT_WRITE)

    def _write(self, connection: socket.socket) -> None:
        client = self._clients.get(connection)
        if client is None:
            return  # it was dropped by an earlier event of this round
        try:
            client.left = client.left[connection.send(client.left, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)  # it has gone
            return
        if not client.left:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._clients[connection]
        self._selector.unregister(connection)
        connection.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in [one for one, client in self._clients.items() if client.until <= now]:
            self._drop(connection)

    def _drop_all(self) -> None:
        for connection in list(self._clients):
            self._drop(connection)

    def _current(self) -> bytes:
        """The document, no older than ``FRESH_S``."""
        text, at = self._document
        if time.monotonic() - at >= FRESH_S:
            try:
                text = _encoded(document(self._endpoint.status(ROOMS)))
            except Exception as exc:
                kind = exc.code if isinstance(exc, DisaggKVError) else type(exc).__name__
                log.warning("%s: the endpoint could not be read: %s", self.path, text_of(exc))
                text = _encoded(_failure(kind, text_of(exc)))
            self._document = text, time.monotonic()
        return text


def document(status: EndpointStatus) -> dict[str, object]:
    """What a client gets of an endpoint."""
    usage = status.usage
    return {
        "format": FORMAT,
        "ok": True,
        "pid": os.getpid(),
        "side": status.side,
        "instance": status.instance,
        "rank": status.rank,
        "address": status.address,
        "state": status.state,
        "rooms_by_phase": {phase.name.lower(): usage.rooms.get(phase, 0) for phase in Phase},
        "memory": {
            "ring_bytes": usage.ring_bytes,
            "ring_used_bytes": usage.ring_used_bytes,
            "slots": usage.slots,
            "slots_used": usage.slots_used,
            "quarantined_bytes": usage.quarantined_bytes,
        },
        "links": {"held": usage.links, "most": usage.links_most},
        "rooms": [_room(one) for one in status.rooms],
        "peers": [_peer(one) for one in status.peers],
    }


def _room(room: RoomInfo) -> dict[str, object]:
    return {
        "room": room_text(room.room),
        "phase": room.phase.name.lower(),
        "age_s": room.age_s,
        "path": room.path,
        "bytes": room.nbytes,
        "segments": room.segments,
        "error": room.error,
    }


def _peer(peer: PeerInfo) -> dict[str, object]:
    return {
        "instance": peer.instance,
        "rank": peer.rank,
        "address": peer.address,
        "epoch": peer.epoch.hex(),
        "host": peer.host,
        "pid": peer.pid,
        "state": peer.state,
        "silent_s": None if peer.silent_s == float("inf") else peer.silent_s,
        "ring_bytes": peer.ring_bytes,
        "page_bytes": peer.page_bytes,
        "slot_bytes": peer.slot_bytes,
        "rooms": [room_text(room) for room in peer.rooms],
        "transport": peer.transport,
    }


def _failure(kind: str, message: str) -> dict[str, object]:
    return {"format": FORMAT, "ok": False, "error": {"type": kind, "message": message}}


def _encoded(found: Mapping[str, object]) -> bytes:
    return json.dumps(found, allow_nan=False).encode() + b"\n"


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel noted it when it connected; see unix(7)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def _listen(folder: Path) -> tuple[socket.socket, Path]:
    """Listen on a socket in a folder; it has its name once it listens.

    No name is used twice, also by processes of equal number in containers that share the folder. So a name that
    another process has found dead can be removed at any time later.
    """
    path = folder / f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(3)}{SUFFIX}"
    starting = path.with_suffix(STARTING)
    if len(os.fsencode(path)) > LONGEST:
        raise ConfigurationError(f"folder: {str(path)!r} is longer than {LONGEST} bytes, the most for sockets")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(os.fspath(starting))
        starting.chmod(0o600)
        listener.listen(128)
        starting.rename(path)
    except OSError:
        listener.close()
        starting.unlink(missing_ok=True)
        raise
    return listener, path


def _sweep(folder: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in folder.glob(f"*{SUFFIX}"):
        if _dead(path, socket.SOCK_STREAM):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{STARTING}"):
        # While bind(2) runs, its file may be there before its socket is: a young file says nothing.
        with suppress(FileNotFoundError):
            if _dead(path, socket.SOCK_DGRAM) and time.time() - path.lstat().st_mtime > STARTING_S:
                path.unlink()


def _dead(path: Path, kind: int) -> bool:
    """Whether a file is a socket without a process.

    Args:
        path: of the file.
        kind: ``SOCK_STREAM``: a stream that is bound and does not listen has no process, either; ``SOCK_DGRAM``: it
            has one. The kernel refuses a datagram socket with EPROTOTYPE there, see connect(2).
    """
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
        return path.is_socket() and probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
