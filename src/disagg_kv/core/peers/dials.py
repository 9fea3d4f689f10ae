"""Addresses where no endpoint has answered yet. Sans IO.

``Hello`` is repeated towards an address until an endpoint there answers, or the dial fails. A dial that is not due
costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from attrs import define

from ...errors import PeerLostError, lasting
from ..base import Options
from ..timers import Timers
from ..wire.frames import Hello
from .peer_effects import PeerEffect, SendTo, Unreachable

ROUNDING_S = 1e-6
"""Seconds by which a tick checks early: a sum of times is rounded differently from a difference."""

RECHECK_S = 0.01
"""Pause before a peer or dial is examined again whose time is over: frames that came before may still wait."""

MAX_ABSENT = 4096
"""Addresses without an endpoint that are remembered."""


@define
class _Dial:
    """One address.

    Args:
        since: when the dial began.
        wanted_at: when it failed, or was asked for after that.
        next_at, pause: when ``Hello`` is repeated, and the seconds since the last one.
        patience_s: seconds after which it fails.
        closed: when the connection broke, or could not be made; None: it is not broken.
        opened: there has been a connection.
        again: a peer was lost there.
        failed: why it failed; empty: it has not. It goes on for a while, so that an endpoint that starts is found.
    """

    since: float
    wanted_at: float
    next_at: float
    pause: float
    patience_s: float
    closed: float | None = None
    opened: bool = False
    again: bool = False
    failed: str = ""

    def grace_s(self, options: Options) -> float:
        """How long a connection may be broken: an endpoint may be starting, unless a peer was lost there."""
        return 0.0 if self.again else options.closed_s

    def due_at(self, options: Options) -> float:
        """When something is due for it."""
        if self.failed:
            return min(self.next_at, self.wanted_at + options.silence_s)
        ends = self.since + self.patience_s
        if self.closed is not None:
            ends = min(ends, self.closed + self.grace_s(options))
        return min(self.next_at, ends)


class Dials:
    """The addresses that are being dialled, and those where no endpoint was found lately.

    Args:
        options: times.
        hello: makes our ``Hello`` towards an incarnation that is not known.
    """

    def __init__(self, options: Options, hello: Callable[[], Hello]) -> None:
        self._options = options
        self._hello = hello
        self._dials: dict[str, _Dial] = {}
        self._timers: Timers[str] = Timers()
        self._absent: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, address: str) -> bool:
        return address in self._dials

    def begin(self, address: str, now: float, *, lost: bool) -> list[PeerEffect]:
        """Dial an address, or ask again for one that is dialled; ``lost``: a peer was lost there.

        Where a peer was lost, or an earlier dial failed, this dial fails after ``closed_s`` in place of ``silence_s``
        where that is shorter: an endpoint that has started meanwhile answers at once. It fails as soon as no connection
        can be made. A dial that has failed goes on for ``silence_s``, and as long after each further call, which fails
        at once.
        """
        dial, o = self._dials.get(address), self._options
        if dial is not None:
            dial.wanted_at = now
            if not dial.failed:
                return []
            still = f"{dial.failed}; still so {lasting(now - dial.since)} after the first attempt"
            return [Unreachable(address, PeerLostError(still, address=address))]
        again = lost or address in self._absent
        patience_s = min(o.closed_s, o.silence_s) if again else o.silence_s
        dial = self._dials[address] = _Dial(now, now, now + o.retry_s, o.retry_s, patience_s, again=again)
        self._schedule(address, dial)
        return [SendTo(address, self._hello())]

    def end(self, address: str) -> bool:
        """An endpoint has answered, or none that we can work with ever will; False: the address is not dialled."""
        self._timers.schedule(address, None)
        return self._dials.pop(address, None) is not None

    def found(self, address: str) -> None:
        """An endpoint is at the address."""
        self._absent.pop(address, None)

    def absent(self, address: str) -> None:
        """No endpoint is at the address."""
        self._absent[address] = None
        while len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)

    def on_closed(self, address: str, now: float) -> None:
        """The connection to an address broke, or could not be made."""
        dial = self._dials.get(address)
        if dial is not None and dial.closed is None:
            dial.closed = now
            self._schedule(address, dial)

    def on_opened(self, address: str) -> None:
        """The connection to an address is open."""
        dial = self._dials.get(address)
        if dial is not None:
            dial.closed, dial.opened = None, True

    def tick(self, now: float, seen: float) -> tuple[list[PeerEffect], list[str]]:
        """Repeat and fail what is due, and the addresses that are given up; ``seen``: what came until then is known."""
        out: list[PeerEffect] = []
        given_up: list[str] = []
        o = self._options
        for address in self._timers.due(now + ROUNDING_S):
            dial = self._dials[address]
            if not dial.failed and (reason := self._overdue(address, dial, seen, now)):
                dial.failed, dial.wanted_at = reason, now
                out.append(Unreachable(address, PeerLostError(reason, address=address)))
            elif dial.failed and now - dial.wanted_at >= o.silence_s:
                del self._dials[address]
                self.absent(address)
                given_up.append(address)
                continue
            elif now >= dial.next_at:
                dial.pause = min(2 * dial.pause, o.heartbeat_s if dial.failed else o.retry_most_s)
                dial.next_at = now + dial.pause
                out.append(SendTo(address, self._hello()))
            self._schedule(address, dial, now + RECHECK_S if seen < now else 0.0)
        return out, given_up

    def next_at(self) -> float | None:
        """When a tick is due; None: never."""
        return self._timers.next_at()

    def _schedule(self, address: str, dial: _Dial, least: float = 0.0) -> None:
        self._timers.schedule(address, max(least, dial.due_at(self._options)))

    def _overdue(self, address: str, dial: _Dial, seen: float, now: float) -> str:
        """Why a dial fails; empty: it does not yet."""
        if seen - dial.since >= dial.patience_s:
            return f"no answer from {address} within {dial.patience_s:g} s"
        if dial.closed is None or seen - dial.closed < dial.grace_s(self._options):
            return ""
        for_s = lasting(now - dial.closed)
        if dial.opened:
            return f"peer at {address}: its connection broke {for_s} ago, before it said who it is"
        return f"peer at {address}: no process listens there, for {for_s}"
