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

from attrs import define, frozen

from ...errors import About, DisaggKVError
from ...ids import Epoch
from ..base import Options
from ..timers import Timers
from ..wire.frames import Hello
from .tables import Known

NEVER = ""
"""In place of the address of an incarnation that never returns."""

FORGET_AFTER = 20
"""A lost peer is forgotten after this multiple of ``silence_s``; after ``silence_s`` if its connection is broken."""


@define(eq=False)
class KnownPeer:
    """One incarnation of a peer.

    Args:
        hello: its first ``Hello``; ``last_frame_at`` is the time of its last frame.
        proved: it has named our epoch.
        state: see :mod:`.tables`.
        users: how many rooms use it.
        used_since: since when they do; None: none does.
        idle_since: when it was used for the last time.
        beaten: when it last got a heartbeat or a ``Hello``.
        closed: when the connection to its address broke; None: it is not broken.
        greeted: when it last sent ``Hello`` although it knew us.
        greet_until: it was lost, and gets ``Hello`` with its heartbeats until this time.
        shut_until, shut_for: when it is not shut any more, and why it is.
        lost_at: when it was lost.
        ended: it has closed, or its process has ended: observed, or confirmed by an operator.
        replaced: another incarnation has taken its address.
    """

    hello: Hello
    last_frame_at: float
    proved: bool
    state: Known = Known.UP
    users: int = 0
    used_since: float | None = None
    idle_since: float = -inf
    beaten: float = -inf
    closed: float | None = None
    greeted: float = -inf
    greet_until: float = -inf
    shut_until: float = -inf
    shut_for: DisaggKVError | None = None
    lost_at: float = -inf
    ended: bool = False
    replaced: bool = False

    @property
    def epoch(self) -> Epoch:
        """Its name."""
        return Epoch(self.hello.src)

    @property
    def lost(self) -> bool:
        """Whether no room may be bound to it."""
        return self.state is not Known.UP

    @property
    def over(self) -> bool:
        """Whether it never returns."""
        return self.state is Known.OVER

    @property
    def name(self) -> str:
        """For messages."""
        return self.hello.name

    @property
    def who(self) -> About:
        """For attributes of errors."""
        return self.hello.who

    @property
    def heard(self) -> float:
        """Since when it is silent: its last frame, or the beginning of its use."""
        return self.last_frame_at if self.used_since is None else max(self.last_frame_at, self.used_since)

    def beat_at(self, options: Options, now: float) -> float | None:
        """When it gets its next heartbeat or ``Hello``, unless it is lost; None: it gets none."""
        next_at = self.beaten + options.heartbeat_s
        greeted = max(next_at, now) if next_at < self.greet_until else inf
        used = max(next_at, self.heard + options.heartbeat_s) if self.used_since is not None else inf
        return None if greeted == used == inf else min(greeted, used)

    def forgotten_at(self, options: Options) -> float:
        """When it is forgotten, if it is lost. One that was not in use counts as silent for ``silence_s``."""
        since = max(self.last_frame_at, self.lost_at - options.silence_s)
        return since + options.silence_s * (FORGET_AFTER if self.closed is None else 1)

    def due_at(self, options: Options, now: float) -> float | None:
        """When something may be due for it, if no frame arrives before; None: nothing is."""
        times: list[float] = []
        if self.lost:
            if not self.users:
                times.append(-inf if self.replaced else self.forgotten_at(options))
            if not (self.proved or self.over):
                times.append(self.beaten + options.heartbeat_s)
        else:
            if self.used_since is not None:
                times.append(self.heard + options.silence_s)
            if self.closed is not None:
                times.append(self.closed + options.closed_s)
            if (beat_at := self.beat_at(options, now)) is not None:
                times.append(beat_at)
        return min(times, default=None)


P = TypeVar("P", bound=KnownPeer)
"""What there is of one incarnation: its owner may know more of it than the table does."""


@frozen
class Forgotten:
    """No room uses this incarnation: drop all that there is of it."""

    peer: KnownPeer


def is_older(hello: Hello, other: Hello) -> bool:
    """Whether an incarnation began before another; False if their hosts differ: clocks of two hosts are not compared.

    The start of the process does not count: a younger incarnation may belong to an older process.
    """
    return hello.host == other.host and hello.born < other.born


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

    def _drop(self, peer: P) -> list[Forgotten]:
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
