"""What a prefill endpoint knows; see :mod:`~disagg_kv.endpoints.loop.inspection`."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from ...core import RoomKey
from ...ids import Epoch, RoomId
from ..loop.inspection import LoopInspection
from .room import PrefillRoom
from .transfers import TransferQueue


@frozen(eq=False)
class PrefillInspection:
    """See :mod:`~disagg_kv.endpoints.loop.inspection`.

    Args:
        loop: what both sides have in common.
        rooms: that are not forgotten.
        newest: the youngest room of each id.
        flows: the room of each decode rank's expectation, by room, decode rank and its generation.
        transfers: what moves the bytes.
    """

    loop: LoopInspection
    rooms: Mapping[RoomKey, PrefillRoom]
    newest: Mapping[RoomId, PrefillRoom]
    flows: Mapping[tuple[RoomId, Epoch, int], PrefillRoom]
    transfers: TransferQueue
