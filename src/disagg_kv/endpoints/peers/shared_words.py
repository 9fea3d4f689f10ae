"""Words of host memory that the ranks of an instance share, where they are on one host."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from ...ids import Epoch, Peer
from ...memory import Buffer
from ...transports.bells import HostBells
from ...transports.memfd import new_board, open_board


class SharedWords(Protocol):
    """How a life makes such words, and opens those of another one. It does not depend on the transport."""

    def make(self, epoch: Epoch, nbytes: int) -> tuple[Buffer, bytes]:
        """Return ``nbytes`` of zeroed memory of this life, and where other processes find it. Once per life.

        Raises:
            RegistrationError: the host does not give it.
        """
        ...

    def open(self, epoch: Epoch, place: bytes) -> HostBells:
        """Open the memory of another life; it takes less than a millisecond.

        Raises:
            DisaggKVError: it is on another host, has ended, or has no such memory.
        """
        ...


@frozen
class HostWords:
    """In anonymous files; see :mod:`disagg_kv.transports.memfd`."""

    def make(self, epoch: Epoch, nbytes: int) -> tuple[Buffer, bytes]:
        """See :meth:`SharedWords.make`."""
        return new_board(Peer(epoch), 0, nbytes)

    def open(self, epoch: Epoch, place: bytes) -> HostBells:
        """See :meth:`SharedWords.open`."""
        return HostBells(open_board(Peer(epoch), place))
