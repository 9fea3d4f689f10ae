"""Which peers a room uses: their silence counts, and their links stay."""

from __future__ import annotations

from ...core import PeerTable, RoomKey
from ...ids import Epoch


class UsedPeers:
    """Says to the table of peers which of them rooms use, each room once.

    Args:
        peers: counts the rooms.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._of: dict[RoomKey, dict[Epoch, None]] = {}  # in the order of first use: links are dropped in that order

    def use(self, peer: Epoch, room: RoomKey, now: float) -> None:
        """The room uses the peer until it is over."""
        used = self._of.setdefault(room, {})
        if peer not in used:
            used[peer] = None
            self._peers.use(peer, now)

    def forget(self, room: RoomKey) -> None:
        """The room is over."""
        for peer in self._of.pop(room, ()):
            self._peers.release(peer)
