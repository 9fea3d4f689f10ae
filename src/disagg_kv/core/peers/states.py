"""What an endpoint knows of one incarnation of a peer, as a table of states and events.

* ``UP``: it is there, and rooms may be bound to it.
* ``LOST``: it was silent, its connection broke, or a transport reported its end. Its next frame revives it.
* ``SHUT``: the transport does not connect the two sides. For ``closed_s`` its frames are answered with ``Refused``, and
  those that end a room are accepted. Then it is ``LOST``.
* ``OVER``: it has closed, its process has ended, or another incarnation has its address. Nothing revives it.

An incarnation that the table does not know is in no state: its ``Hello`` makes it ``UP``.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from ...errors import DisaggKVError
from ..base import Lost
from ..cells import Table, table
from ..wire.frames import Disconnected, Heartbeat, Hello, RoomFrame


class Known(Enum):
    """An incarnation of a peer."""

    __hash__ = object.__hash__  # every frame looks its cell up by it; Enum's own hash is computed in Python

    UP = "up"
    LOST = "lost"
    SHUT = "shut"
    OVER = "over"


@frozen
class Ended:
    """It has closed, or its process has ended: observed, or confirmed by an operator."""

    error: DisaggKVError


@frozen
class Shut:
    """The transport does not connect the two sides."""

    error: DisaggKVError


@frozen
class Replaced:
    """Another incarnation has taken its address."""


K = Known

KNOWN: Table = table(
    {
        K.UP: {
            Hello: ("hello", ()),
            Heartbeat: ("heartbeat", ()),
            RoomFrame: ("frame", ()),
            Disconnected: ("disconnected", ()),
            Lost: ("lost", (K.LOST,)),
            Ended: ("ended", (K.OVER,)),
            Shut: ("shut", (K.SHUT,)),
            Replaced: ("replaced", (K.OVER,)),
        },
        K.LOST: {
            Hello: ("hello", (K.UP,)),
            Heartbeat: ("heartbeat", (K.UP,)),
            RoomFrame: ("frame", (K.UP,)),
            Disconnected: ("heard", ()),
            Lost: ("ignore", ()),
            Ended: ("ended", (K.OVER,)),
            Shut: ("shut", (K.SHUT,)),
            Replaced: ("replaced", (K.OVER,)),
        },
        K.SHUT: {
            Hello: ("refuse", ()),
            Heartbeat: ("refuse", ()),
            RoomFrame: ("refuse", ()),
            Disconnected: ("refuse", ()),
            Lost: ("ignore", ()),
            Ended: ("ended", (K.OVER,)),
            Shut: ("shut", ()),
            Replaced: ("replaced", (K.OVER,)),
        },
        K.OVER: {
            Hello: ("drop", ()),
            Heartbeat: ("drop", ()),
            RoomFrame: ("drop", ()),
            Disconnected: ("drop", ()),
            Lost: ("ignore", ()),
            Ended: ("ended", ()),
            Shut: ("ignore", ()),
            Replaced: ("replaced", ()),
        },
    }
)
