"""Peers that rooms use, and those whose silence some rooms do not bear for as long as the endpoint does."""

from __future__ import annotations

from ...core import Lost, PeerTable, RoomKey
from ...core.timers import Timers
from ...errors import About, PeerLostError
from ...ids import Epoch, peer_name


class Silences:
    """One timer per peer, not per room and peer: a peer that sends in time costs the same for any number of rooms.

    Rooms that bear as much silence as the endpoint have no timer here: :class:`PeerTable` decides when a peer is lost.

    Args:
        peers: know when the last frame of each peer came.
        silence_s: the endpoint's own, in seconds.
    """

    def __init__(self, peers: PeerTable, silence_s: float) -> None:
        self._peers = peers
        self._silence_s = silence_s
        self._watched: dict[Epoch, dict[float, dict[RoomKey, None]]] = {}
        self._of: dict[RoomKey, dict[Epoch, float]] = {}
        self._used: dict[RoomKey, dict[Epoch, None]] = {}
        self._timers: Timers[Epoch] = Timers()

    def watch(self, peer: Epoch, room: RoomKey, silence_s: float, now: float) -> None:
        """The room uses the peer, and ends if that is silent for ``silence_s`` seconds."""
        used = self._used.setdefault(room, {})
        if peer not in used:
            used[peer] = None
            self._peers.use(peer, now)
        if silence_s >= self._silence_s or peer in self._of.get(room, {}):
            return
        self._of.setdefault(room, {})[peer] = silence_s
        self._watched.setdefault(peer, {}).setdefault(silence_s, {})[room] = None
        self._schedule(peer, now)

    def forget(self, room: RoomKey) -> None:
        """The room is over."""
        for peer, silence_s in self._of.pop(room, {}).items():
            self._drop(peer, silence_s, room)
        for peer in self._used.pop(room, {}):
            self._peers.release(peer)

    def _error(self, peer: Epoch, silence_s: float) -> PeerLostError:
        known = self._peers.known(peer)
        name = f"peer {peer_name(peer)}" if known is None else known.name
        who: About = {"epoch": peer} if known is None else known.hello.who
        return PeerLostError(f"{name} was silent for {silence_s:g} s", **who)

    def _drop(self, peer: Epoch, silence_s: float, room: RoomKey) -> None:
        watched = self._watched[peer]
        del watched[silence_s][room]
        if not watched[silence_s]:
            del watched[silence_s]
        if not watched:
            del self._watched[peer]
            self._timers.schedule(peer, None)

    def due(self, now: float) -> list[tuple[RoomKey, Lost]]:
        """Rooms that a peer has been silent for too long for, each once."""
        found: list[tuple[RoomKey, Lost]] = []
        for peer in self._timers.due(now):
            silent_s = self._peers.silent_for(peer, now)
            over = [room for s, rooms in self._watched[peer].items() if silent_s >= s for room in rooms]
            for room in over:
                silence_s = self._of[room].pop(peer)
                self._drop(peer, silence_s, room)
                found.append((room, Lost(peer, self._error(peer, silence_s))))
            if peer in self._watched:
                self._schedule(peer, now)
        return found

    def _schedule(self, peer: Epoch, now: float) -> None:
        """Set the timer to when a silent peer ends its least patient room; a time that has passed is due at once."""
        silent_s = self._peers.silent_for(peer, now)
        self._timers.schedule(peer, now - silent_s + min(self._watched[peer]))

    def next_at(self) -> float | None:
        """When :meth:`due` may have something to return."""
        return self._timers.next_at()
