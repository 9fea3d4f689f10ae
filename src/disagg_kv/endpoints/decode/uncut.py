"""Which rooms are uncut: no prefill rank sends any of their rows through staging memory, so that no slot cuts them.

Segments are the same for all prefill ranks of a room, and none of them knows what another one chooses. While one of
them may take a path through staging memory, the size of a slot cuts the segments of all, and each segment costs both
sides a frame. Decode knows them all, so it says in ``Expect`` whether a room is uncut:

* Kernels of all prefill ranks that send rows of it here have to queue copies. Others keep a thread for as long as a
  segment takes.
* Either decode allows only paths that copy into mapped pages, or each of these ranks took no staging memory for the
  last room of which it sent rows here, and could have copied into mapped pages. They then take any path that needs no
  staging memory. They still compare all paths, and say whether they would stage again.

After an uncut room that failed because it could not be sent, rooms of its ranks are cut for :data:`CUT_S`, where that
is a choice. What an engine gives up, a deadline or a lost peer say nothing of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...ids import Epoch, Generation
from ...strategies import TransferPlanner, maps_pages
from ..peers.handshake import RemoteEndpoint

CUT_S = 60.0
"""Seconds for which rooms are cut after an uncut one has failed: perhaps what failed was too large."""


class UncutRooms:
    """Runs on the thread that advances."""

    def __init__(self) -> None:
        self._unstaged: dict[Epoch, tuple[Generation, bool]] = {}
        self._cut_until: dict[Epoch, float] = {}

    def sent(self, epoch: Epoch, generation: Generation, unstaged: bool) -> None:
        """A prefill rank has sent rows of a room, for which it would have taken no staging memory, or some.

        What it repeats, or says late, of an earlier room than the last one is no news.
        """
        if epoch not in self._unstaged or self._unstaged[epoch][0] < generation:
            self._unstaged[epoch] = generation, unstaged

    def failed(self, writers: Iterable[Epoch], now: float) -> None:
        """An uncut room of these prefill ranks has failed because it could not be sent."""
        for epoch in writers:
            self._cut_until[epoch] = now + CUT_S

    def forget(self, epoch: Epoch) -> None:
        """A prefill rank is lost."""
        self._unstaged.pop(epoch, None)
        self._cut_until.pop(epoch, None)

    def allows(
        self, writers: Sequence[RemoteEndpoint], paths: Iterable[TransferPlanner], exposed: bool, now: float
    ) -> bool:
        """Whether a room is uncut.

        Args:
            writers: its prefill ranks, without those that send nothing of it here.
            paths: those that they may take.
            exposed: they may write into its pages.
            now: the time.
        """
        if not all(one.hello.queues for one in writers):
            return False
        return all(map(maps_pages, paths)) or (
            exposed
            and all(self._stages_nothing(one.epoch) and now >= self._cut_until.get(one.epoch, now) for one in writers)
        )

    def _stages_nothing(self, epoch: Epoch) -> bool:
        return epoch in self._unstaged and self._unstaged[epoch][1]
