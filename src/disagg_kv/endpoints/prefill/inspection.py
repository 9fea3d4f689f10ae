"""What a prefill endpoint knows; see :mod:`~disagg_kv.endpoints.loop.inspection`."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from attrs import frozen

from ...core import RoomKey
from ...ids import Epoch, RoomId, Ticket
from ..loop.inspection import LoopInspection
from .copies import PageCopies
from .prepared import PreparedGathers
from .room import PrefillRoom
from .slots import StagingSlots
from .writes import Post


@frozen(eq=False)
class TransferInspection:
    """What :class:`~disagg_kv.endpoints.prefill.transfers.TransferQueue` has to do.

    Args:
        pending: transfers that have not begun.
        gathers: those that have been launched and may still run.
        copies: those into mapped pages that may still run.
        posts: writes that may still read memory, by their tickets.
        slots: the staging memory, and which write pins which slot.
        prepared: gathers that are planned or prepared before their rows are final.
    """

    pending: Sized
    gathers: Sized
    copies: PageCopies
    posts: Mapping[Ticket, Post]
    slots: StagingSlots[Post]
    prepared: PreparedGathers


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
    transfers: TransferInspection
