"""How an endpoint's thread waits between two steps.

Theory of operation. A sleeping thread is woken late: by tens of microseconds where a channel's own threads pass a
message on, by more where a hypervisor has halted the core. On a slow wire that is nothing. On a fast one it is as long
as some MiB take to cross. A thread that never sleeps takes the interpreter, and a core, from the engine. So an endpoint
is in one of two states, and after each step :meth:`IdlePolicy.rest` says in which:

* Asleep: it blocks until a message comes. Nothing is in flight that only polling shows to be done, and nothing
  happened lately.
* Awake: it polls, with a pause after each poll, while copies or events are in flight. On wires of 50 GB/s and more it
  also polls for ``Options.linger_s`` after an event, while rooms are open and no forward pass runs, and all pauses are
  equal. On slower wires a write may take seconds: each pause is a share of the time for which the endpoint has polled
  already, up to a bound. So an end is noticed late by that share of the write's time, and few polls are in vain.

A forward pass of the engine needs the interpreter. During one, the endpoint blocks for up to ``in_pass_s`` instead of
pausing. A message ends that wait.

What the choice is made from is passed in, so this module reads no clock, no channel and no room.
"""

from __future__ import annotations

from math import inf

from attrs import frozen

from ...core import Options
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
    """Chooses how to wait; runs on the endpoint's thread only.

    Args:
        caps: of the transport: how fast its wire is.
        options: the busy-poll window.
        now: the time.
    """

    def __init__(self, caps: Capabilities, options: Options, now: float) -> None:
        fast = caps.bytes_per_s >= FAST_BYTES_PER_S
        self.linger_s = options.linger_s if fast else 0.0
        self._longest = SHORTEST_PAUSE_S if fast else LONGEST_PAUSE_S
        self._polls_since = inf
        self._awake_until = now

    def on_message(self, now: float) -> None:
        """A message has come."""
        self._awake_until = now + self.linger_s

    def rest(self, now: float, timeout_s: float, *, busy: bool, commanded: bool, rooms: bool, in_pass_s: float) -> Rest:
        """How to wait after a step, at the time ``now``.

        * ``timeout_s``: the longest that the caller wants to wait.
        * ``busy``: something is in flight that only polling shows to be done.
        * ``commanded``: the engine has given a command.
        * ``rooms``: there are open rooms.
        * ``in_pass_s``: during a forward pass, the seconds for which the engine needs no poll; else 0.
        """
        if commanded or busy:
            self._awake_until = now + self.linger_s
        lingers = timeout_s > 0 and now < self._awake_until and rooms and not in_pass_s
        if not busy and not lingers:
            self._polls_since = inf
            return Rest(timeout_s, 0.0)
        if block_s := min(timeout_s, in_pass_s):
            return Rest(block_s, 0.0)
        self._polls_since = min(self._polls_since, now)
        return Rest(0.0, min(max(SHORTEST_PAUSE_S, PAUSE_SHARE * (now - self._polls_since)), self._longest))
