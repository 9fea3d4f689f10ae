"""Addresses that travel in requests, without a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .. import arguments
from ..errors import ConfigurationError, LocalProtocolError
from ..ids import Rank
from .base import Source, address_list
from .records import check_rank, check_world


class RequestRendezvous:
    """Addresses that the engine carries itself; satisfies :class:`Rendezvous` and :class:`SupportsWithdraw`.

    Decode finds a prefill instance by the addresses in :class:`Source`. The ranks of one instance find each other by
    the addresses that ``learn`` gets. Thread-safe, and nothing leaves the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[str, dict[Rank, str]] = {}
        self._worlds: dict[str, int] = {}
        self._learned: dict[str, tuple[str, ...]] = {}

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Keep the address of rank ``rank`` of ``world`` of ``instance`` for :meth:`published`.

        Raises:
            ConfigurationError: a rank outside ``[0, world)``, or a different world size than another rank published.
        """
        rank, world = check_rank(instance, rank, world)
        address = arguments.text(address, "address", least=1)
        with self._lock:
            check_world(instance, rank, world, self._worlds.setdefault(instance, world))
            self._own.setdefault(instance, {})[rank] = address
            if instance in self._learned and self._learned[instance][rank] != address:
                del self._learned[instance]  # a rank has moved

    def published(self, instance: str, rank: Rank) -> str | None:
        """The address of a rank whose endpoint is open in this process; None: there is none."""
        instance, rank = arguments.text(instance, "instance"), Rank(arguments.count(rank, "rank"))
        with self._lock:
            return self._own.get(instance, {}).get(rank)

    def learn(self, instance: str, addresses: Sequence[str]) -> None:
        """Set the addresses of all ranks of an instance of which this process has a rank, in the order of ranks.

        Raises:
            ConfigurationError: a wrong number of addresses, or another address for a rank of this process.
            LocalProtocolError: no rank of the instance is published in this process.
        """
        instance = arguments.text(instance, "instance")
        given = address_list(f"instance {instance!r}", addresses)
        with self._lock:
            if instance not in self._own:
                raise LocalProtocolError(f"instance {instance!r}: no rank of it is published in this process")
            if len(given) != self._worlds[instance]:
                raise ConfigurationError(
                    f"instance {instance!r}: {len(given)} addresses of {self._worlds[instance]} ranks"
                )
            for rank, address in self._own[instance].items():
                if given[rank] != address:
                    raise ConfigurationError(
                        f"instance {instance!r}: rank {rank} is at {address}, not at {given[rank]}"
                    )
            self._learned[instance] = given

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Forget what was published of a rank; with the last rank of an instance, what was learned of it."""
        instance, rank = arguments.text(instance, "instance"), Rank(arguments.count(rank, "rank"))
        with self._lock:
            ranks = self._own.get(instance, {})
            ranks.pop(rank, None)
            if not ranks:
                for known in (self._own, self._worlds, self._learned):
                    known.pop(instance, None)

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses in ``source``, else those that were learned; None: there are none yet."""
        arguments.one(source, "source", Source)
        if source.addresses:
            return source.addresses
        with self._lock:
            return self._learned.get(source.instance)
