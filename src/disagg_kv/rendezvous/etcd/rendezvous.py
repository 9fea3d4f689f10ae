"""Ranks of many hosts find each other through etcd."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ... import arguments
from ...closing import Closing
from ...errors import (
    ConfigurationError,
    DisaggKVError,
    LocalProtocolError,
    MissingDependencyError,
    RemoteProtocolError,
    StoreUnreachableError,
    text_of,
)
from ...ids import Rank
from ...transports.process import Home
from ..base import MAX_ADDRESS, Source
from ..records import check_rank
from .keys import RankKey
from .registrations import Registrations
from .watch import AddressWatch, pause_s

log = logging.getLogger("disagg_kv")

CLOSE_S = 1.0
"""How long :meth:`EtcdRendezvous.close` waits for each of its threads."""


class EtcdRendezvous(Closing):
    """Ranks of many hosts meet through etcd; satisfies :class:`Rendezvous` and :class:`SupportsWithdraw`.

    Needs the extra ``etcd``. A process needs one object for all its endpoints. Its keys have a lease, so those of a
    dead process vanish. One watch keeps a table of the deployment's ranks: ``lookup`` reads it and costs etcd nothing.
    While etcd is away, what is in the table can still be looked up.

    Args:
        endpoints: ``http://HOST:PORT`` or ``https://HOST:PORT`` of each member of the cluster.
        prefix: of all keys. Deployments with different prefixes do not see each other.
        user: a user of etcd who may read and write all keys below ``PREFIX/``; "": etcd knows no users.
        password: of the user.
        ca: file with the certificates of the authorities that have signed those of etcd; "": the host's authorities.
        cert: file with our own certificate, where etcd asks for one.
        key: file with its key.
        lease_s: seconds after which the keys of a dead process vanish; renewed when half of it has passed.
        timeout_s: seconds to wait for a connection or an answer.

    Raises:
        ConfigurationError: an argument that cannot be.
        MissingDependencyError: the extra is not installed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str = "disagg_kv",
        *,
        user: str = "",
        password: str = "",
        ca: str = "",
        cert: str = "",
        key: str = "",
        lease_s: int = 180,
        timeout_s: float = 2.0,
    ) -> None:
        addresses = tuple(_address(one) for one in arguments.several(endpoints, "endpoints", str))
        if not addresses:
            raise ConfigurationError("endpoints: at least one member of the etcd cluster is needed")
        self._prefix = arguments.text(prefix, "prefix", most=256).rstrip("/")
        if not self._prefix or not prefix.isascii() or not prefix.isprintable():
            raise ConfigurationError(f"prefix {prefix!r}: printable ASCII is needed")
        user, password = arguments.text(user, "user"), arguments.text(password, "password")
        if bool(user) != bool(password):
            raise ConfigurationError("user and password: both are needed, or none")
        if bool(cert) != bool(key):
            raise ConfigurationError("cert and key: both files are needed, or none")
        for name, path in (("ca", ca), ("cert", cert), ("key", key)):
            if arguments.text(path, name) and not Path(path).is_file():
                raise ConfigurationError(f"{name}: there is no file {path!r}")
        self._lease_s = arguments.count(lease_s, "lease_s", least=2, most=86400)
        self._timeout_s = arguments.seconds(timeout_s, "timeout_s")
        try:
            from .connection import Access, EtcdConnection
        except ImportError as exc:
            raise MissingDependencyError("rendezvous 'etcd'", str(exc), "pip install 'disagg_kv[etcd]'") from exc
        self._home = Home("the rendezvous over etcd")
        self._connection = EtcdConnection(Access(addresses, user, password, ca, cert, key, self._timeout_s))
        self._changed = threading.Condition()
        self._watch = AddressWatch(self._connection, self._prefix, self._changed)
        self._registrations = Registrations(self._connection, self._prefix, self._lease_s)
        self._renewal_error: DisaggKVError | None = None
        self._renewals: threading.Thread | None = None
        self._closed = threading.Event()
        self._failures = 0

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Publish the address of rank ``rank`` of ``world`` of ``instance``; replaces an earlier one.

        It stays published until it is withdrawn, or this process has ended or stood still for ``lease_s``. A process
        that goes on after that publishes its ranks again, except those that another process has published meanwhile.

        Raises:
            CapacityError: etcd is full.
            ConfigurationError: a rank outside ``[0, world)``, a different world size than other ranks published, or
                etcd refuses the user or has another version.
            LocalProtocolError: it is closed, or belongs to another process.
            StoreUnreachableError: etcd cannot be reached.
            RemoteProtocolError: etcd answered something else.
        """
        rank, world = check_rank(instance, rank, world)
        address = arguments.text(address, "address", least=1, most=MAX_ADDRESS)
        self._check_open()
        self._registrations.publish(RankKey(instance, world, rank), address)
        with self._changed:
            self._watch.start()
            if self._renewals is None:
                self._renewals = threading.Thread(target=self._renew, name="disagg_kv etcd lease", daemon=True)
                self._renewals.start()

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Withdraw the last address that this object published for the rank, unless another process replaced it.

        Raises:
            StoreUnreachableError: etcd cannot be reached; the rank vanishes with its lease.
        """
        rank = Rank(arguments.count(rank, "rank"))
        self._home.check()
        self._registrations.withdraw(arguments.text(instance, "instance"), rank)

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known. It waits for etcd at the first call only.

        Raises:
            ConfigurationError: etcd refuses the user or has another version.
            InstanceClosedError: a rank has closed and is not back.
            LocalProtocolError: it is closed, or belongs to another process.
            StoreUnreachableError: etcd cannot be reached, and what is known of the instance is not complete.
            RemoteProtocolError: the instance's keys hold something else; the error names the key.
        """
        instance = arguments.one(source, "source", Source).instance
        self._check_open()
        with self._changed:
            self._watch.start()
            self._changed.wait_for(
                lambda: self._watch.error or self._is_current() or self._closed.is_set(), self._timeout_s
            )
            found = self._watch.table.lookup(instance)
            if found is not None:
                return found
            error = self._watch.error or self._renewal_error
            if error is None and self._is_current():
                return None
        if error is None:
            raise StoreUnreachableError(f"instance {instance!r}: no answer of etcd for {self._timeout_s:g} s")
        kinds = (ConfigurationError, RemoteProtocolError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), StoreUnreachableError)
        raise kind(f"instance {instance!r}: {error}")

    def _is_current(self) -> bool:
        """Whether the table has what etcd holds, and what this process has changed. With the lock held."""
        return self._watch.current and self._watch.table.revision >= self._registrations.written

    def close(self) -> None:
        """Withdraw every rank of this process that is still published, and end the threads. May be repeated."""
        self._home.check()
        with self._changed:
            closed = self._closed.is_set()
            self._closed.set()
            self._changed.notify_all()
        if closed:
            return
        for one in self._registrations.own():
            try:
                self._registrations.withdraw(one.key.instance, Rank(one.key.rank))
            except DisaggKVError as exc:
                log.warning("%s stays in etcd for at most %d s: %s", one.name, self._lease_s, text_of(exc))
        self._watch.close(CLOSE_S)
        if self._renewals is not None:
            self._renewals.join(CLOSE_S)
        self._connection.close()

    def _check_open(self) -> None:
        self._home.check()
        if self._closed.is_set():
            raise LocalProtocolError("the rendezvous over etcd is closed")

    def _renew(self) -> None:
        """The thread that keeps the lease: twice in ``lease_s``, and at once where a rank has vanished from etcd."""
        due = self._due()
        while True:
            with self._changed:
                left = max(0.0, due - time.monotonic())
                self._changed.wait_for(lambda: self._closed.is_set() or self._must_restore(), left)
            if self._closed.is_set():
                return
            error: DisaggKVError | None = None
            try:
                if self._registrations.renew(self._watch.table, self._changed):
                    self._watch.read_again()
            except DisaggKVError as exc:
                error = exc
            except Exception as exc:
                log.exception("the lease of etcd could not be renewed")
                error = RemoteProtocolError(f"the lease of etcd could not be renewed: {text_of(exc)}")
            self._failures = self._failures + 1 if error else 0
            due = time.monotonic() + pause_s(self._failures) if error else self._due()
            with self._changed:
                if error is not None and self._renewal_error is None:
                    log.warning("the lease of etcd was not renewed, and is tried again: %s", text_of(error))
                self._renewal_error = error

    def _must_restore(self) -> bool:
        """Whether a rank of this process is gone from etcd. After a failure the next attempt waits its time."""
        return not self._failures and self._watch.current and self._registrations.missing(self._watch.table)

    def _due(self) -> float:
        """When to renew the lease: drawn, so that the ranks of a fleet do not ask at once."""
        return time.monotonic() + self._lease_s * random.uniform(0.4, 0.5)


def _address(given: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    try:
        parts = urlsplit(given)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as exc:
        raise ConfigurationError(f"endpoint {given!r}: {exc}") from exc
    if scheme not in ("http", "https") or not host or not port or parts.path.strip("/") or parts.username:
        raise ConfigurationError(f"endpoint {given!r}: not http://HOST:PORT or https://HOST:PORT")
    return scheme, host, port
