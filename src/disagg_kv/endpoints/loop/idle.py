"""How an endpoint's thread waits between two steps.

Theory of operation. After each step :meth:`IdlePolicy.rest` says how the endpoint waits:

* It blocks until a message comes, where nothing is in flight that only polling shows to be done.
* It polls, with a pause after each poll, while copies or events are in flight. On wires of 50 GB/s and more all pauses
  are equal. On slower wires a write may take seconds: each pause is a share of the time for which the endpoint has
  polled already, up to a bound. So an end is noticed late by that share of the write's time, and few polls are in vain.

A forward pass of the engine needs the interpreter. During one, the endpoint blocks for up to ``in_pass_s`` instead of
pausing. A message ends that wait.

What the choice is made from is passed in, so this module reads no clock, no channel and no room.
"""

from __future__ import annotations

from math import inf

from attrs import frozen

from ...transports import Capabilities

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


@frozen
class Rest:
    """What an endpoint does between two steps.

    Args:
        block_s: wait for a message for at most this long; 0: only look whether one is there.
        pause_s: then pause; 0: go on at once.
    """

    block_s: float
    pause_s: float

    @property
    def seconds(self) -> float:
        """How long that takes at most."""
        return self.pause_s or self.block_s


class IdlePolicy:
    """Chooses how to wait; one thread at a time.

    Args:
        caps: of the transport: how fast its wire is.
    """

    def __init__(self, caps: Capabilities) -> None:
        self._longest = SHORTEST_PAUSE_S if caps.bytes_per_s >= FAST_BYTES_PER_S else LONGEST_PAUSE_S
        self._polls_since = inf

    def rest(self, now: float, timeout_s: float, *, busy: bool, in_pass_s: float) -> Rest:
        """How to wait after a step, at the time ``now``.

        * ``timeout_s``: the longest that the caller wants to wait.
        * ``busy``: something is in flight that only polling shows to be done.
        * ``in_pass_s``: during a forward pass, the seconds for which the engine needs no poll; else 0.
        """
        if not busy:
            self._polls_since = inf
            return Rest(timeout_s, 0.0)
        if block_s := min(timeout_s, in_pass_s):
            return Rest(block_s, 0.0)
        self._polls_since = min(self._polls_since, now)
        return Rest(0.0, min(max(SHORTEST_PAUSE_S, PAUSE_SHARE * (now - self._polls_since)), self._longest))
