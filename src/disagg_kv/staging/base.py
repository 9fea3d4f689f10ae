"""Leases: ranges of one staging buffer, handed out and taken back."""

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
        start: where it begins; unique for ever, a multiple of the alignment.
        nbytes: its length, as asked for.
        capacity: bytes of the ring it belongs to.
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

    @property
    def lap(self) -> int:
        """How often the ring had gone round when it was granted (the seeds' "round")."""
        return self.start // self.capacity


class StagingAllocator(Protocol):
    """Gives out and takes back ranges of one buffer. Pure bookkeeping: not thread-safe, touches no memory.

    A lease never straddles the end of the buffer. A quarantined lease is simply one that is not released yet; it is
    a hole that others go round.

    A decode endpoint needs an alignment that is a multiple of :data:`ALIGNMENT`. It asks for at most an eighth of the
    capacity, rounded down to the alignment; an allocator without live leases grants that.
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

    @property
    def tail(self) -> VirtualOffset:
        """Start of the oldest live lease, or the head where there is none; for telemetry."""
        ...

    def reserve(self, nbytes: int) -> Lease | None:
        """``nbytes`` consecutive free bytes; None: wait for a release. A lease's ``start`` is unique for ever.

        Raises:
            OversizeError: more than a lease can ever have.
            ConfigurationError: not a positive number.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Give the bytes back at once, in any order; a second release is harmless.

        Raises:
            LocalProtocolError: the lease is not from this ring.
        """
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if live leases overlap, straddle the end, or the accounts do not add up."""
        ...
