"""The incarnations of peers that are known, and at which address each is. Sans IO.

**Bound.** Any process may send a ``Hello``, so the number of peers is bounded. At the bound a peer is forgotten that no
room uses, see :class:`IdlePeers`. It may return: its address is remembered, and its next frame is answered with a
``Hello``. A peer that a room uses is never forgotten, lost or not: the room may wait for evidence about it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from typing import Generic, TypeVar

from attrs import frozen

from ...ids import Epoch
from ..base import Options
from ..timers import Timers
from ..wire.frames import Hello
from .known_peer import KnownPeer
from .peer_effects import Forgotten, PeerEffect, is_older

P = TypeVar("P", bound=KnownPeer)
"""What there is of one incarnation: its owner may know more of it than the table does."""

NEVER = ""
"""In place of the address of an incarnation that never returns."""


@frozen
class LinkBudget:
    """How many links there may be: for each peer the connections of channel and transport, and a watch of its process.

    Args:
        most: above this, peers are forgotten that no room uses.
        limit: how many there may be if rooms use all of them.
        rest_s: seconds for which a peer above ``most`` stays after its last use: a room may be about to use it.
    """

    most: float = inf
    limit: float = inf
    rest_s: float = 1.0


class IdlePeers(Generic[P]):
    """Peers that no room uses: first those that are lost, then those that have never named our epoch, then the others.

    Of each kind the one that was used longest ago comes first. All calls cost the same for any number of peers.
    """

    def __init__(self) -> None:
        self._kinds: tuple[OrderedDict[P, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())

    def put(self, peer: P, now: float) -> None:
        """A peer was used for the last time, or is lost."""
        self.remove(peer)
        peer.idle_since = -inf if peer.lost else now
        self._kinds[0 if peer.lost else 1 + peer.proved][peer] = None

    def remove(self, peer: P) -> None:
        """A room uses it, or it is forgotten."""
        for kind in self._kinds:
            kind.pop(peer, None)

    def first(self) -> P | None:
        """The one that makes room first; None: rooms use all."""
        return next((peer for kind in self._kinds for peer in kind), None)

    def check_integrity(self, idle: set[P]) -> None:
        """Raise AssertionError unless it has exactly these, each where it belongs."""
        assert set().union(*self._kinds) == idle, "a peer in use may be forgotten, or an idle one may not"
        for kind, peers in enumerate(self._kinds):
            assert all(kind == (0 if peer.lost else 1 + peer.proved) for peer in peers)


class KnownPeers(Generic[P]):
    """The base of :class:`~.peer_table.PeerTable`: it knows incarnations, and forgets them; it sends nothing.

    Args:
        options: times, and how many peers there may be.
        budget: of links.
    """

    MAX_FORGOTTEN = 4096

    def __init__(self, options: Options, budget: LinkBudget) -> None:
        self._options = options
        self.budget = budget
        self._peers: dict[Epoch, P] = {}
        self._at: dict[str, P] = {}
        self.addresses: Mapping[str, P] = self._at
        """The last incarnation at each address, lost or not; read only."""
        self._idle: IdlePeers[P] = IdlePeers()
        self._timers: Timers[P | str] = Timers()  # an address: its connection is dropped, unless it is used
        self._forgotten: OrderedDict[Epoch, str] = OrderedDict()
        self._now = 0.0
        self._caught_up = inf

    def __len__(self) -> int:
        return len(self._peers)

    def caught_up(self, at: float) -> None:
        """Every frame that arrived before this time is processed: silence is measured up to this time only."""
        self._caught_up = at

    def at(self, address: str) -> Epoch | None:
        """The incarnation at an address, unless it is lost."""
        peer = self._at.get(address)
        return peer.epoch if peer is not None and not peer.lost else None

    def known(self, epoch: Epoch) -> P | None:
        """The entry of an incarnation; None: it is unknown or forgotten. From any thread."""
        return self._peers.get(epoch)

    def all(self) -> Sequence[P]:
        """Every incarnation that is known, in the order of their first ``Hello``. From any thread."""
        return list(self._peers.values())  # one step

    def ended(self, epoch: bytes) -> bool:
        """Whether the process of an incarnation is known to have ended."""
        peer = self._peers.get(Epoch(epoch))
        return peer is not None and peer.ended

    def epochs(self) -> tuple[Epoch, ...]:
        """Every incarnation that is not lost, in the order of their first ``Hello``."""
        return tuple(e for e, p in self._peers.items() if not p.lost)

    def lively(self, epoch: Epoch, now: float) -> bool:
        """False: the peer is lost, or in use and has missed heartbeats: it should get nothing new."""
        peer = self._peers.get(epoch)
        return peer is not None and not peer.lost and (peer.used_since is None or self._answers(peer, now))

    def _answers(self, peer: P, now: float) -> bool:
        return now - peer.heard <= self._options.missed * self._options.heartbeat_s

    def _stale(self, hello: Hello) -> bool:
        """Whether a younger incarnation has the address: an older one takes it only if that one's process has ended."""
        there = self._at.get(hello.address)
        return there is not None and not there.ended and is_older(hello, there.hello)

    def _drop(self, peer: P) -> list[PeerEffect]:
        """Forget an incarnation, once no room uses it: what it may still write to waits for evidence about it."""
        address = peer.hello.address
        if self._at.get(address) is peer:
            del self._at[address]
        if peer.users:
            self._schedule(peer)
            return []
        del self._peers[peer.epoch]
        self._timers.schedule(peer, None)
        self._idle.remove(peer)
        self._forgotten[peer.epoch] = NEVER if peer.over else address
        while len(self._forgotten) > self.MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        return [Forgotten(peer)]

    def _schedule(self, peer: P, least: float = -inf) -> None:
        """Set when something may be due for a peer; a frame that arrives before only postpones it."""
        due = peer.due_at(self._options, self._now)
        self._timers.schedule(peer, None if due is None else max(least, due))

    def check_integrity(self) -> None:
        """Raise AssertionError if what is known contradicts itself."""
        self._idle.check_integrity({peer for peer in self._peers.values() if not (peer.users or peer.replaced)})
        assert all(self._peers.get(peer.epoch) is peer for peer in self._at.values()), "a forgotten peer has an address"
