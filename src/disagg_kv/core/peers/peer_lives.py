"""The lives that are known, at which address each is, and which of them make room for others. Sans IO.

**Bound.** Any process may send a ``Hello``, so the number of peers is bounded. Lost peers make room first, then peers
that have never named our epoch: the address in their ``Hello`` is not proved. Then follow peers that are not in use,
the one with the oldest frame first; those that are parted count as lost. Such a peer may return: its address is
remembered, and its next frame is answered with a ``Hello``. A peer that a room uses makes no room, lost or not: the
room may wait for evidence about it. Of any other life that is forgotten nothing is left between it and the transport.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from math import inf

from ...errors import PeerLostError
from ...ids import Epoch
from ..base import Lost, Options
from ..timers import Timers
from ..wire.frames import Hello
from .known_peer import KnownPeer
from .links import Links
from .peer_effects import Forget, PeerEffect, Unlink, is_older

IN_USE = 3
"""In the order in which peers make room: those that make none."""


class PeerLives:
    """The base of :class:`~.peers.PeerTable`: it knows lives, and forgets them; it sends nothing.

    Args:
        options: times, and how many peers there may be.
        links: those that are held.
    """

    MAX_RETIRED = 4096

    def __init__(self, options: Options, links: Links) -> None:
        self._options = options
        self.links = links
        self._peers: dict[Epoch, KnownPeer] = {}
        self._at: dict[str, Epoch] = {}
        self._users: dict[Epoch, int] = {}
        self._timers: Timers[Epoch] = Timers()
        self._retired: OrderedDict[Epoch, None] = OrderedDict()
        self._displaced: OrderedDict[Epoch, str] = OrderedDict()
        self._spare: deque[Epoch] = deque()
        self._full_until = -inf
        self._now = 0.0
        self._caught_up = inf

    def caught_up(self, at: float) -> None:
        """Every frame that arrived before this time is processed: silence is measured up to this time only."""
        self._caught_up = at

    def in_use(self, epoch: Epoch) -> bool:
        """Whether a room depends on a life."""
        return epoch in self._users

    @property
    def addresses(self) -> Mapping[str, Epoch]:
        """The last life at each address, lost or not; read only."""
        return self._at

    def at(self, address: str) -> Epoch | None:
        """The life at an address, unless it is lost or parted."""
        epoch = self._at.get(address)
        return epoch if epoch is not None and self._peers[epoch].there else None

    def hello(self, epoch: Epoch) -> Hello:
        """The latest ``Hello`` of a peer."""
        return self._peers[epoch].hello

    def known(self, epoch: Epoch) -> KnownPeer | None:
        """The entry of a life; None: it is unknown or forgotten. From any thread."""
        return self._peers.get(epoch)

    def ended(self, epoch: bytes) -> bool:
        """Whether the process of a life is known to have ended."""
        peer = self._peers.get(Epoch(epoch))
        return peer is not None and peer.ended

    def epochs(self) -> tuple[Epoch, ...]:
        """Every life that is neither lost nor parted, in the order of their first ``Hello``."""
        return tuple(e for e, p in self._peers.items() if p.there)

    def lively(self, epoch: Epoch, now: float) -> bool:
        """False: the peer is lost, or in use and has missed heartbeats: it should get nothing new."""
        peer = self._peers.get(epoch)
        return peer is not None and peer.there and (peer.used_since is None or self._answers(peer, now))

    def _answers(self, peer: KnownPeer, now: float) -> bool:
        return now - peer.heard <= self._options.missed * self._options.heartbeat_s

    def _stale(self, hello: Hello) -> bool:
        """Whether a younger life has the address: an older one takes it only if the process of that life has ended."""
        epoch = self._at.get(hello.address)
        if epoch is None:
            return False
        there = self._peers[epoch]
        return not there.ended and is_older(hello, there.hello)

    def _drop(self, epoch: Epoch, *, retire: bool) -> list[PeerEffect]:
        """Forget a life, and its link, unless rooms use it: what it may still write to waits for evidence about it.

        A retired life never returns, and neither does one whose process has ended.
        """
        peer = self._peers.pop(epoch)
        if self._at.get(peer.hello.address) == epoch:
            del self._at[peer.hello.address]
        self._timers.schedule(epoch, None)
        self.links.close(epoch)
        peer.lost = True
        if retire or peer.ended:
            self._retired[epoch] = None
            while len(self._retired) > self.MAX_RETIRED:
                self._retired.popitem(last=False)
        return [] if epoch in self._users else [Unlink(epoch)]

    def _make_room(self, now: float, out: list[PeerEffect]) -> bool:
        """Make room for a peer: forget one that is lost, else unproved, else not in use; False: there is none."""
        if len(self._peers) < self._options.peers:
            return True
        if not self._spare and now >= self._full_until:
            ranked = [(self._rank(e, p), p.last_frame_at, e) for e, p in self._peers.items()]
            self._spare.extend(epoch for rank, _, epoch in sorted(ranked) if rank < IN_USE)
            if not self._spare:
                self._full_until = now + 1.0
        while self._spare:
            epoch = self._spare.popleft()
            peer = self._peers.get(epoch)
            if peer is None or self._rank(epoch, peer) == IN_USE:
                continue
            if peer.there:
                out.append(Lost(epoch, PeerLostError(f"{peer.name}: it made room for another", **peer.who)))
            out += self._displace(epoch, peer)
            return True
        return False

    def _displace(self, epoch: Epoch, peer: KnownPeer) -> list[PeerEffect]:
        """Forget a life but for its address: its next frame is answered with a ``Hello``."""
        self._displaced[epoch] = peer.hello.address
        while len(self._displaced) > self.MAX_RETIRED:
            self._displaced.popitem(last=False)
        return [*self._drop(epoch, retire=False), Forget(peer.hello.address)]

    def _rank(self, epoch: Epoch, peer: KnownPeer) -> int:
        """The order in which peers make room."""
        if epoch in self._users:
            return IN_USE
        return 1 + peer.proved if peer.there else 0

    def _schedule(self, epoch: Epoch, peer: KnownPeer, least: float = -inf) -> None:
        """Set when something may be due for a peer; a frame that arrives before only postpones it."""
        due = peer.due_at(self._options, self._now)
        self._timers.schedule(epoch, None if due is None else max(least, due))

    def check_integrity(self) -> None:
        """Raise AssertionError unless there is a link to each life that is there, and to no parted one."""
        self.links.check_integrity({e for e, peer in self._peers.items() if not peer.parted}, set(self._users))
        assert all(epoch in self.links for epoch in self.epochs()), "a life is there without a link"
