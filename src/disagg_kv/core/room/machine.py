"""The base of both state machines: it looks the event up in the table, acts, and checks the new state."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar, Unpack

from ...errors import About, DisaggKVError, LocalProtocolError, RemoteProtocolError, text_of
from ...ids import room_name
from ...planning import Segment
from ..base import Effect
from ..cells import Table
from ..wire.frames import RoomFrame

S = TypeVar("S", bound=Enum)


class Machine(Generic[S]):
    """A state, a table and the effects of the event in hand.

    ``seen`` collects the entered cells of the tables for tests and the simulator; None: they are not collected.
    """

    seen: ClassVar[set[tuple[Enum, type]] | None] = None

    def __init__(self, table: Table, state: S) -> None:
        self._table = table
        self.state = state
        self.now = 0.0
        self.ignored = 0
        self._out: list[Effect] = []

    def handle(self, event: object, now: float) -> list[Effect]:
        """Process one event; returns the effects, in order.

        Raises:
            RemoteProtocolError: a frame that only our own side sends.
            LocalProtocolError: the event cannot happen in this state, which is a bug of ours.
        """
        cell = self._table.get((self.state, type(event)))
        if cell is None and isinstance(event, RoomFrame):
            raise RemoteProtocolError(
                f"{room_name(event.room)} generation {event.generation}: "
                f"the peer sent {type(event).__name__}, which it must never send",
                epoch=event.src,
            )
        if cell is None:
            raise LocalProtocolError(f"{type(event).__name__} in state {self.state.value}")
        if self.seen is not None:
            self.seen.add((self.state, type(event)))
        self.now = now
        if cell.action == "ignore":
            self.ignored += 1
            return []
        action: Callable[[Any], None] = getattr(self, cell.method)
        action(event)
        assert self.state in cell.leads_to, (cell.action, self.state)
        out, self._out = self._out, []
        return out


def overlap(a: Segment, b: Segment) -> bool:
    """True if the two rectangles share a cell."""
    rows, layers = a.start < b.stop and b.start < a.stop, a.first < b.last and b.first < a.last
    return a.state == b.state and rows and layers


def ours(error: Exception, where: str, **known: Unpack[About]) -> DisaggKVError:
    """The error, if it is one of ours, with what it lacks of ``known``; else one of ours, with the error as cause."""
    if isinstance(error, DisaggKVError):
        return error.about(**known)
    wrapped = DisaggKVError(f"{where}: {text_of(error)}", **known)
    wrapped.__cause__ = error
    return wrapped
