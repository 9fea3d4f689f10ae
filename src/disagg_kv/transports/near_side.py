"""The near side of a transport: who it is to its peers, and which of its memory they may write to."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from itertools import count

from ..ids import Peer
from .base import Capabilities
from .descriptor import Descriptor, Region, decode, encode
from .process import Home
from .regions import RegionTable


class NearSide:
    """What the transports of this package have in common; one of another package may do all of it in its own way.

    A transport has ``name`` and ``caps`` before it makes this.
    """

    name: str
    caps: Capabilities

    def __init__(self) -> None:
        self._home = Home(f"this transport {self.name!r}")
        self._me = Peer(uuid.uuid4().bytes)
        self._table = RegionTable(self.caps.devices)
        self._tickets = count(1)

    def peer_of(self, descriptor: bytes) -> Peer:
        """Return the peer that a descriptor names, without connecting it."""
        return decode(descriptor, self.name).incarnation

    def _described(self, regions: Iterable[Region], blob: bytes = b"") -> bytes:
        """The descriptor of this side; see :class:`Descriptor`."""
        return encode(Descriptor(self.name, self._me, self._table.serial, tuple(regions), blob))
