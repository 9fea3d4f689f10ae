"""The addresses of instances."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from attrs import field, frozen

from .. import arguments
from ..core import MAX_RANKS
from ..errors import ConfigurationError
from ..ids import Rank

MAX_ADDRESS = 1024
"""Characters of an address in a :class:`Source`."""


def address_list(where: str, given: object) -> tuple[str, ...]:
    """At most ``MAX_RANKS`` addresses; a :class:`~disagg_kv.errors.ConfigurationError` for anything else."""
    addresses = arguments.several(given, f"{where}: addresses", str)
    if len(addresses) > MAX_RANKS:
        raise ConfigurationError(f"{where}: {len(addresses)} addresses; at most {MAX_RANKS} are allowed")
    return tuple(arguments.text(one, f"{where}: address", least=1, most=MAX_ADDRESS) for one in addresses)


def _addresses(given: object) -> tuple[str, ...]:
    return address_list("source", given)


@frozen
class Source:
    """The prefill instance of a room: plain text, known before prefill runs, suitable for a JSON request.

    Args:
        instance: name of the prefill instance (one set of TP x PP ranks).
        addresses: the channel address of every rank, in order, each of at most 1024 characters; empty: the rendezvous
            knows them.

    Raises:
        ConfigurationError: no text, no name, or too many or too long addresses.
    """

    instance: str
    addresses: tuple[str, ...] = field(default=(), converter=_addresses)

    def __attrs_post_init__(self) -> None:
        arguments.text(self.instance, "source: instance", least=1, most=256)


class Rendezvous(Protocol):
    """Finds the channel addresses of all ranks of an instance. Endpoints call ``lookup`` on helper threads."""

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Publish the address of rank ``rank`` of ``world`` of ``instance``; replaces an earlier one.

        Raises:
            ConfigurationError: a rank outside ``[0, world)``.
            StoreUnreachableError: the store cannot be reached.
        """
        ...

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known yet. It may block; several threads may call.

        Raises:
            InstanceClosedError: a rank was withdrawn; rooms that wait for the instance fail.
            StoreUnreachableError: the store cannot be reached. Any other error harms only rooms that wait for the
                instance.
        """
        ...


@runtime_checkable
class SupportsWithdraw(Protocol):
    """A rendezvous that can withdraw an address. An endpoint that closes calls it, and waits at most one second."""

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Withdraw the last address that this object published for the rank, unless another process has replaced it.

        Raises:
            StoreUnreachableError: the store cannot be reached.
        """
        ...
