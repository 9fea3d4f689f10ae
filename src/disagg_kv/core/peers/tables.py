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
_FRAMES = (Hello, Heartbeat, RoomFrame, Disconnected)
_ENDS = {Ended: ("ended", (K.OVER,)), Replaced: ("replaced", (K.OVER,))}

KNOWN: Table = table(
    {
        K.UP: {
            Hello: ("hello", ()),
            Heartbeat: ("heartbeat", ()),
            RoomFrame: ("heard", ()),
            Disconnected: ("disconnected", ()),
            Lost: ("lost", (K.LOST,)),
            Shut: ("shut", (K.SHUT,)),
            **_ENDS,
        },
        K.LOST: {
            Hello: ("hello", (K.UP,)),
            Heartbeat: ("heartbeat", (K.UP,)),
            RoomFrame: ("frame", (K.UP,)),
            Disconnected: ("heard", ()),
            Lost: ("ignore", ()),
            Shut: ("shut", (K.SHUT,)),
            **_ENDS,
        },
        K.SHUT: {**dict.fromkeys(_FRAMES, ("refuse", ())), Lost: ("ignore", ()), Shut: ("shut", ()), **_ENDS},
        K.OVER: {**dict.fromkeys(_FRAMES, ("ignore", ())), Lost: ("ignore", ()), Shut: ("ignore", ()), **_ENDS},
    }
)
