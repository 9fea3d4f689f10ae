"""What a node asks of the half of it that is different for prefill and decode."""

from __future__ import annotations

from math import inf
from typing import Protocol

from ...core import Decided, Lost, RoomFrame, RoomKey
from ...errors import DisaggKVError, LocalProtocolError
from ...ids import Epoch
from ...transports import Settled, WriteEnded
from ..peers.directory import LookupResult
from ..peers.session import PeerSession


class Side(Protocol):
    """The half that is different: rooms, and what moves their bytes. A half inherits what it does nothing about."""

    def on_frame(self, frame: RoomFrame) -> None:
        """A frame about a room, from an incarnation that is known, to this incarnation."""
        ...

    def on_up(self, session: PeerSession) -> None:
        """A peer of the other side is there."""
        return

    def on_greeted(self, epoch: Epoch) -> None:
        """A peer of the other side had lost us, or has received no frame from us for a while."""
        return

    def on_lost(self, lost: Lost) -> None:
        """A peer of the other side is lost."""
        ...

    def forget(self, session: PeerSession) -> None:
        """A peer of the other side is forgotten: no room here uses it."""
        return

    def on_unreachable(self, address: str, error: DisaggKVError) -> None:
        """No endpoint that we can work with answers at an address."""
        return

    def on_answer(self, answer: LookupResult) -> None:
        """The rendezvous has answered where an instance is."""
        return

    def on_gone(self, session: PeerSession) -> None:
        """Evidence: a peer's process has ended and its last writes have landed."""
        ...

    def on_ticket(self, transport: str, event: WriteEnded | Settled) -> None:
        """A write ended, or is quiet at last. Decode posts none."""
        raise LocalProtocolError(f"a decode endpoint has no write {event.ticket}")

    def on_decided(self, key: RoomKey, decided: Decided) -> None:
        """The ranks of our instance agree."""
        ...

    def work(self) -> bool:
        """Start and finish copies; True while something is in flight, or was found, that only polling shows."""
        ...

    @property
    def patience_s(self) -> float:
        """How long nothing has to be looked for while the engine's own thread is in a forward pass; 0: it is in none.

        This thread holds that one up whenever it runs.
        """
        ...

    @property
    def open_rooms(self) -> int:
        """Rooms that are not forgotten yet."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...

    def next_at(self) -> float | None:
        """When ``tick`` is due."""
        ...

    def check_integrity(self, since: float = -inf) -> None:
        """Raise AssertionError if the accounts contradict each other; of rooms that took an event ``since`` then."""
        ...

    def integrity_failure(self, error: DisaggKVError, *, unmet: bool = False) -> None:
        """No open room can be trusted; ``unmet``: those alone fail that no peer of the other side has met."""
        ...
