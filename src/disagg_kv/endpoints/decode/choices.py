"""Which paths prefill ranks chose last, so that staging memory need not cut what all of them copy.

No prefill rank knows what another one chooses. While one of them may take a path through staging memory, the size of a
slot cuts the segments of all, and each segment costs both sides a frame. Once all have chosen to copy into mapped
pages, the next room binds them to that, and nothing cuts it. They still choose for each room, and say what: where one
of them would take another path meanwhile, all are free again in the room after.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ids import Epoch
from ...strategies import TransferPlanner, maps_pages


class PathChoices:
    """Runs on the endpoint's thread only.

    Args:
        paths: those that are known here.
    """

    def __init__(self, paths: Iterable[TransferPlanner]) -> None:
        self._mapping = frozenset(path.name for path in paths if maps_pages(path))
        self._mapped: dict[Epoch, bool] = {}

    def chose(self, epoch: Epoch, path: str) -> None:
        """A prefill rank has sent a room, for which it chose this path."""
        self._mapped[epoch] = path in self._mapping

    def failed(self, writers: Iterable[Epoch]) -> None:
        """A room has failed: perhaps one of these cannot do any more what it chose."""
        for epoch in writers:
            self.forget(epoch)

    def forget(self, epoch: Epoch) -> None:
        """A prefill rank is lost."""
        self._mapped.pop(epoch, None)

    def map(self, writers: Iterable[Epoch]) -> bool:
        """Whether all of these chose to copy into mapped pages; also those that sent nothing, as they have a path."""
        return all(self._mapped.get(epoch, False) for epoch in writers)
