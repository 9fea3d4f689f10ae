"""The ranks that this process has published, and the lease with which their keys vanish.

A lease that has expired (the process or the network stood still for longer) is replaced, and every rank is published
again with the same id. A rank that another process has published meanwhile is left to that process, with a line in the
log: the later process counts. An endpoint that stood still asks where its rank is, and yields to that address.
"""

from __future__ import annotations

import base64
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ...errors import ConfigurationError, RemoteProtocolError, StoreUnreachableError
from ...ids import Rank
from ..records import check_world
from .address_table import AddressTable
from .keys import Body, RankKey, Record, holds, is_free, no_other_world, publish, withdraw

if TYPE_CHECKING:
    from .connection import EtcdConnection

log = logging.getLogger("disagg_kv")


@frozen
class Publication:
    """A rank that this process has published."""

    key: RankKey
    record: Record

    @property
    def name(self) -> str:
        """For errors and the log."""
        return f"instance {self.key.instance!r}: rank {self.key.rank}"


class Registrations:
    """Every call is one or a few requests; several threads may call.

    Args:
        connection: of the cluster.
        prefix: of the deployment's keys.
        lease_s: seconds after which the keys of a dead process vanish.

    Attributes:
        written: the revision of the last change of this process.
    """

    def __init__(self, connection: EtcdConnection, prefix: str, lease_s: int) -> None:
        self._connection = connection
        self._prefix = prefix
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._lease: int | None = None
        self._own: dict[tuple[str, int], Publication] = {}
        self.written = 0

    def own(self) -> Sequence[Publication]:
        """What this process has published."""
        return list(self._own.values())

    def missing(self, table: AddressTable) -> bool:
        """Whether the table lacks what this process has published."""
        if table.revision < self.written:
            return False
        return not all(table.holds(one.key, one.record) for one in self.own())

    def publish(self, key: RankKey, address: str) -> None:
        """Publish a rank; replaces an earlier one.

        Raises:
            ConfigurationError: other ranks of the instance published another number of ranks.
        """
        one = Publication(key, Record(address, uuid.uuid4().hex))
        with self._lock:
            answer = self._put(one, no_other_world(self._prefix, key))
            if not answer.get("succeeded"):
                raise self._refused(one, answer)
            self._own[key.instance, key.rank] = one

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Remove a rank, unless another process has replaced it."""
        with self._lock:
            one = self._own.pop((instance, rank), None)
            if one is not None:
                self._transact(lambda lease: withdraw(self._prefix, one.key, one.record.encode(), lease))

    def renew(self, table: AddressTable, guard: threading.Condition) -> bool:
        """Renew the lease, and publish again what is not there any more.

        Returns:
            Whether the lease had expired.
        """
        from etcd3gw.lease import Lease

        with self._lock:
            if not self._own:
                return False
            lease, gone = self._lease, True
            if lease is not None:
                gone = self._connection.call(lambda client: Lease(lease, client).refresh()) <= 0
            if gone:
                self._lease, self.written = None, 0
            with guard:
                absent = [one for one in self.own() if gone or not table.holds(one.key, one.record)]
            for one in absent:
                self._restore(one)
            return gone

    def _restore(self, one: Publication) -> None:
        """Publish a rank again, if no other process has."""
        only = no_other_world(self._prefix, one.key)
        answer = self._put(one, [*only, *is_free(self._prefix, one.key)])
        if answer.get("succeeded"):
            log.warning("%s had vanished from etcd and is published again, at %s", one.name, one.record.address)
            return
        value = _values(answer).get(one.key.path(self._prefix))
        found = None if value is None else Record.decode(value)
        if value is not None and found in (None, one.record):
            # Ours, perhaps with an older lease, or what no rank wrote.
            self._put(one, [*only, *holds(self._prefix, one.key, value)])
            return
        del self._own[one.key.instance, one.key.rank]
        if found is not None:
            log.warning(
                "%s at %s: another process has published it, at %s", one.name, one.record.address, found.address
            )
        else:
            log.warning("%s at %s is not published again: %s", one.name, one.record.address, self._refused(one, answer))

    def _refused(self, one: Publication, answer: Mapping[str, Any]) -> ConfigurationError | RemoteProtocolError:
        """Why a rank could not be written: it names another rank of the instance."""
        for path in _values(answer):
            key = f"etcd key {path.decode(errors='backslashreplace')!r}"
            parsed = RankKey.parse(self._prefix, path)
            if parsed is None:
                return RemoteProtocolError(f"{one.name}: {key} is among the ranks, and no rank wrote it; remove it")
            try:
                check_world(one.key.instance, Rank(one.key.rank), one.key.world, parsed[1].world)
            except ConfigurationError as exc:
                return ConfigurationError(f"{exc}: {key}, which vanishes within {self._lease_s} s of its process's end")
        return RemoteProtocolError(f"{one.name}: etcd refused to write it, and gave no reason")

    def _put(self, one: Publication, only: list[Body]) -> Mapping[str, Any]:
        return self._transact(lambda lease: publish(self._prefix, one.key, one.record.encode(), lease, only))

    def _transact(self, body: Callable[[int], Body]) -> Mapping[str, Any]:
        """A transaction under our lease, or under a new one where that has expired."""
        from .connection import LeaseGoneError

        try:
            return self._once(body)
        except LeaseGoneError:
            self._lease = None
        try:
            return self._once(body)
        except LeaseGoneError as exc:
            late = f"etcd is slow: a new lease of {self._lease_s} s had expired when it was used"
            raise StoreUnreachableError(late) from exc

    def _once(self, body: Callable[[int], Body]) -> Mapping[str, Any]:
        if self._lease is None:
            self._lease = self._connection.call(lambda client: client.lease(self._lease_s).id)
        request = body(self._lease)
        answer, written = self._connection.call(lambda client: _parsed(client.transaction(request)))
        if answer.get("succeeded"):
            self.written = written
        return answer


def _parsed(answer: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """An answer to a transaction, and its revision. Within a call, what is no such answer becomes a named error."""
    revision = int(answer["header"]["revision"])
    if not answer.get("succeeded"):
        _values(answer)
    return answer, revision


def _values(answer: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The keys that a refused transaction has read."""
    responses = answer.get("responses", ())
    found = responses[0]["response_range"].get("kvs", ()) if responses else ()
    return {base64.b64decode(one["key"]): base64.b64decode(one.get("value", "")) for one in found}
