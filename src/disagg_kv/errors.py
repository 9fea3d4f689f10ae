"""Every error that this library raises or reports.

::

    DisaggKVError
    ├── ConfigurationError            the caller's arguments or setup cannot work
    │   ├── UnknownNameError          no such strategy, transport, option ...; lists the known ones
    │   ├── MissingDependencyError    an optional package or system library is missing; names the remedy
    │   ├── UnsupportedError          the geometry can express it, this version cannot move it
    │   ├── GeometryError             an inconsistent shard, split, plane or page table
    │   └── IncompatiblePeerError     two sides that cannot work together; names the field
    ├── CapacityError                 a bounded resource is full
    │   ├── OversizeError             larger than the whole; will never fit
    │   └── QuarantineFullError       too much memory waits for evidence; no new work is accepted
    ├── ProtocolError
    │   ├── LocalProtocolError        the caller broke the order of calls
    │   └── RemoteProtocolError       a peer sent an invalid or unexpected frame
    ├── TransportError                a write or a connection failed; see ``retryable``
    │   └── RegistrationError         memory that a transport cannot use
    ├── PeerLostError                 the peer is gone or silent
    │   └── InstanceClosedError       a rank of the instance has closed and withdrawn its address
    ├── DeadlineError                 the room did not end within its own deadline
    ├── AbortedError                  one of the two engines aborted the room
    ├── EndpointBrokenError           the endpoint itself has failed, and rejects every call
    ├── SupersededError               another process has replaced this rank
    └── IntegrityError                received data differ from the sent data
        └── PrefixChangedError        the pages of a held prefix changed; has the number of rows that are still right

Messages name the room, the peer, the field and the numbers. Errors of other libraries are wrapped where the library
calls them; the original is ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Iterable


class DisaggKVError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(DisaggKVError, ValueError):
    """The caller's arguments or setup cannot work."""


class UnknownNameError(ConfigurationError):
    """An unknown name.

    Args:
        kind: the kind of name, for example ``"transport"``.
        name: the unknown name.
        known: every known name.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(self.known) or 'none'}")


class MissingDependencyError(ConfigurationError):
    """An optional package or system library is not installed.

    Args:
        what: the part that needs it, for example ``"transport 'nixl'"``.
        reason: the missing package or library.
        remedy: the command that installs it.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what = what
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{what}: {reason}; remedy: {remedy}")


class UnsupportedError(ConfigurationError):
    """The geometry can express it, but this version cannot move it."""


class GeometryError(ConfigurationError):
    """An inconsistent shard, split, plane or page table."""


class IncompatiblePeerError(ConfigurationError):
    """Two sides that cannot work together.

    Args:
        field: the property that differs.
        ours: our value.
        theirs: the peer's value.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(f"incompatible peer: {field}: ours is {ours}, theirs is {theirs}")


class CapacityError(DisaggKVError):
    """A bounded resource is full."""


class OversizeError(CapacityError):
    """A request larger than the whole resource; it never fits.

    Args:
        what: the resource.
        asked: bytes requested.
        capacity: bytes of the resource.
    """

    def __init__(self, what: str, asked: int, capacity: int) -> None:
        self.what = what
        self.asked = asked
        self.capacity = capacity
        super().__init__(f"{what}: {asked} bytes requested, but there are only {capacity}")


class QuarantineFullError(CapacityError):
    """Too much memory waits for evidence that no peer can write to it any more."""


class ProtocolError(DisaggKVError):
    """A message or a call out of order."""


class LocalProtocolError(ProtocolError):
    """The caller broke the order of calls."""


class RemoteProtocolError(ProtocolError):
    """A peer sent an invalid or unexpected frame."""


class TransportError(DisaggKVError):
    """A write or a connection failed.

    Args:
        message: the failure, with the peer and the numbers.
        retryable: True if the same write may succeed later.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        self.retryable = retryable
        super().__init__(message)


class RegistrationError(TransportError):
    """Memory that a transport cannot use: not registered, overlapping, out of bounds, or of the wrong kind."""


class PeerLostError(DisaggKVError):
    """The peer has ended, cannot be reached, or has been silent for too long."""


class InstanceClosedError(PeerLostError):
    """A rank of the instance has closed its endpoint and withdrawn its address from the rendezvous."""


class DeadlineError(DisaggKVError):
    """The room did not end within its own deadline."""


class AbortedError(DisaggKVError):
    """One of the two engines aborted the room."""


class EndpointBrokenError(DisaggKVError):
    """An error has ended the endpoint's own thread. All its rooms have failed, and it rejects every call.

    Reads and writes in flight cannot be tracked any more, so its rooms are never released. ``__cause__`` is the error.
    """


class SupersededError(DisaggKVError):
    """Another process has replaced this rank. This process accepts no rooms while that one is connected.

    Args:
        instance: the instance.
        rank: the rank in it.
        address: the other process's address.
        epoch: the other process's epoch.
    """

    def __init__(self, instance: str, rank: int, address: str, epoch: bytes) -> None:
        self.instance = instance
        self.rank = rank
        self.address = address
        self.epoch = epoch
        where = f"epoch {epoch.hex()} at {address} has taken its place"
        super().__init__(f"rank {rank} of instance {instance!r} lives elsewhere: {where}")


class IntegrityError(DisaggKVError):
    """Received data differ from the sent data."""


class PrefixChangedError(IntegrityError):
    """Pages of a held prefix have changed since their checksums were stored.

    Args:
        message: the room, the page, the layer and both sums.
        rows: number of leading rows that are still right, in whole pages.
    """

    def __init__(self, message: str, rows: int) -> None:
        self.rows = rows
        super().__init__(message)


def text_of(error: BaseException) -> str:
    """An error's message, or its type if ``__str__`` raises, as that of another library may."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def without_frames(error: BaseException) -> None:
    """Remove the tracebacks of a stored error: their frames would keep process watches and file descriptors alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
