"""Who gets ring bytes next: a fair queue in front of a :class:`StagingAllocator`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Generic, TypeVar

from attrs import define, field

from ..errors import ConfigurationError, LocalProtocolError, OversizeError
from .base import Lease, StagingAllocator

P = TypeVar("P", bound=Hashable)
K = TypeVar("K", bound=Hashable)

PASSES = 8
"""How often others may pass a request that is too large for the free bytes before they have to wait for it."""


@define
class _Waiting(Generic[P, K]):
    peer: P
    key: K
    nbytes: int
    lookahead: bool
    passed: int = 0


@define
class GrantedLease(Generic[P]):
    """A live lease; ``quarantined``: it awaits evidence."""

    peer: P
    lease: Lease
    lookahead: bool
    quarantined: bool = False


@define
class _Peer(Generic[P, K]):
    connected: bool = False
    suspended: bool = False
    held: int = 0
    quarantined: int = 0
    ready: dict[K, _Waiting[P, K]] = field(factory=dict)
    ahead: dict[K, _Waiting[P, K]] = field(factory=dict)
    turn: int = 0

    def line(self, lookahead: bool) -> dict[K, _Waiting[P, K]]:
        return self.ahead if lookahead else self.ready

    def idle(self) -> bool:
        return not (self.connected or self.suspended or self.held or self.ready or self.ahead)


class GrantQueue(Generic[P, K]):
    """Decides which waiting request gets bytes of the ring. Pure bookkeeping, not thread-safe.

    **Order.** Requests of one peer are served in order of arrival. Among peers, the one whose last grant is oldest
    comes first. Data that is ready goes before look-ahead, which gets nothing while ready data waits for bytes. Only
    the first request of a peer is tried: a smaller one behind it waits, but another peer's request may pass.

    **No starvation.** A ready request may be too large for the free bytes. While it is its peer's turn, at most
    ``PASSES`` grants pass it, and each peer ahead of it in the round gets at most one more. From then on nothing is
    granted before it. The ring drains until the request fits, because a lease is small against the ring and live leases
    end.

    **Exception.** Some leases may stay for long: quarantined ones, those of a suspended peer, and those for data not
    yet computed. If these alone leave no gap that is large enough, waiting would only stop all peers. Then the others
    continue. A frozen peer delays the others until it is suspended, and no longer.

    **Limits** count bytes as requested: an eighth of the ring's capacity for a single lease, a quarter for all leases
    for data not yet computed, and half of it for one peer while several are known.

    Args:
        ring: the allocator; no other object reserves from it.

    Attributes:
        lease_limit: bytes of the largest lease.
        leases: the live leases; read only.
    """

    def __init__(self, ring: StagingAllocator) -> None:
        self._ring = ring
        self._lookahead_limit = ring.capacity // 4
        self._peer_limit = ring.capacity // 2
        self.lease_limit = ring.capacity // 8
        self._lookahead_held = 0
        self._quarantined = 0
        self._peers: dict[P, _Peer[P, K]] = {}
        # Those of them that wait or hold leases: the others cost nothing.
        self._active: dict[P, _Peer[P, K]] = {}
        self._turns = 0
        self._waiting: dict[K, _Waiting[P, K]] = {}
        self.leases: dict[K, GrantedLease[P]] = {}

    @property
    def waiting(self) -> int:
        """How many requests have no lease yet."""
        return len(self._waiting)

    def quarantined_bytes(self, peer: P | None = None) -> int:
        """Bytes in quarantine: of one peer, or of all peers."""
        if peer is None:
            return self._quarantined
        known = self._peers.get(peer)
        return 0 if known is None else known.quarantined

    @property
    def active(self) -> Collection[P]:
        """The peers that wait for bytes or hold leases; read only."""
        return self._active.keys()

    @property
    def suspended(self) -> Sequence[P]:
        """Those of the active peers that are granted nothing for now."""
        return [peer for peer, known in self._active.items() if known.suspended]

    def connect(self, peer: P) -> None:
        """Count the peer among those that share the ring, also while it requests nothing."""
        self._peer(peer).connected = True

    def suspend(self, peer: P) -> None:
        """Grant the peer nothing for now; its requests stay in their places."""
        self._peer(peer).suspended = True

    def resume(self, peer: P) -> None:
        """Undo ``suspend``."""
        known = self._peers.get(peer)
        if known is None or not known.suspended:
            return
        self._peer(peer).suspended = False
        self._settle(peer)

    def forget(self, peer: P) -> None:
        """Drop all requests of the peer. Its leases stay live until each is released."""
        known = self._peer(peer)
        for key in [*known.ready, *known.ahead]:
            self.cancel(key)
        known.connected = known.suspended = False
        self._settle(peer)

    def request(self, peer: P, key: K, nbytes: int, *, lookahead: bool) -> Lease | None:
        """The lease for ``key``, at once if no request waits and it fits; None: it waits, see ``grants``.

        A repeated request returns the same live lease, or waits once. One that is no longer look-ahead is promoted.

        Raises:
            ConfigurationError: not a positive number of bytes.
            OversizeError: more than the largest lease.
            LocalProtocolError: ``key`` is in use by another peer or with another size.
        """
        if nbytes < 1:
            raise ConfigurationError(f"staging request {key!r} of {peer!r}: {nbytes} bytes, must be positive")
        if nbytes > self.lease_limit:
            raise OversizeError(f"staging request {key!r} of {peer!r}: the largest lease", nbytes, self.lease_limit)
        if key in self.leases or key in self._waiting:
            self._check_same(peer, key, nbytes)
            if not lookahead:
                self.promote(key)
            granted = self.leases.get(key)
            return None if granted is None else granted.lease
        alone = not self._waiting
        wanted = _Waiting(peer, key, nbytes, lookahead)
        known = self._active[peer] = self._peer(peer)
        known.line(lookahead)[key] = self._waiting[key] = wanted
        return self._try(wanted) if alone and self._may(wanted) else None

    def promote(self, key: K) -> None:
        """Look-ahead data became ready: it waits behind its peer's other ready data. Otherwise nothing happens."""
        granted, waiting = self.leases.get(key), self._waiting.get(key)
        if granted is not None and granted.lookahead:
            granted.lookahead = False
            self._lookahead_held -= granted.lease.nbytes
        if waiting is not None and waiting.lookahead:
            waiting.lookahead = False
            peer = self._peer(waiting.peer)
            peer.ready[key] = peer.ahead.pop(key)

    def cancel(self, key: K) -> None:
        """Stop waiting; a lease that was granted stays live."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            del self._peer(waiting.peer).line(waiting.lookahead)[key]
            self._settle(waiting.peer)

    def quarantine(self, key: K) -> None:
        """Put a lease in quarantine: it stays live until ``release``, and no request waits for it.

        Raises:
            LocalProtocolError: ``key`` has no lease.
        """
        if key not in self.leases:
            raise LocalProtocolError(f"staging request {key!r} has no lease to put in quarantine")
        granted = self.leases[key]
        if not granted.quarantined:
            granted.quarantined = True
            self._quarantined += granted.lease.nbytes
            self._peer(granted.peer).quarantined += granted.lease.nbytes

    def release(self, key: K) -> None:
        """Release the lease; a second release does nothing.

        Raises:
            LocalProtocolError: ``key`` still waits; call ``cancel`` instead.
        """
        if key in self._waiting:
            raise LocalProtocolError(f"staging request {key!r} has no lease to release, it still waits")
        granted = self.leases.pop(key, None)
        if granted is None:
            return
        self._ring.release(granted.lease)
        self._peer(granted.peer).held -= granted.lease.nbytes
        if granted.lookahead:
            self._lookahead_held -= granted.lease.nbytes
        if granted.quarantined:
            self._quarantined -= granted.lease.nbytes
            self._peer(granted.peer).quarantined -= granted.lease.nbytes
        self._settle(granted.peer)

    def granted(self, key: K) -> Lease | None:
        """The live lease, unless it is in quarantine; None: there is none."""
        granted = self.leases.get(key)
        return None if granted is None or granted.quarantined else granted.lease

    def grants(self) -> list[tuple[K, Lease]]:
        """Grant all requests that fit now, in order of grant. Call it after every event that may have freed bytes."""
        granted: list[tuple[K, Lease]] = []
        if not self._waiting:
            return granted
        while (one := self._next()) is not None:
            granted.append(one)
        return granted

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts do not add up or a limit is broken."""
        held, stuck, ahead = dict.fromkeys(self._peers, 0), dict.fromkeys(self._peers, 0), 0
        for granted in self.leases.values():
            assert granted.peer in held, "a lease without a known peer"
            nbytes = granted.lease.nbytes
            held[granted.peer] += nbytes
            if granted.quarantined:
                stuck[granted.peer] += nbytes
            if granted.lookahead:
                ahead += nbytes
        lines = 0
        for name, peer in self._peers.items():
            has, waits = held[name], stuck[name]
            assert peer.held == has, f"{name!r} holds {has} bytes, {peer.held} are counted"
            assert peer.quarantined == waits, f"{waits} bytes of {name!r} wait for evidence, {peer.quarantined} counted"
            assert not peer.idle(), f"{name!r} is kept for nothing"
            assert (name in self._active) == bool(has or peer.ready or peer.ahead), f"{name!r} is active, or is not"
            lines += len(peer.ready) + len(peer.ahead)
            for line in (peer.ready, peer.ahead):
                for key, waiting in line.items():
                    assert self._waiting.get(key) is waiting, f"{key!r} waits in one place only"
                    assert waiting.peer == name, f"{key!r} waits in the line of {name!r}"
                    assert peer.line(waiting.lookahead) is line, f"{key!r} waits in the wrong line"
        assert self._active.keys() <= self._peers.keys(), f"{list(self._active)} have nothing"
        assert lines == len(self._waiting), f"{lines} requests are in line, {len(self._waiting)} wait"
        assert not self._waiting.keys() & self.leases.keys(), "a key both waits and has a lease"
        assert self._quarantined == sum(stuck.values()), f"{self._quarantined} bytes are counted to wait for evidence"
        assert ahead == self._lookahead_held <= self._lookahead_limit, f"look-ahead holds {ahead} bytes"

    def _peer(self, peer: P) -> _Peer[P, K]:
        known = self._peers.get(peer)
        if known is None:
            self._turns += 1
            known = self._peers[peer] = _Peer(turn=self._turns)
        return known

    def _settle(self, peer: P) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        if not (known.held or known.ready or known.ahead):
            self._active.pop(peer, None)
        if known.idle():
            del self._peers[peer]

    def _check_same(self, peer: P, key: K, nbytes: int) -> None:
        granted = self.leases.get(key)
        if granted is None:
            before = (self._waiting[key].peer, self._waiting[key].nbytes)
        else:
            before = (granted.peer, granted.lease.nbytes)
        if before != (peer, nbytes):
            raise LocalProtocolError(
                f"staging request {key!r}: {nbytes} bytes of {peer!r}, but it is {before[1]} bytes of {before[0]!r}"
            )

    def _next(self) -> tuple[K, Lease] | None:
        passed: list[_Waiting[P, K]] = []
        for wanted in self._firsts(lookahead=False):
            lease = self._try(wanted)
            if lease is not None:
                for one in passed:
                    one.passed += 1
                return wanted.key, lease
            passed.append(wanted)
            if wanted.passed >= PASSES and self._could_fit(wanted.nbytes):
                return None
        if passed:
            return None
        for wanted in self._firsts(lookahead=True):
            lease = self._try(wanted)
            if lease is not None:
                return wanted.key, lease
        return None

    def _firsts(self, *, lookahead: bool) -> list[_Waiting[P, K]]:
        """The first request in each peer's line, in the order of turns, without those that are over a limit."""
        lines = [(peer.turn, line) for peer in self._active.values() if (line := peer.line(lookahead))]
        firsts = (next(iter(line.values())) for _, line in sorted(lines, key=itemgetter(0)))
        return [wanted for wanted in firsts if self._may(wanted)]

    def _may(self, wanted: _Waiting[P, K]) -> bool:
        peer = self._peers[wanted.peer]
        if peer.suspended:
            return False
        if len(self._peers) > 1 and peer.held + wanted.nbytes > self._peer_limit:
            return False
        return not wanted.lookahead or self._lookahead_held + wanted.nbytes <= self._lookahead_limit

    def _try(self, wanted: _Waiting[P, K]) -> Lease | None:
        lease = self._ring.reserve(wanted.nbytes)
        if lease is None:
            return None
        peer = self._peers[wanted.peer]
        self._turns += 1
        peer.turn = self._turns
        del self._waiting[wanted.key], peer.line(wanted.lookahead)[wanted.key]
        self.leases[wanted.key] = GrantedLease(wanted.peer, lease, wanted.lookahead)
        peer.held += lease.nbytes
        if wanted.lookahead:
            self._lookahead_held += lease.nbytes
        return lease

    def _could_fit(self, nbytes: int) -> bool:
        """Whether there is room once every lease has ended that is bound to end."""
        align, capacity = self._ring.alignment, self._ring.capacity
        stuck = sorted(
            (granted.lease.offset, -(-(granted.lease.offset + granted.lease.nbytes) // align) * align)
            for granted in self.leases.values()
            if granted.quarantined or granted.lookahead or self._peers[granted.peer].suspended
        )
        return any(right - left >= nbytes for (_, left), (right, _) in pairwise([(0, 0), *stuck, (capacity, capacity)]))
