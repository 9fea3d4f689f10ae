"""Etcd as the processes of a fleet see it: registrations with leases, and one watch of each process.

The table of addresses is the library's own. The watches of all processes deliver the same changes at the same moment,
so the fleet has one table, and each process is charged for what a change costs. While etcd is away, no change comes and
no rank registers, but the table answers, as :class:`~disagg_kv.rendezvous.EtcdRendezvous` does.
"""

from __future__ import annotations

import time
from functools import partial
from math import inf

from disagg_kv.errors import PeerLostError
from disagg_kv.ids import Rank
from disagg_kv.rendezvous import Source
from disagg_kv.rendezvous.etcd.address_table import AddressTable, KeyValue
from disagg_kv.rendezvous.etcd.keys import RankKey, Record
from disagg_kv.rendezvous.etcd.watch import RETRY_S

from .parts import Host, World

PREFIX = "fleet"

WATCH_S = 0.005
"""After this a change is in the tables of all processes."""

LEASE_S = 180
"""As :class:`~disagg_kv.rendezvous.EtcdRendezvous` does by default: renewed when 0.4 to 0.5 of it has passed."""


class FleetStore:
    """Counts the requests, and the processor time of one process for all changes that its watch has delivered."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._table = AddressTable(PREFIX)
        self._away_until = -inf
        self._written = 0
        self.requests = 0
        self.lookups = 0
        self.watch_ns = 0

    @property
    def away(self) -> bool:
        """Whether etcd does not answer."""
        return self._world.now < self._away_until

    def take_away(self, seconds: float) -> None:
        """An outage begins."""
        self._away_until = self._world.now + seconds

    def ask(self) -> None:
        """One request.

        Raises:
            PeerLostError: etcd is away.
        """
        self.requests += 1
        if self.away:
            raise PeerLostError("fleet: etcd is away")

    def put(self, key: RankKey, address: str) -> None:
        """Register a rank."""
        self.ask()
        self._written += 1
        value = Record(address, f"{self._written}").encode()
        self._world.later(WATCH_S, partial(self._deliver, KeyValue(key.path(PREFIX), value, leased=True)))

    def _deliver(self, change: KeyValue) -> None:
        if self.away:
            self._world.later(self._away_until - self._world.now + WATCH_S, partial(self._deliver, change))
            return
        began = time.thread_time_ns()
        self._table.put(change)
        self.watch_ns += time.thread_time_ns() - began

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """What the table of a process says."""
        self.lookups += 1
        return self._table.lookup(source.instance)


class FleetRendezvous:
    """The store as one process uses it; satisfies :class:`~disagg_kv.rendezvous.Rendezvous`."""

    def __init__(self, store: FleetStore, host: Host) -> None:
        self._store = store
        self._host = host

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """See :meth:`Rendezvous.publish`."""
        self._store.put(RankKey(instance, world, rank), address)
        self._renew_later(least=0.0)

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """See :meth:`Rendezvous.lookup`; costs the store nothing."""
        return self._store.lookup(source)

    def _renew_later(self, least: float = 0.4) -> None:
        """``least`` 0: at any moment, as if the rank had registered long ago. The traffic is shorter than a lease."""
        self._host.world.later(LEASE_S * self._host.world.between(least, 0.5), partial(self._renew, RETRY_S[0]))

    def _renew(self, pause_s: float) -> None:
        """Keep the lease. After a failure the pauses double."""
        if not self._host.alive:
            return
        try:
            self._store.ask()
        except PeerLostError:
            pause = pause_s * self._host.world.between(0.5, 1.5)
            self._host.world.later(pause, partial(self._renew, min(2 * pause_s, RETRY_S[1])))
        else:
            self._renew_later()
