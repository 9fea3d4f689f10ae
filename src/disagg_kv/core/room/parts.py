"""Data that are too long for one frame: they are sent in parts, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

AHEAD = 8
"""Parts that may be in flight at a time."""


class Parts:
    """The parts of some data, by their offsets.

    Args:
        part: bytes of a part; data that are not longer count as none.
    """

    def __init__(self, part: int) -> None:
        self.data = b""
        self._part = part
        self._sent = 0
        self._taken = 0

    def put(self, data: bytes | None) -> None:
        """Set the data."""
        self.data = data if data is not None and len(data) > self._part else b""

    @property
    def complete(self) -> bool:
        """Whether the peer has taken all of it."""
        return self._taken >= len(self.data)

    def due(self) -> Iterator[tuple[int, bytes]]:
        """The next parts that may be sent, each once."""
        size = self._part
        for offset in range(self._sent, min(len(self.data), self._taken + AHEAD * size), size):
            data = self.data[offset : offset + size]
            self._sent = offset + len(data)
            yield offset, data

    def taken(self, upto: int) -> range:
        """Note that the peer has taken the bytes before ``upto``; returns the parts that this is new for."""
        if not self._taken < (end := self._end(upto)) <= upto <= len(self.data):
            return range(0)
        new = range(self._taken, end, self._part)
        self._taken = end
        self._sent = max(self._sent, end)
        return new

    def restart(self, upto: int) -> None:
        """The peer has only the bytes before ``upto``: what follows is due again."""
        self._taken = self._sent = min(self._end(upto), len(self.data))

    def _end(self, upto: int) -> int:
        return upto if upto == len(self.data) else upto // self._part * self._part
