"""The ranks of a deployment as etcd holds them: what it said last, checked, and ready for look-ups.

Pure: no thread, no clock, no connection. Every process that reaches etcd can write there, so nothing is believed. Keys
that this library cannot have written are ignored. A rank's key with another value makes its own instance fail by name,
and no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from attrs import frozen

from ...errors import InstanceClosedError, RemoteProtocolError
from .keys import RANKS, RankKey, Record


@frozen
class KeyValue:
    """A key of etcd.

    Args:
        path: the key.
        value: its value.
        leased: whether it vanishes with a lease.
    """

    path: bytes
    value: bytes
    leased: bool


class AddressTable:
    """Every rank of a deployment. Not thread-safe.

    Args:
        prefix: of the deployment's keys.

    Attributes:
        revision: the revision of etcd up to which everything is in the table.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.revision = 0
        self._ranks: defaultdict[str, dict[RankKey, Record | str]] = defaultdict(dict)
        self._closed: defaultdict[str, set[RankKey]] = defaultdict(set)

    def replace(self, found: Iterable[KeyValue], revision: int) -> None:
        """All keys of the deployment, at a revision."""
        self._ranks.clear()
        self._closed.clear()
        for one in found:
            self.put(one)
        self.revision = revision

    def put(self, one: KeyValue) -> None:
        """A key has a value."""
        parsed = RankKey.parse(self._prefix, one.path)
        if parsed is None:
            return
        kind, key = parsed
        if kind == RANKS:
            self._ranks[key.instance][key] = self._checked(one)
        else:
            self._closed[key.instance].add(key)

    def _checked(self, one: KeyValue) -> Record | str:
        """The record, or what is wrong with it."""
        if not one.leased:
            return f"etcd key {one.path.decode()!r} has no lease, so no rank wrote it; remove it"
        record = Record.decode(one.value)
        return record or f"etcd key {one.path.decode()!r} holds {one.value[:64]!r}, which no rank wrote"

    def delete(self, path: bytes) -> None:
        """A key has vanished."""
        parsed = RankKey.parse(self._prefix, path)
        if parsed is None:
            return
        kind, key = parsed
        if kind == RANKS:
            self._ranks[key.instance].pop(key, None)
        else:
            self._closed[key.instance].discard(key)
        # Instances come and go: one without keys takes no memory.
        for table in (self._ranks, self._closed):
            if not table[key.instance]:
                del table[key.instance]

    def reached(self, revision: int) -> None:
        """Everything up to a revision is in the table."""
        self.revision = max(self.revision, revision)

    def holds(self, key: RankKey, record: Record) -> bool:
        """Whether a rank's record is this one."""
        return self._ranks.get(key.instance, {}).get(key) == record

    def lookup(self, instance: str) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known.

        Raises:
            InstanceClosedError: a rank has closed and is not back.
            RemoteProtocolError: the instance's keys hold something else.
        """
        ranks = self._ranks.get(instance, {})
        worlds = sorted({key.world for key in ranks})
        if len(worlds) > 1:
            numbers = " and ".join(map(str, worlds))
            raise RemoteProtocolError(f"instance {instance!r}: etcd holds ranks of {numbers}, which is no one instance")
        records: dict[int, str] = {}
        for key, record in ranks.items():
            if isinstance(record, str):
                raise RemoteProtocolError(f"instance {instance!r}: {record}")
            records[key.rank] = record.address
        for key in self._closed.get(instance, ()):
            if key not in ranks and (not worlds or key.world in worlds):
                closed = f"instance {instance!r}: rank {key.rank} has closed, and has not come back"
                raise InstanceClosedError(closed, instance=instance, rank=key.rank)
        if not worlds or len(records) < worlds[0]:
            return None
        return tuple(records[rank] for rank in range(worlds[0]))
