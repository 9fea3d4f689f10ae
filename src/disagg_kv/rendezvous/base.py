"""Who is where."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from attrs import frozen

from .. import arguments
from ..ids import Rank


@frozen
class Source:
    """Where a room's prefill runs: plain text, known before prefill runs, fit for a JSON request.

    Args:
        instance: name of the prefill instance (one set of TP x PP ranks).
        address: where to ask for it; what that means is the rendezvous's own.

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
        """Tell everyone where rank ``rank`` of ``world`` of ``instance`` is; replaces what it said before.

        Raises:
            ConfigurationError: a rank outside ``[0, world)``.
            PeerLostError: the store cannot be reached.
        """
        ...

    def lookup(self, source: Source) -> tuple[str, ...] | None:
        """The addresses of all ranks, in order; None: not all are known yet. It may block, from several threads.

        Raises:
            InstanceClosedError: a rank was withdrawn; rooms that wait for the instance fail.
            PeerLostError: the store cannot be reached. Whatever else it raises harms only rooms that wait for it.
        """
        ...


@runtime_checkable
class SupportsWithdraw(Protocol):
    """A rendezvous that can take back what it told. An endpoint that closes asks for it, and waits for a second."""

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Take back what this object published last for the rank, unless another process has published it since.

        Raises:
            PeerLostError: the store cannot be reached.
        """
        ...
