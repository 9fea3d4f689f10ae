"""How long an endpoint works in a step, how it waits between two, and what it says of times in which it did not run.

Waiting. After each step :meth:`IdlePolicy.rest` says how the endpoint waits:

* It blocks until a message comes, where nothing is in flight that only polling shows to be done.
* It polls, with a pause after each poll, while copies or events are in flight. On wires of 50 GB/s and more all pauses
  are equal. On slower wires a write may take seconds: each pause is a share of the time for which the endpoint has
  polled already, up to a bound. So an end is noticed late by that share of the write's time, and few polls are in vain.

A forward pass of the engine needs the interpreter. During one, the endpoint blocks for up to ``in_pass_s`` instead of
pausing. A message ends that wait.

What the choice is made from is passed in, so nothing here reads a channel or a room.

A pause is a time in which this endpoint's own thread did not run: its process stood still, or the thread was blocked.
Peers notice such a time as silence, and deadlines pass in it. An error that follows names it, since the fault is not at
the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from attrs import define

from ...errors import AbortedError, DeadlineError, DisaggKVError, InstanceClosedError, PeerLostError
from ...transports import Capabilities

TICK_S = 0.02
"""Seconds between two checks which peers are lively enough for grants that wait for bytes of the ring."""

BUDGET_S = 0.01
"""Seconds after which no further piece of work is begun in a step; a piece that has begun is finished."""

MOST = 256
"""Pieces of work of one kind in a step, however fast they are."""


@define
class Budget:
    """One kind of work in one step: commands of the engine, frames, gathers or scatters.

    Args:
        clock: time, in seconds.
        until: no further piece is begun then.
        left: pieces of work.
    """

    _clock: Callable[[], float]
    _until: float
    _left: int = MOST

    def take(self) -> bool:
        """Whether another piece of work may begin in this step; it counts as begun."""
        if self._left <= 0 or self._clock() >= self._until:
            self._left = 0
            return False
        self._left -= 1
        return True

    @property
    def spent(self) -> bool:
        """True once another piece of work was refused: there may be more to do."""
        return self._left <= 0


IDLE_S = 0.2
"""The longest that an endpoint sleeps: exits of peers are noticed this fast."""

TARGET_S = 0.001
"""The same while rooms are open, with a transport whose writes move only while their target polls."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 500e-6
"""Seconds between two polls of copies and events that only polling shows to be done."""

PAUSE_SHARE = 1 / 32
"""A pause on a slow wire, of the time since the thread began to poll."""

FAST_BYTES_PER_S = 5e10
"""On a wire of this speed every pause is the shortest: in the longest one it moves tens of MiB."""


class IdlePolicy:
    """Chooses how to wait; one thread at a time.

    Args:
        caps: of the transport: how fast its wire is.
    """

    def __init__(self, caps: Capabilities) -> None:
        self._longest = SHORTEST_PAUSE_S if caps.bytes_per_s >= FAST_BYTES_PER_S else LONGEST_PAUSE_S
        self._polls_since = inf

    def rest(self, now: float, timeout_s: float, *, busy: bool, in_pass_s: float) -> float:
        """Seconds to wait for a message after a step, at the time ``now``.

        * ``timeout_s``: the longest that the caller wants to wait.
        * ``busy``: something is in flight that only polling shows to be done.
        * ``in_pass_s``: during a forward pass, the seconds for which the engine needs no poll; else 0.
        """
        if not busy:
            self._polls_since = inf
            return timeout_s
        if block_s := min(timeout_s, in_pass_s):
            return block_s
        self._polls_since = min(self._polls_since, now)
        return min(max(SHORTEST_PAUSE_S, PAUSE_SHARE * (now - self._polls_since)), self._longest)


SHARE = 0.1
"""The least part of a room's time that a pause takes if it explains that the room's deadline has passed."""


class Pauses:
    """The last such time.

    Args:
        least_s: what is shorter is none.
        blamed_s: seconds after it in which it explains errors.
        ended: whether the process of an incarnation is known to have ended. No pause explains that.
    """

    def __init__(self, least_s: float, blamed_s: float, ended: Callable[[bytes], bool]) -> None:
        self.least_s = least_s
        self._blamed_s = blamed_s
        self._ended = ended
        self._last = self._until = -inf
        self._seconds = 0.0

    def over(self, before: float, due: float | None, now: float) -> str:
        """The endpoint's thread runs again. Returns a line for the log; empty: it ran in time.

        Args:
            before: when it ran last.
            due: when it would have had something to do; None: never.
            now: the time.
        """
        if due is None or now - max(before, due) < self.least_s:
            return ""
        self._last, self._until, self._seconds = before, now, now - before
        return self._words()

    def explain(self, error: DisaggKVError, opened: float, now: float) -> DisaggKVError:
        """The error of a room that was opened at a time; it begins with the pause if that may be the reason."""
        if opened > self._until or now - self._until > self._blamed_s:
            return error
        match error:
            case AbortedError():
                blamed = error.epoch is not None
            case PeerLostError():
                proved = error.epoch is not None and self._ended(error.epoch)
                blamed = not proved and not isinstance(error, InstanceClosedError)
            case DeadlineError():
                blamed = self._seconds >= SHARE * (now - opened)
            case _:
                blamed = False
        return error.about(self._words()) if blamed else error

    def _words(self) -> str:
        return f"this process did not run for {self._seconds:.1f} s"
