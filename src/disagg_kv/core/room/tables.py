"""The transition tables of both machines of a room.

Rules that hold in every row, beside those of :mod:`..cells`:

* A pair that is not in the table cannot happen; if it does, the machine raises.
* A terminal outcome never changes. Ended rooms are answered from their tombstone, not from here.
* Memory that a peer may still write to is released in ``DRAINING`` only on evidence: its part landed, it sent
  ``Drained``, or it is ``Gone``. ``Lost`` is no evidence.
"""

from __future__ import annotations

from enum import Enum

from ..base import (
    Awaited,
    Cancel,
    Decided,
    Finished,
    Gone,
    Introduced,
    Leased,
    Lost,
    Met,
    Offered,
    Quiet,
    Scattered,
    Tick,
    WriteFailed,
    Wrote,
)
from ..cells import Table, table
from ..wire.frames import (
    Abort,
    ChunkReady,
    Complete,
    Done,
    Drained,
    DrainedAck,
    Expect,
    Expected,
    Grant,
    Landed,
    Queued,
    Return,
    Returned,
    StagingRequest,
)


class Receiving(Enum):
    """A room on one decode rank."""

    __hash__ = object.__hash__  # every event looks its cell up by its state; Enum's own hash is computed in Python

    OPENED = "opened"
    MOVING = "moving"
    PLACED = "placed"
    DRAINING = "draining"
    CLOSED = "closed"


class Sending(Enum):
    """A room on one prefill rank, towards one decode rank."""

    __hash__ = object.__hash__

    MOVING = "moving"
    FINISHED = "finished"
    COMPLETE = "complete"
    ABORTING = "aborting"
    DRAINING = "draining"
    CLOSED = "closed"


R = Receiving
_FAILS = (R.DRAINING, R.CLOSED)

RECEIVING: Table = table(
    {
        R.OPENED: {
            Awaited: ("awaited", (R.OPENED, R.MOVING)),
            Introduced: ("introduced", (R.OPENED, R.MOVING)),
            Met: ("ignore", ()),
            Expected: ("ignore", ()),
            StagingRequest: ("ignore", ()),
            Return: ("ignore", ()),
            ChunkReady: ("ignore", ()),
            Done: ("ignore", ()),
            Abort: ("their_abort", _FAILS),
            Drained: ("drained", _FAILS),
            Lost: ("lost", (R.OPENED, *_FAILS)),
            Gone: ("gone", (R.OPENED,)),
            Cancel: ("cancel", _FAILS),
            Decided: ("decided", _FAILS),
            Tick: ("tick", (R.OPENED, *_FAILS)),
        },
        R.MOVING: {
            Met: ("met", ()),
            Expected: ("expected", (R.MOVING, R.PLACED, *_FAILS)),
            StagingRequest: ("request", (R.MOVING, *_FAILS)),
            Return: ("given_back", ()),
            Leased: ("leased", ()),
            ChunkReady: ("chunk_ready", (R.MOVING, R.PLACED, *_FAILS)),
            Scattered: ("scattered", (R.MOVING, R.PLACED, *_FAILS)),
            Done: ("done", (R.MOVING, R.PLACED, *_FAILS)),
            Abort: ("their_abort", _FAILS),
            Drained: ("drained", _FAILS),
            Lost: ("lost", (R.MOVING, *_FAILS)),
            Gone: ("gone", (R.MOVING,)),
            Cancel: ("cancel", _FAILS),
            Decided: ("decided", _FAILS),
            Tick: ("tick", (R.MOVING, *_FAILS)),
        },
        R.PLACED: {
            Met: ("ignore", ()),
            Expected: ("ignore", ()),
            StagingRequest: ("answer_placed", ()),
            Return: ("ignore", ()),
            ChunkReady: ("answer_placed", ()),
            Done: ("ignore", ()),
            Abort: ("doubt", ()),
            Drained: ("doubt", ()),
            Lost: ("lost_placed", ()),
            Gone: ("gone", ()),
            Cancel: ("doubt", ()),
            Decided: ("decided", (R.CLOSED, R.DRAINING)),
            Tick: ("tick_placed", ()),
        },
        R.DRAINING: {
            Awaited: ("ignore", ()),
            Met: ("met_late", ()),
            Expected: ("ignore", ()),
            StagingRequest: ("answer_abort", ()),
            Return: ("ignore", ()),
            Leased: ("leased_late", ()),
            ChunkReady: ("late_chunk", _FAILS),
            Scattered: ("scattered_late", _FAILS),
            Done: ("late_done", _FAILS),
            Abort: ("answer_abort", ()),
            Drained: ("drained_late", _FAILS),
            Lost: ("lost_late", _FAILS),
            Gone: ("gone_late", _FAILS),
            Cancel: ("ignore", ()),
            Decided: ("ignore", ()),
            Tick: ("tick_draining", _FAILS),
        },
    }
)

P = Sending
_ENDS = (P.ABORTING, P.DRAINING)
_LOST = (P.ABORTING, P.CLOSED)

SENDING: Table = table(
    {
        P.MOVING: {
            Expect: ("expect_again", ()),
            Offered: ("offered", ()),
            Finished: ("finished", (P.MOVING, P.FINISHED, P.COMPLETE)),
            Queued: ("queued", ()),
            Grant: ("grant", (P.MOVING, *_ENDS)),
            Returned: ("returned", ()),
            Landed: ("landed", (P.MOVING, P.FINISHED)),
            Complete: ("placed", ()),
            Wrote: ("wrote", (P.MOVING, P.FINISHED, P.COMPLETE)),
            WriteFailed: ("write_failed", (P.MOVING, *_ENDS, P.CLOSED)),
            Abort: ("their_abort", (*_ENDS, P.CLOSED)),
            DrainedAck: ("ignore", ()),
            Lost: ("lost", (P.MOVING, *_LOST)),
            Gone: ("gone", (P.MOVING, *_LOST)),
            Cancel: ("cancel", (*_ENDS, P.CLOSED)),
            Tick: ("tick", ()),
        },
        P.FINISHED: {
            Expect: ("expect_again", ()),
            Offered: ("ignore", ()),
            Queued: ("ignore", ()),
            Grant: ("ignore", ()),
            Returned: ("ignore", ()),
            Landed: ("landed_late", ()),
            Complete: ("complete", (P.COMPLETE,)),
            Abort: ("their_abort", (P.DRAINING,)),
            DrainedAck: ("ignore", ()),
            Lost: ("lost", (P.CLOSED,)),
            Gone: ("gone", (P.CLOSED,)),
            Cancel: ("cancel", (P.DRAINING,)),
            Tick: ("tick", ()),
        },
        P.COMPLETE: {
            Expect: ("expect_again", ()),
            Offered: ("ignore", ()),
            Queued: ("ignore", ()),
            Grant: ("ignore", ()),
            Returned: ("ignore", ()),
            Landed: ("ignore", ()),
            Complete: ("ignore", ()),
            Abort: ("their_late_abort", ()),
            DrainedAck: ("ignore", ()),
            Lost: ("ignore", ()),
            Gone: ("ignore", ()),
            Cancel: ("close", (P.CLOSED,)),
            Decided: ("close", (P.CLOSED,)),
            Tick: ("ignore", ()),
        },
        P.ABORTING: {
            Expect: ("answer_abort", ()),
            Offered: ("ignore", ()),
            Finished: ("ignore", ()),
            Queued: ("ignore", ()),
            Grant: ("ignore", ()),
            Returned: ("ignore", ()),
            Landed: ("ignore", ()),
            Complete: ("ignore", ()),
            Wrote: ("quiet_late", (P.ABORTING, P.DRAINING, P.CLOSED)),
            WriteFailed: ("write_failed_late", (P.ABORTING, P.DRAINING, P.CLOSED)),
            Quiet: ("quiet_late", (P.ABORTING, P.DRAINING, P.CLOSED)),
            Abort: ("abort_known", ()),
            DrainedAck: ("ignore", ()),
            Lost: ("lost_late", ()),
            Gone: ("lost_late", ()),
            Cancel: ("ignore", ()),
            Tick: ("tick", ()),
        },
        P.DRAINING: {
            Expect: ("answer_abort", ()),
            Offered: ("ignore", ()),
            Finished: ("ignore", ()),
            Queued: ("ignore", ()),
            Grant: ("ignore", ()),
            Returned: ("ignore", ()),
            Landed: ("ignore", ()),
            Complete: ("ignore", ()),
            Abort: ("answer_drained", ()),
            DrainedAck: ("close", (P.CLOSED,)),
            Lost: ("close", (P.CLOSED,)),
            Gone: ("close", (P.CLOSED,)),
            Cancel: ("ignore", ()),
            Tick: ("tick", ()),
        },
    }
)
