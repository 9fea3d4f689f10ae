"""Where the ranks of instances are: asked of the rendezvous on a helper thread, and remembered.

The thread that advances asks with :meth:`Directory.ask` and takes results with :meth:`Directory.answers`. Whatever a
rendezvous does (it blocks, raises, or returns what cannot be) becomes an :class:`LookupResult`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from attrs import define, frozen

from ...core import MAX_RANKS, Options
from ...core.room.machine import ours
from ...errors import CapacityError, DisaggKVError, PeerLostError, RemoteProtocolError, lasting, text_of, without_frames
from ...ids import Rank
from ...rendezvous import Rendezvous, Source, SupportsWithdraw
from .background import Background

log = logging.getLogger("disagg_kv")

LOOKUP_S = 0.05
"""Seconds between two look-ups of an instance that is not there yet."""

LOOKUP_FAILED_S = 0.5
"""The same where the rendezvous cannot be asked."""

WITHDRAW_S = 1.0
"""How long an endpoint that closes waits for the rendezvous to take its address back."""

MOST_UNDER_WAY = 1024
"""Look-ups that run at a time: each has a thread."""

REMEMBERED = 16_384
"""Instances whose addresses are remembered."""

DOUBT_S = 1.0
"""Seconds between two look-ups of an instance whose ranks are connected, but whose rooms fail: it may have moved."""

REFRESH_S = 120.0
"""Seconds between two look-ups that an endpoint makes without need: of instances whose ranks are connected, and whose
rooms succeed. They may move, too. The pause is of all instances together, each in its turn, so the load of a store does
not grow with the number of instances that an endpoint uses."""

UNANSWERED = 4
"""Look-ups of one instance that run at a time. Where none returns, another one begins after pauses that double. So they
leave the others their threads, and a rendezvous that has come back is noticed."""


@frozen
class LookupResult:
    """What the rendezvous answered about an instance.

    Args:
        source: which instance.
        at: when the look-up began.
        addresses: of all its ranks, in order; None: not all are known yet, or ``error`` says why it is not known.
        error: the rendezvous could not be asked, or what it holds cannot be.
    """

    source: Source
    at: float
    addresses: tuple[str, ...] | None
    error: DisaggKVError | None = None


@define(eq=False)
class _Known:
    """What is remembered of an instance.

    Args:
        at: when the look-up began that gave the addresses.
        addresses: of all its ranks.
        tried: when the last look-up began.
        doubted_at: when a room failed last.
    """

    at: float
    addresses: tuple[str, ...]
    tried: float
    doubted_at: float = -inf


@frozen(eq=False)
class _Ask:
    """A look-up, and when it began."""

    source: Source
    at: float


class Directory:
    """Look-ups of one endpoint. Of those of one instance only the last one is awaited.

    Args:
        rendezvous: what is asked.
        background: where it is asked.
        wake: called on a helper thread when there is an answer.
        clock: time, in seconds.
        options: a look-up that has not returned after ``closed_s`` has failed; at most ``peers`` run at a time,
            and at most MOST_UNDER_WAY.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        background: Background,
        wake: Callable[[], None],
        clock: Callable[[], float],
        options: Options,
    ) -> None:
        self._rendezvous = rendezvous
        self._background = background
        self._wake = wake
        self._clock = clock
        self._options = options
        self._asked: dict[Source, _Ask] = {}
        self._under_way: Counter[Source] = Counter()
        self._begun: dict[Source, float] = {}
        self._returned: deque[tuple[_Ask, LookupResult]] = deque()
        self._known: OrderedDict[Source, _Known] = OrderedDict()

    def known(self, source: Source) -> tuple[str, ...] | None:
        """The addresses that were last answered; None: none were."""
        found = self._known.get(source)
        return None if found is None else found.addresses

    def doubt(self, source: Source) -> None:
        """A room of an instance has failed: perhaps its ranks are elsewhere."""
        found = self._known.get(source)
        if found is not None:
            found.doubted_at = self._clock()

    def stale(self, source: Source, *, lively: bool) -> bool:
        """Whether to ask again for an instance whose ranks are connected; ``lively``: all of them answer."""
        found, now = self._known[source], self._clock()
        doubted = found.doubted_at >= found.at or not lively
        return now - found.tried >= (DOUBT_S if doubted else REFRESH_S * len(self._known))

    def ask(self, source: Source) -> None:
        """Look an instance up; the answer comes out of :meth:`answers`."""
        if source in self._asked:
            return
        ask = self._asked[source] = _Ask(source, self._clock())
        if (found := self._known.get(source)) is not None:
            found.tried = ask.at
        many = (self._under_way[source], self._under_way.total())
        self._under_way[source] += 1
        try:
            pause_s = self._options.closed_s * 2.0 ** min(many[0] - UNANSWERED + 1, 32)
            early = many[0] >= UNANSWERED and ask.at - self._begun[source] < pause_s
            if early or many[1] >= min(self._options.peers, MOST_UNDER_WAY):
                what = f"{many[0]} of its look-ups and {many[1]} in all have not returned"
                raise CapacityError(f"instance {source.instance!r}: {what}, and no more may be under way")
            self._background.start(partial(self._look_up, ask))
            self._begun[source] = ask.at
        except Exception as exc:
            error = ours(exc, f"instance {source.instance!r} could not be looked up")
            self._returned.append((ask, LookupResult(source, ask.at, None, error)))

    def _look_up(self, ask: _Ask) -> None:
        """On a helper thread."""
        error = PeerLostError(f"instance {ask.source.instance!r}: the look-up ended without an answer")
        answer = LookupResult(ask.source, ask.at, None, error)
        try:
            answer = look_up(self._rendezvous, ask.source, ask.at)
        finally:
            self._returned.append((ask, answer))
            self._wake()

    def answers(self) -> Sequence[LookupResult]:
        """The answers that have come since the last call."""
        if not self._asked and not self._returned:
            return ()
        out: list[LookupResult] = []
        while self._returned:
            ask, answer = self._returned.popleft()
            self._under_way -= Counter({ask.source: 1})
            if not self._under_way[ask.source]:
                self._begun.pop(ask.source, None)
            if self._counts(ask, answer):
                out.append(answer)
        now = self._clock()
        while self._asked and now - (ask := next(iter(self._asked.values()))).at >= self._options.closed_s:
            del self._asked[ask.source]
            error = PeerLostError(f"instance {ask.source.instance!r}: no answer for {lasting(now - ask.at)}")
            out.append(LookupResult(ask.source, ask.at, None, error))
        return out

    def _counts(self, ask: _Ask, answer: LookupResult) -> bool:
        """Remember an answer; False: it came late, and is no address or older than what is known."""
        late = self._asked.get(ask.source) is not ask
        if not late:
            del self._asked[ask.source]
        if answer.addresses is None:
            return not late
        found = self._known.get(ask.source)
        if found is not None and ask.at < found.at:
            return False
        self._known[ask.source] = _Known(ask.at, answer.addresses, ask.at, -inf if found is None else found.doubted_at)
        self._known.move_to_end(ask.source)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return True

    def withdraw(self, instance: str, rank: Rank) -> None:
        """Take back what was published of a rank, where the rendezvous can; a store that does not answer is left."""
        rendezvous = self._rendezvous
        if not isinstance(rendezvous, SupportsWithdraw):
            return
        ended = threading.Event()

        def job() -> None:
            try:
                rendezvous.withdraw(instance, rank)
            except Exception as exc:
                left(exc)
            finally:
                ended.set()

        def left(exc: Exception) -> None:
            log.warning("instance %r: rank %d stays in the rendezvous: %s", instance, rank, text_of(exc))

        try:
            self._background.start(job)
        except Exception as exc:
            left(exc)
        else:
            ended.wait(WITHDRAW_S)

    def close(self, until: float) -> None:
        """Begin no look-up, and wait until ``until`` for those that run; their results change nothing any more."""
        self._background.close(max(0.0, until - self._clock()), lambda: None)


def look_up(rendezvous: Rendezvous, source: Source, at: float) -> LookupResult:
    """Ask at a time, and check what was answered; never raises."""
    try:
        found = rendezvous.lookup(source)
        if found is not None:
            _check(source, found)
    except DisaggKVError as exc:
        without_frames(exc)
        return LookupResult(source, at, None, exc)
    except Exception as exc:
        error = PeerLostError(f"instance {source.instance!r}: the rendezvous failed: {text_of(exc)}")
        return LookupResult(source, at, None, error)
    return LookupResult(source, at, None if found is None else tuple(found))


def _check(source: Source, found: Sequence[object]) -> None:
    """A rendezvous is open to others, and may be a user's class."""
    name = f"instance {source.instance!r}: the rendezvous holds"
    if isinstance(found, str) or not all(isinstance(address, str) and address for address in found):
        raise RemoteProtocolError(f"{name} {str(found)[:200]!r}, which is no list of addresses")
    if not 1 <= len(found) <= MAX_RANKS:
        raise RemoteProtocolError(f"{name} {len(found)} addresses; 1 to {MAX_RANKS} are allowed")
