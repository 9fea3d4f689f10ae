"""Addresses that are configured, or published within one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from .. import arguments
from ..errors import ConfigurationError
from ..ids import Rank
from .base import Source
from .records import check_rank, check_world


class StaticRendezvous:
    """A table of addresses; satisfies :class:`Rendezvous`. Thread-safe; ``publish`` affects this process alone.

    Args:
        addresses: per instance the address of every rank, in order.

    Raises:
        ConfigurationError: an instance without ranks, or one address for two of them.
    """

    def __init__(self, addresses: Mapping[str, Sequence[str]] | None = None) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[str, list[str | None]] = {}
        for name, listed in arguments.mapping({} if addresses is None else addresses, "addresses").items():
            instance = arguments.text(name, "addresses: instance", most=256)
            given: tuple[str, ...] = ()
            if not isinstance(listed, str):
                given = arguments.several(listed, f"instance {instance!r}", str)
            if not instance or not given or "" in given:
                raise ConfigurationError(f"instance {instance!r}: needs a name and a list of addresses, not {listed!r}")
            twice = [address for address, times in Counter(given).items() if times > 1]
            if twice:
                raise ConfigurationError(f"instance {instance!r}: several ranks at {', '.join(twice)}")
            self._ranks[instance] = list(given)

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Publish, in this process, the address of rank ``rank`` of ``world`` of ``instance``; replaces an earlier one.

        Raises:
            ConfigurationError: a rank outside ``[0, world)``, a different world size than before, or the address of
                another rank of the instance.
        """
        rank, world = check_rank(instance, rank, world)
        address = arguments.text(address, "address", least=1)
        with self._lock:
            ranks = self._ranks.setdefault(instance, [None] * world)
            check_world(instance, rank, world, len(ranks))
            if address in ranks and ranks.index(address) != rank:
                raise ConfigurationError(
                    f"instance {instance!r}: rank {rank} publishes {address}, "
                    f"the address of rank {ranks.index(address)}"
                )
            ranks[rank] = address

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known yet."""
        arguments.one(source, "source", Source)
        with self._lock:
            ranks = self._ranks.get(source.instance, [])
            known = tuple(address for address in ranks if address is not None)
        return known if known and len(known) == len(ranks) else None
