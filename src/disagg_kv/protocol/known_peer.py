"""What the table of peers knows of one life."""

from __future__ import annotations

from math import inf

from attrs import define

from ..errors import About, DisaggKVError
from .frames import Hello


@define(eq=False)
class KnownPeer:
    """One life of a peer. ``lost`` is True, too, once the table has forgotten the life.

    Args:
        hello: its first ``Hello``; ``last_frame_at`` is the time of its last frame.
        proved: it has named our epoch.
        used_since: since when it is in use; None: it is not.
        beaten: when it last got a heartbeat, or a ``Hello`` in place of one.
        closed: when the connection to its address broke; None: it is not broken.
        greeted: when it last sent ``Hello`` although it knew us.
        greet_until: it was lost, and gets ``Hello`` in place of heartbeats until this time.
        shut: a transport does not connect the two sides. Until this time frames of the peer are answered with
            ``Refused`` and do not revive it.
        shut_for: the reason of ``shut``.
        lost: it is silent, was reported lost, or is not in the table any more.
        lost_at: when it was lost.
        ended: its process has ended: observed, or confirmed by an operator.
    """

    hello: Hello
    last_frame_at: float
    proved: bool
    used_since: float | None = None
    beaten: float = -inf
    closed: float | None = None
    greeted: float = -inf
    greet_until: float = -inf
    shut: float = -inf
    shut_for: DisaggKVError | None = None
    lost: bool = False
    lost_at: float = -inf
    ended: bool = False

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
