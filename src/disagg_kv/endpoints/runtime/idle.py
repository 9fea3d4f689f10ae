"""How an endpoint's thread waits between two steps.

Theory of operation. A sleeping thread is woken late: by tens of microseconds where a channel's own threads pass a
message on, by more where a hypervisor has halted the core. On a slow wire that is nothing. On a fast one it is as long
as some MiB take to cross. A thread that never sleeps takes the interpreter, and a core, from the engine. So an endpoint
is in one of two states, and after each step :meth:`IdlePolicy.rest` says in which:

* Asleep: it blocks until a message comes. Nothing is in flight that only polling shows to be done, and nothing
  happened lately.
* Awake: it polls, with a pause after each poll, while copies or events are in flight. On wires of 50 GB/s and more it
  also polls for ``Options.linger_s`` after an event, while rooms are open and no forward pass runs. Each pause is twice
  as long as the one before, up to a bound.

A forward pass of the engine needs the interpreter. During one, the endpoint blocks for up to ``in_pass_s`` instead of
pausing. After a command or a frame it first makes :data:`SOON` short polls.

What the choice is made from is passed in, so this module reads no clock, no channel and no room.
"""

from __future__ import annotations

from attrs import frozen

from ...protocol import Options
from ...transports import Capabilities

IDLE_S = 0.2
"""The longest that an endpoint sleeps: exits of peers are noticed this fast."""

TARGET_S = 0.001
"""The same while rooms are open, with a transport whose writes move only while their target polls."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 500e-6
"""Seconds between two polls of copies and events that only polling shows to be done."""

NAP_S = 10e-6
"""The first pause if the channel sleeps with microsecond precision, the wire is fast, and the transport waits for
events by itself. A poll takes several times as long."""

SOON, SOON_S = 2, 300e-6
"""Number of quick polls, and seconds between them, after any activity during a forward pass."""

NUDGE_S = 150e-6
"""Seconds between keep-alive frames while bytes are on a fast wire.

A hypervisor wakes a core late once it has halted it, and ZeroMQ passes frames through two threads of its own. A channel
without threads needs fewer: the peer's endpoint thread polls for ``linger_s`` after each frame."""

FAST_BYTES_PER_S = 5e10
"""On a wire of this speed the back-off stays at the shortest pause: in the longest one it moves tens of MiB."""


@frozen
class Rest:
    """What an endpoint does between two steps.

    Args:
        awake: something may happen that wakes no thread.
        block_s: wait for a message for at most this long; 0: only look whether one is there.
        pause_s: then pause; 0: go on at once.
        quick: it is one of the quick polls of a forward pass.
    """

    awake: bool
    block_s: float
    pause_s: float
    quick: bool


class IdlePolicy:
    """Chooses how to wait; runs on the endpoint's thread only.

    Args:
        caps: of the transport: how fast its wire is, and whether its writes wait for events by themselves.
        options: the busy-poll window.
        naps: whether the channel can wait exactly, for microseconds.
        now: the time.
    """

    def __init__(self, caps: Capabilities, options: Options, *, naps: bool, now: float) -> None:
        fast = caps.bytes_per_s >= FAST_BYTES_PER_S
        self.linger_s = options.linger_s if fast else 0.0
        self.nudge_s = self.linger_s / 2 if naps else NUDGE_S
        self._shortest = NAP_S if fast and caps.waits_events and naps else SHORTEST_PAUSE_S
        self._longest = self._shortest if fast else LONGEST_PAUSE_S
        self._pause = self._shortest
        self._quick = 0
        self._awake_until = now

    def on_message(self, now: float) -> None:
        """A message has come."""
        self._awake_until = now + self.linger_s
        self._quick = SOON

    def hurry(self) -> None:
        """What has come may have ended what was waited for: the next pause is the shortest."""
        self._pause = self._shortest

    def rest(
        self, now: float, timeout_s: float, *, busy: bool, commanded: bool, more: bool, rooms: bool, in_pass_s: float
    ) -> Rest:
        """How to wait after a step, at the time ``now``.

        * ``timeout_s``: the longest that the caller wants to wait.
        * ``busy``: something is in flight that only polling shows to be done.
        * ``commanded``: the engine has given a command.
        * ``more``: there is work that did not fit into the step.
        * ``rooms``: there are open rooms.
        * ``in_pass_s``: during a forward pass, the seconds for which the engine needs no poll; else 0.
        """
        if commanded or busy:
            self._awake_until = now + self.linger_s
        if commanded:
            self._quick = SOON
        lingers = timeout_s > 0 and now < self._awake_until and rooms and not in_pass_s
        awake = busy or lingers
        block_s = min(timeout_s, in_pass_s) if awake else timeout_s
        quick = awake and block_s > 0 and self._quick > 0
        if more:
            return Rest(awake, 0.0, 0.0, quick)
        if quick:
            return Rest(awake, 0.0, SOON_S, quick)
        return Rest(awake, block_s, self._pause if awake and not block_s else 0.0, quick)

    def rested(self, rest: Rest) -> None:
        """No message came meanwhile: the next pause is longer."""
        if not rest.awake:
            self._pause = self._shortest
        elif rest.quick:
            self._quick -= 1
        elif rest.pause_s:
            self._pause = min(2 * self._pause, self._longest)
