"""The peers of one transport, which any thread may connect while another one works with them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from ..errors import TransportError
from ..ids import Peer


class Serial(Protocol):
    """What a transport knows of a peer."""

    @property
    def serial(self) -> int:
        """Of the descriptor that it comes from."""
        ...


R = TypeVar("R", bound=Serial)


class Connected(Generic[R]):
    """Peers by name. The mapping is replaced and never changed, so that going through it needs no lock.

    Attributes:
        all: what is known, by peer. Go through it from any thread.
    """

    def __init__(self) -> None:
        self.all: Mapping[Peer, R] = {}
        self._changing = threading.Lock()

    def get(self, peer: Peer) -> R | None:
        """What is known of a peer."""
        return self.all.get(peer)

    def known(self, peer: Peer, transport: str) -> R:
        """What the transport of this name knows of a peer.

        Raises:
            TransportError: nothing.
        """
        if (known := self.all.get(peer)) is None:
            raise TransportError(f"{transport}: no peer {peer.hex()}")
        return known

    def add(self, peer: Peer, found: R) -> R:
        """Keep the result of a connect, unless the known one's ``serial`` is as high or higher; return the kept one."""
        with self._changing:
            known = self.all.get(peer)
            if known is not None and known.serial >= found.serial:
                return known
            self.all = {**self.all, peer: found}
            return found

    def remove(self, peer: Peer) -> R | None:
        """Forget a peer; what was known of it."""
        with self._changing:
            known = self.all.get(peer)
            self.all = {name: of for name, of in self.all.items() if name != peer}
            return known

    def clear(self) -> None:
        """Forget all of them."""
        with self._changing:
            self.all = {}
