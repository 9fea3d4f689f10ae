"""What a decode endpoint knows; see :mod:`~disagg_kv.endpoints.loop.inspection`."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from attrs import frozen

from ...core import RoomKey
from ...ids import Epoch
from ...planning import Segment
from ...staging import GrantQueue
from ..loop.inspection import LoopInspection
from .room import DecodeRoom


@frozen(eq=False)
class ScatterInspection:
    """What :class:`~disagg_kv.endpoints.decode.scatter.ScatterQueue` has to do.

    Args:
        waiting: segments that have arrived and wait for their scatter.
        running: scatters that have been launched and have not ended.
        unprepared: segments with a lease, whose scatter may be prepared before they arrive.
        prepared: segments whose scatter is.
    """

    waiting: Sized
    running: Sized
    unprepared: Sized
    prepared: Sized


@frozen(eq=False)
class DecodeInspection:
    """See :mod:`~disagg_kv.endpoints.loop.inspection`.

    Args:
        loop: what both sides have in common.
        rooms: that are not forgotten; of each, ``machine.inspect()`` says more.
        queue: the leases, and who waits for one.
        scatters: from the ring into pages.
        exposes: whether prefill may write straight to pages.
    """

    loop: LoopInspection
    rooms: Mapping[RoomKey, DecodeRoom]
    queue: GrantQueue[Epoch, tuple[RoomKey, Segment]]
    scatters: ScatterInspection
    exposes: bool
