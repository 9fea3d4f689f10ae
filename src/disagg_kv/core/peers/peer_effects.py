"""What the peer table asks for."""

from __future__ import annotations

from attrs import frozen

from ...errors import DisaggKVError
from ...ids import Epoch
from ..base import Lost
from ..wire.frames import Frame
from .known_peers import Forgotten


@frozen
class SendTo:
    """Pass this frame to the channel; the receiver's incarnation may not be known yet."""

    address: str
    frame: Frame


@frozen
class Up:
    """An endpoint is alive, and both sides can work together."""

    peer: Epoch


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


PeerEffect = SendTo | Up | Greeted | Lost | Unreachable | Forget | Forgotten
