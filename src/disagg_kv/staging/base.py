"""Leases: ranges of one staging buffer."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from ..ids import VirtualOffset

ALIGNMENT = 256
"""Bytes to which lease starts and writers' parts are aligned."""


@frozen
class Lease:
    """A granted range ``[start, end)`` of the ring, in virtual bytes.

    Args:
        start: its first byte; never used by another lease, a multiple of the alignment.
        nbytes: its length, as requested.
        capacity: bytes of the ring.
    """

    start: VirtualOffset
    nbytes: int
    capacity: int

    @property
    def end(self) -> VirtualOffset:
        """One past its last byte."""
        return VirtualOffset(self.start + self.nbytes)

    @property
    def offset(self) -> int:
        """Its place in memory: bytes from the ring's beginning."""
        return self.start % self.capacity


class StagingAllocator(Protocol):
    """Allocates ranges of one buffer. Pure bookkeeping: not thread-safe, touches no memory.

    A lease never straddles the end of the buffer. A quarantined lease is one that is not released yet. It is a hole,
    and the allocator skips it.

    A decode endpoint needs an alignment that is a multiple of :data:`ALIGNMENT`. It requests at most an eighth of the
    capacity, rounded down to the alignment. An allocator without live leases must grant that.
    """

    @property
    def capacity(self) -> int:
        """Bytes of the whole buffer."""
        ...

    @property
    def alignment(self) -> int:
        """Bytes to which every lease's start is aligned."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that live leases occupy, rounding included."""
        ...

    def reserve(self, nbytes: int) -> Lease | None:
        """Reserve ``nbytes`` consecutive free bytes; None: wait for a release. No two leases ever share a ``start``.

        Raises:
            OversizeError: more than any lease can have.
            ConfigurationError: not a positive number.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Release the bytes, in any order; a second release does nothing.

        Raises:
            LocalProtocolError: the lease belongs to another ring.
        """
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if live leases overlap, straddle the end, or the accounts do not add up."""
        ...
