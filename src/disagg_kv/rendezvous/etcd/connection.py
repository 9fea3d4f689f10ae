"""Calls of an etcd cluster: endpoints in turn, versions, TLS, user and password, and our errors for theirs.

``etcd3gw`` speaks etcd's JSON gateway over HTTP. Its own watcher swallows the end of a stream and a cancelled watch, so
:meth:`EtcdConnection.watch` opens the stream with the client's session and reads it here. See etcd's API reference for
the messages, and its page on the gRPC gateway for their form in JSON.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import requests
from attrs import define, frozen
from etcd3gw import Etcd3Client
from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception, InternalServerError
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from ...errors import (
    CapacityError,
    ConfigurationError,
    DisaggKVError,
    RemoteProtocolError,
    StoreUnreachableError,
    text_of,
)

T = TypeVar("T")

OLDEST = (3, 4)
"""The oldest server whose gateway has the paths that are used here."""

WATCH_QUIET_S = 660.0
"""Seconds without a byte after which a watch is opened again. A server sends a notice every ten minutes."""

MAX_LINE = 64 << 20
"""Longest message of a watch in bytes; etcd sends what has changed since it began in few messages."""

# What the codes of gRPC mean for us; see the list of status codes in gRPC's documentation.
INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, EXHAUSTED, PRECONDITION, UNAUTHENTICATED = 3, 5, 7, 8, 9, 16

KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 40_000),
]
"""A host that vanishes ends its connections within 40 s; without this a quiet watch would never notice."""


class LeaseGoneError(Exception):
    """The lease of a request has expired."""


class CompactedError(Exception):
    """A watch began at a revision that etcd has forgotten."""


@frozen
class Access:
    """How a cluster is reached.

    Args:
        endpoints: ``http://HOST:PORT`` or ``https://HOST:PORT`` of its members.
        user: "" where the cluster knows no users.
        password: of the user.
        ca: file with the authorities of the members' certificates; "": those of the host.
        cert: file with our certificate; "": none.
        key: file with its key.
        timeout_s: for a connection, and for each answer.
    """

    endpoints: tuple[tuple[str, str, int], ...]
    user: str
    password: str
    ca: str
    cert: str
    key: str
    timeout_s: float


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more, socket_options=[*HTTPConnection.default_socket_options, *KEEPALIVE])


@define
class _Member:
    """A member of the cluster."""

    name: str
    client: Etcd3Client
    ready: bool = False


class EtcdConnection:
    """Calls of one cluster, one at a time; several threads may call.

    Args:
        access: where the cluster is.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._members = [self._member(scheme, host, port) for scheme, host, port in access.endpoints]

    def _member(self, scheme: str, host: str, port: int) -> _Member:
        access = self._access
        session = requests.Session()
        # No proxy, and no password of ~/.netrc in the place of our token.
        session.trust_env = False
        session.mount(f"{scheme}://", _Adapter())
        session.verify = access.ca or True
        session.cert = (access.cert, access.key) if access.cert else None
        client = Etcd3Client(host, port, scheme, timeout=access.timeout_s, api_path="/v3/", session=session)
        return _Member(client.base_url, client)

    def call(self, request: Callable[[Etcd3Client], T]) -> T:
        """Make a request at the first member that answers. A request may be made twice: it must be idempotent.

        Raises:
            CapacityError: etcd is full.
            ConfigurationError: wrong user, password, certificate, permission or version, or no etcd at all.
            LeaseGoneError: the request's lease has expired.
            StoreUnreachableError: no member can be reached.
            RemoteProtocolError: it answered something else.
        """
        with self._lock:
            failures = []
            for member in list(self._members):
                try:
                    return self._call(member, request)
                except StoreUnreachableError as exc:
                    failures.append(exc)
                    member.ready = False
                    # The next call begins with another member.
                    self._members.append(self._members.pop(0))
            raise failures[0]

    def _call(self, member: _Member, request: Callable[[Etcd3Client], T]) -> T:
        try:
            if not member.ready:
                self._check_version(member)
                self._authenticate(member)
                member.ready = True
            try:
                return request(member.client)
            except Etcd3Exception as exc:
                if not (self._access.user and _is_old_token(exc)):
                    raise
            self._authenticate(member)
            return request(member.client)
        except (DisaggKVError, LeaseGoneError):
            raise
        except Exception as exc:
            raise _ours(member.name, exc) from exc

    def _check_version(self, member: _Member) -> None:
        """An etcd of a version that we know, or not."""
        client = member.client
        answer = client.session.get(f"{client.base_url}/version", timeout=self._access.timeout_s, allow_redirects=False)
        try:
            version = str(answer.json()["etcdserver"])
            numbers = tuple(int(part) for part in version.split(".")[:2])
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigurationError(f"no etcd answers at {member.name}, but {answer.text[:64]!r}") from exc
        if numbers < OLDEST or numbers[0] != OLDEST[0]:
            raise ConfigurationError(f"etcd at {member.name} has version {version}; 3.4 or a newer 3.x is needed")

    def _authenticate(self, member: _Member) -> None:
        access, client = self._access, member.client
        if not access.user:
            return
        client.session.headers.pop("Authorization", None)
        body = {"name": access.user, "password": access.password}
        client.session.headers["Authorization"] = str(
            client.post(client.get_url("/auth/authenticate"), json=body)["token"]
        )

    def watch(self, body: Mapping[str, Any]) -> WatchStream:
        """Open a watch at the member that answered last.

        Raises:
            StoreUnreachableError: it cannot be reached.
        """
        with self._lock:
            member = self._members[0]
        client = member.client
        timeouts = (self._access.timeout_s, WATCH_QUIET_S)
        try:
            response = client.session.post(client.get_url("/watch"), json=body, stream=True, timeout=timeouts)
        except requests.RequestException as exc:
            raise _ours(member.name, exc) from exc
        return WatchStream(member.name, response)

    def close(self) -> None:
        """Close idle connections."""
        for member in self._members:
            member.client.session.close()


class WatchStream:
    """The messages of a watch, for one thread; :meth:`stop` may be called by another.

    Args:
        name: of the member.
        response: of the request.
    """

    def __init__(self, name: str, response: requests.Response) -> None:
        self._name = name
        self._response = response

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """One after the other, as etcd sends them; ends only with an error.

        Raises:
            CompactedError: the watch began at a forgotten revision.
            ConfigurationError: the user may not watch these keys.
            StoreUnreachableError: the stream has ended.
            RemoteProtocolError: it holds something else.
        """
        try:
            for line in self._lines():
                yield self._message(line)
        except (requests.RequestException, OSError) as exc:
            raise StoreUnreachableError(f"etcd at {self._name}: the watch has ended: {text_of(exc)}") from exc
        finally:
            self._response.close()
        raise StoreUnreachableError(f"etcd at {self._name}: the watch has ended")

    def _lines(self) -> Iterator[bytes]:
        """A message is a line; HTTP's chunks may cut it anywhere."""
        rest = b""
        for chunk in self._response.iter_content(chunk_size=None):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line for line in lines if line.strip())
            if len(rest) > MAX_LINE:
                raise RemoteProtocolError(f"etcd at {self._name} sent a message of more than {MAX_LINE} bytes")

    def _message(self, line: bytes) -> Mapping[str, Any]:
        match _parsed(line):
            case {"result": {"canceled": True} as result}:
                reason = str(result.get("cancel_reason", ""))
                if int(result.get("compact_revision", 0)):
                    raise CompactedError
                if "permission denied" in reason:
                    raise ConfigurationError(f"etcd at {self._name}: {reason}")
                raise StoreUnreachableError(f"etcd at {self._name} ended the watch: {reason}")
            case {"result": dict(result)}:
                return result
        raise RemoteProtocolError(f"etcd at {self._name} sent {line[:64]!r} in a watch")

    def stop(self) -> None:
        """End the stream: the thread that reads it gets its end."""
        try:
            self._response.raw.shutdown()
        except (RuntimeError, ValueError, OSError):
            # It has ended by itself.
            return


def _parsed(text: bytes | str) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found


def _refusal(exc: Etcd3Exception) -> tuple[int, str]:
    """The code of gRPC and the message of a refused request."""
    match _parsed(exc.detail_text or ""):
        case {"code": int(code), "message": str(message)}:
            return code, message
    return 0, (exc.detail_text or text_of(exc))[:200]


def _is_old_token(exc: Etcd3Exception) -> bool:
    """Whether a token has expired, or users have changed since it was made."""
    code, message = _refusal(exc)
    return code == UNAUTHENTICATED or "revision of auth store is old" in message or "user name is empty" in message


def _ours(name: str, exc: Exception) -> DisaggKVError | LeaseGoneError:
    """Our error for what a call raised."""
    where = f"etcd at {name}"
    match exc:
        case ConnectionFailedError() | ConnectionTimeoutError() | InternalServerError():
            _, message = _refusal(exc)
            if "SSL" in message or "CERTIFICATE" in message:
                return ConfigurationError(f"{where}: TLS: {message}")
            return StoreUnreachableError(f"{where} cannot be reached: {message}")
        case Etcd3Exception():
            return _refused(where, *_refusal(exc))
        case requests.exceptions.SSLError():
            return ConfigurationError(f"{where}: TLS: {text_of(exc)}")
        case requests.exceptions.JSONDecodeError():
            return RemoteProtocolError(f"{where} answered what is no JSON: {text_of(exc)}")
        case requests.RequestException():
            return StoreUnreachableError(f"{where} cannot be reached: {text_of(exc)}")
    return RemoteProtocolError(f"{where} answered something else than asked for: {type(exc).__name__}: {text_of(exc)}")


def _refused(where: str, code: int, message: str) -> DisaggKVError | LeaseGoneError:
    if code == NOT_FOUND and "lease" in message:
        return LeaseGoneError(message)
    if code == EXHAUSTED:
        return CapacityError(f"{where} is full: {message}")
    if code in (INVALID_ARGUMENT, PERMISSION_DENIED, PRECONDITION, UNAUTHENTICATED):
        return ConfigurationError(f"{where} refuses: {message}")
    return RemoteProtocolError(f"{where} refuses: {message}")
