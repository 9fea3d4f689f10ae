"""The ring: a next-fit allocator that circles through one buffer and skips live leases."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

from ..errors import ConfigurationError, LocalProtocolError, OversizeError
from ..ids import VirtualOffset
from .base import ALIGNMENT, Lease


class RingStagingAllocator:
    """Allocates one buffer in a circle; satisfies :class:`StagingAllocator`.

    The head is a virtual offset that only grows, and every lease begins at or after it, so no two leases share a start.
    A lease occupies its bytes rounded up to the alignment, so the head stays aligned. A live lease is only a hole,
    however old: ``reserve`` skips it, and releases need no order.

    Args:
        capacity: bytes of the buffer, a positive multiple of ``alignment``.
        alignment: bytes to which every lease's start is aligned.

    Attributes:
        capacity: bytes of the whole buffer.
        alignment: bytes to which every lease's start is aligned.
        live_bytes: bytes that live leases occupy, rounding to the alignment included.

    Raises:
        ConfigurationError: ``capacity`` is not a positive multiple of ``alignment``.
    """

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        if alignment < 1 or capacity < 1 or capacity % alignment:
            raise ConfigurationError(
                f"a ring of {capacity} bytes: the capacity must be a positive multiple of the alignment, {alignment}"
            )
        self.capacity = capacity
        self.alignment = alignment
        self._head = 0
        # By place in the buffer; ``_places``: its keys, ascending.
        self._live: dict[int, Lease] = {}
        self._places: list[int] = []
        self.live_bytes = 0

    def reserve(self, nbytes: int) -> Lease | None:
        """The next ``nbytes`` free bytes at or after the head, in one round at most; None: wait for a release.

        Raises:
            OversizeError: more than the whole ring.
            ConfigurationError: not a positive number.
        """
        if nbytes < 1:
            raise ConfigurationError(f"a lease of {nbytes} bytes: must be positive")
        if nbytes > self.capacity:
            raise OversizeError("staging ring", nbytes, self.capacity)
        size = self._occupied(nbytes)
        start = self._head
        once_round = start + self.capacity
        while start < once_round:
            place = start % self.capacity
            if place + size > self.capacity:
                start += self.capacity - place
            elif (free_from := self._last_end_before(place + size)) > place:
                start += free_from - place
            else:
                return self._grant(start, nbytes, size)
        return None

    def release(self, lease: Lease) -> None:
        """Release the bytes, in any order; a second release does nothing.

        A live lease is released only by the very object that ``reserve`` returned. An equal object may belong to
        another ring, whose bytes are not ours to free. The ring does not remember starts that have ended. So a lease of
        another ring that equals an old one of ours is ignored.

        Raises:
            LocalProtocolError: the lease belongs to another ring.
        """
        live = self._live.get(lease.offset) if lease.capacity == self.capacity else None
        if live is lease:
            del self._live[lease.offset]
            del self._places[bisect_left(self._places, lease.offset)]
            self.live_bytes -= self._occupied(lease.nbytes)
            return
        foreign = lease.capacity != self.capacity or lease.start % self.alignment or lease.end > self._head
        if foreign or (live is not None and live.start == lease.start):
            raise LocalProtocolError(
                f"{lease} is not from this ring of {self.capacity} bytes with its head at {self._head}"
            )

    def check_integrity(self) -> None:
        """Raise AssertionError if live leases overlap, straddle the end, or the accounts do not add up."""
        assert self._places == sorted(self._live), "the places do not match the live leases"
        leases = [self._live[place] for place in self._places]
        for place, lease in zip(self._places, leases, strict=True):
            assert lease.offset == place, f"{lease} is kept at {place}"
            assert lease.start % self.alignment == 0, f"{lease} is not aligned"
            assert place + self._occupied(lease.nbytes) <= self.capacity, f"{lease} straddles the end"
            assert lease.end <= self._head, f"{lease} ends after the head, {self._head}"
        for left, right in pairwise(leases):
            assert left.offset + self._occupied(left.nbytes) <= right.offset, f"{left} overlaps {right}"
        occupied = sum(self._occupied(lease.nbytes) for lease in leases)
        assert occupied == self.live_bytes, f"{occupied} bytes are live, {self.live_bytes} are counted"

    def _occupied(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def _last_end_before(self, place: int) -> int:
        """The end of the last live lease that begins before ``place``; 0 if there is none."""
        index = bisect_left(self._places, place)
        if not index:
            return 0
        lease = self._live[self._places[index - 1]]
        return lease.offset + self._occupied(lease.nbytes)

    def _grant(self, start: int, nbytes: int, size: int) -> Lease:
        lease = Lease(VirtualOffset(start), nbytes, self.capacity)
        self._live[lease.offset] = lease
        insort(self._places, lease.offset)
        self.live_bytes += size
        self._head = start + size
        return lease
