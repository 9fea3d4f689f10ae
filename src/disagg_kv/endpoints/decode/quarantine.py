"""How much of the ring may wait for evidence."""

from __future__ import annotations

from collections.abc import Sequence

from ...core import RoomKey
from ...errors import QuarantineFullError
from ...ids import Epoch
from ...planning import Segment
from ...staging import GrantQueue
from ..peers.handshake import RemoteEndpoint

PEER_QUARANTINE = 0.25
ALL_QUARANTINE = 0.5
"""Parts of the ring that may wait for evidence before new rooms are refused: for one peer, and in all."""


def check_quarantine(
    queue: GrantQueue[Epoch, tuple[RoomKey, Segment]], ring_bytes: int, remotes: Sequence[RemoteEndpoint]
) -> None:
    """Raise a :class:`QuarantineFullError` if too much waits for evidence about one of these prefill ranks."""
    for remote in remotes:
        held = queue.quarantined_bytes(remote.epoch)
        if held > PEER_QUARANTINE * ring_bytes:
            full = f"{remote.name}: {held} of {ring_bytes} ring bytes wait for evidence"
            raise QuarantineFullError(full, **remote.hello.who)
