"""What an endpoint knows, for tests and for the simulator, which look at it between two steps.

``inspect()`` of an endpoint returns a value for its side: :class:`~..prefill.inspection.PrefillInspection` or
:class:`~..decode.inspection.DecodeInspection`. It is taken once and stays true: its collections are the endpoint's own,
and change with each step. Read them on the thread that steps the endpoint, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sized

from attrs import frozen

from ...core import PeerTable, Verdict
from ..peers.session import PeerSession, Sessions
from .ranks import InstanceRanks


@frozen(eq=False)
class LoopInspection:
    """What both sides have in common.

    Args:
        commands: of the engine, that no step has run yet.
        frames: and other events of the channel, that no step has handled yet.
        peers: the incarnations that are known, also those that are lost.
        sessions: the memory that waits for evidence about each peer.
        verdict: of the ranks of this instance on how each room ends.
        ranks: the other ranks of this instance, and whether another incarnation has the place of this one.
    """

    commands: Sized
    frames: Sized
    peers: PeerTable[PeerSession]
    sessions: Sessions
    verdict: Verdict
    ranks: InstanceRanks
