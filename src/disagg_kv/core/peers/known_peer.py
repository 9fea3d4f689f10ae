"""What the table of peers knows of one incarnation of a peer."""

from __future__ import annotations

from math import inf

from attrs import define

from ...errors import About, DisaggKVError
from ...ids import Epoch
from ..base import Options
from ..wire.frames import Hello
from .tables import Known

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
