"""What the peer table asks for, and which of two incarnations is the older one."""

from __future__ import annotations

from attrs import frozen

from ...errors import DisaggKVError
from ...ids import Epoch
from ..base import Lost
from ..wire.frames import Frame, Hello
from .known_peer import KnownPeer


@frozen
class SendTo:
    """Pass this frame to the channel; the receiver's incarnation may not be known yet."""

    address: str
    frame: Frame


@frozen
class Up:
    """An endpoint is alive, and both sides can work together."""

    hello: Hello

    @property
    def epoch(self) -> Epoch:
        """Its incarnation."""
        return Epoch(self.hello.src)


@frozen
class Greeted:
    """A known peer sent ``Hello`` again: it had lost us, or has received no frame from us for a while."""

    peer: Epoch


@frozen
class Unreachable:
    """No endpoint that we can work with answers at this address."""

    address: str
    error: DisaggKVError


@frozen
class Forget:
    """The address has no peer any more: drop the connection to it."""

    address: str


@frozen
class Forgotten:
    """No room uses this incarnation: drop all that there is of it."""

    peer: KnownPeer


PeerEffect = SendTo | Up | Greeted | Lost | Unreachable | Forget | Forgotten


def is_older(hello: Hello, other: Hello) -> bool:
    """Whether an incarnation began before another; False if their hosts differ: clocks of two hosts are not compared.

    The start of the process does not count: a younger incarnation may belong to an older process.
    """
    return hello.host == other.host and hello.born < other.born
