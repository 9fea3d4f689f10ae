"""The addresses of instances."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from attrs import frozen

from .. import arguments
from ..ids import Rank


@frozen
class Source:
    """The prefill instance of a room: plain text, known before prefill runs, suitable for a JSON request.

    Args:
        instance: name of the prefill instance (one set of TP x PP ranks).
        address: a hint for the rendezvous, which defines its meaning.

    Raises:
        ConfigurationError: no text, or no name.
    """

    instance: str
    address: str = ""

    def __attrs_post_init__(self) -> None:
        arguments.text(self.instance, "source: instance", least=1, most=256)
        arguments.text(self.address, "source: address")


class Rendezvous(Protocol):
    """Finds the channel addresses of all ranks of an instance. Endpoints call ``lookup`` on helper threads."""

    def publish(self, instance: str, rank: Rank, world: int, address: str) -> None:
        """Publish the address of rank ``rank`` of ``world`` of ``instance``; replaces an earlier one.

        Raises:
            ConfigurationError: a rank outside ``[0, world)``.
            PeerLostError: the store cannot be reached.
        """
        ...

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known yet. It may block; several threads may call.

        Raises:
            InstanceClosedError: a rank was withdrawn; rooms that wait for the instance fail.
            PeerLostError: the store cannot be reached. Any other error harms only rooms that wait for the instance.
        """
        ...


@runtime_checkable
class SupportsWithdraw(Protocol):
    """A rendezvous that can withdraw an address. An endpoint that closes calls it, and waits at most one second."""

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Withdraw the last address that this object published for the rank, unless another process has replaced it.

        Raises:
            PeerLostError: the store cannot be reached.
        """
        ...
