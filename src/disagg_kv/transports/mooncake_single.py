"""Writes of one range over tcp, begun and polled on the calling thread: no thread is woken for them.

The library's tcp begins a write without blocking, to a frozen peer as well, and returns its state without blocking.
While the library connects to a peer, it may block; so workers make all writes then. Its blocking call would do the same
and spin meanwhile on a core that the threads that move the bytes need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from attrs import define

from ..ids import Peer, Ticket
from .base import Settled, WriteEnded
from .mooncake_flight import Flight, One, Shared
from .mooncake_workers import WorkerPool

DEPTH = 2
"""Writes to one peer that the library has at the same time: it need not wait until the end of one is seen."""

_DONE, _FAILED = 1, -1
"""States that the library returns for a write that has ended."""


@define(eq=False)
class _Posted:
    """A write that the library has; ``given_up``: its ticket has ended."""

    flight: Flight
    call: One
    batch: int
    began: float
    given_up: bool = False


class Singles:
    """All calls come from the transport's caller; see :class:`Flight` for what ends where.

    Args:
        shared: with the transport.
        workers: what may block is left to them.
        clock: seconds that never go back.
    """

    def __init__(self, shared: Shared, workers: WorkerPool, clock: Callable[[], float]) -> None:
        self._shared = shared
        self._workers = workers
        self._clock = clock
        self._posted: list[_Posted] = []
        self._waiting: dict[Peer, deque[Flight]] = {}

    def takes(self, flight: Flight) -> bool:
        """Whether this flight is one of those; after a failure a peer has to show first that it is there."""
        calls, remote, shared = flight.calls, flight.remote, self._shared
        if shared.greeting or len(calls) != 1 or remote.suspect or remote.gone or remote.lost:
            return False
        return isinstance(calls[0], One) and calls[0].device is None

    def put(self, flight: Flight) -> None:
        """Begin it, or let it wait for those before it."""
        self._waiting.setdefault(flight.remote.peer, deque()).append(flight)
        self._begin(flight.remote.peer)

    def look(self) -> None:
        """Note what has ended, and begin what has waited for that."""
        if not self._posted:
            return
        engine = self._shared.engine
        assert engine is not None
        now = self._clock()
        posted, self._posted = self._posted, []
        for one in posted:
            self._note(one, engine.status(one.batch), now)
        for peer in tuple(self._waiting):
            self._begin(peer)

    def has(self, ticket: Ticket) -> bool:
        """Whether the library has not reported the end of this write yet, even if the ticket was given up."""
        return any(one.flight.ticket == ticket for one in self._posted)

    def flying(self) -> bool:
        """Whether some have not ended."""
        return bool(self._waiting) or not all(one.given_up for one in self._posted)

    def _begin(self, peer: Peer) -> None:
        waiting = self._waiting[peer]
        engine = self._shared.engine
        assert engine is not None
        while waiting and sum(p.flight.remote.peer == peer and not p.given_up for p in self._posted) < DEPTH:
            flight = waiting.popleft()
            if not self.takes(flight):
                self._workers.put(peer, flight.step)
                continue
            call = flight.calls.popleft()
            assert isinstance(call, One)
            flight.posting = True
            batch = engine.begin(flight.remote.address.session, call.source, call.target, call.nbytes)
            one = _Posted(flight, call, batch, self._clock())
            self._note(one, engine.status(batch) if batch else _FAILED, one.began)
        if not waiting:
            del self._waiting[peer]

    def _note(self, one: _Posted, status: int, now: float) -> None:
        flight, elapsed_s = one.flight, now - one.began
        if status == _DONE:
            flight.remote.suspect = False
            end = Settled(flight.ticket) if one.given_up else WriteEnded(flight.ticket)
            self._shared.results.append((flight, end))
        elif status == _FAILED:
            flight.remote.suspect = True
            if not one.given_up:
                # To find out whether the peer is still there may take seconds.
                self._workers.put(flight.remote.peer, partial(flight.failed, one.call, status, elapsed_s))
        else:
            self._posted.append(one)
            if not one.given_up and elapsed_s >= self._shared.timeout_s:
                one.given_up = True
                flight.failed(one.call, status, elapsed_s)
