"""Every error that this library raises or reports.

::

    DisaggKVError
    ├── ConfigurationError            what the caller gave cannot work
    │   ├── UnknownNameError          no such strategy, transport, option ...; lists the known ones
    │   ├── MissingDependencyError    an optional package or system library is not there; says what to install
    │   ├── UnsupportedError          the model can say it, this version does not do it
    │   ├── GeometryError             a shard, split, plane or page table that is not consistent
    │   └── IncompatiblePeerError     two sides that cannot work together; names the field
    ├── CapacityError                 something bounded is full
    │   ├── OversizeError             larger than the whole; will never fit
    │   └── QuarantineFullError       too much memory waits for evidence; no new work is taken
    ├── ProtocolError
    │   ├── LocalProtocolError        our own caller broke the order of calls
    │   └── RemoteProtocolError       a peer sent what it must not send
    ├── TransportError                a write or a connection failed; see ``retryable``
    │   └── RegistrationError         memory that a transport cannot use
    ├── PeerLostError                 the peer is gone or silent
    │   └── InstanceClosedError       a rank of the instance has closed and withdrawn its address
    ├── DeadlineError                 the room's own time is over
    ├── AbortedError                  one of the two engines gave the room up
    ├── EndpointBrokenError           the endpoint itself has failed; it takes no calls any more
    ├── SupersededError               another process has taken the place of this rank
    └── IntegrityError                what arrived is not what was sent
        └── PrefixChangedError        what decode held is not what it kept; says how many rows are still right

Messages name the room, the peer, the field and the numbers. Exceptions of other libraries are mapped where they
enter, with ``raise ... from exc``.
"""

from __future__ import annotations

from collections.abc import Iterable


class DisaggKVError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(DisaggKVError, ValueError):
    """What the caller gave cannot work."""


class UnknownNameError(ConfigurationError):
    """A name that nothing is registered under.

    Args:
        kind: what was looked up, for example ``"transport"``.
        name: what was asked for.
        known: every name that would have worked.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(self.known) or 'none'}")


class MissingDependencyError(ConfigurationError):
    """An optional package or system library is not installed.

    Args:
        what: the thing that needs it, for example ``"transport 'nixl'"``.
        reason: what is missing.
        remedy: the command that installs it.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what = what
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{what}: {reason}; remedy: {remedy}")


class UnsupportedError(ConfigurationError):
    """The geometry can express it, this version does not move it."""


class GeometryError(ConfigurationError):
    """A shard, split, plane or page table that is not consistent."""


class IncompatiblePeerError(ConfigurationError):
    """Two sides that cannot work together.

    Args:
        field: the one thing that differs.
        ours: our value.
        theirs: the peer's value.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(f"incompatible peer: {field}: ours is {ours}, theirs is {theirs}")


class CapacityError(DisaggKVError):
    """Something bounded is full."""


class OversizeError(CapacityError):
    """Larger than the whole it should go into; it will never fit.

    Args:
        what: the thing that is full.
        asked: bytes asked for.
        capacity: bytes there are.
    """

    def __init__(self, what: str, asked: int, capacity: int) -> None:
        self.what = what
        self.asked = asked
        self.capacity = capacity
        super().__init__(f"{what}: {asked} bytes asked, but there are only {capacity}")


class QuarantineFullError(CapacityError):
    """Too much memory waits for evidence that no peer writes to it any more."""


class ProtocolError(DisaggKVError):
    """The order of messages or calls was broken."""


class LocalProtocolError(ProtocolError):
    """Our own caller broke the order of calls."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what it must not send."""


class TransportError(DisaggKVError):
    """A write or a connection failed.

    Args:
        message: what failed, with the peer and the numbers.
        retryable: True where the same write may succeed later.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        self.retryable = retryable
        super().__init__(message)


class RegistrationError(TransportError):
    """Memory that a transport cannot use: unregistered, overlapping, out of bounds, of the wrong kind."""


class PeerLostError(DisaggKVError):
    """The peer is gone or has been silent for too long."""


class InstanceClosedError(PeerLostError):
    """A rank of the instance has closed its endpoint and withdrawn its address; the rendezvous says so."""


class DeadlineError(DisaggKVError):
    """The room's own time is over."""


class AbortedError(DisaggKVError):
    """One of the two engines gave the room up."""


class EndpointBrokenError(DisaggKVError):
    """The endpoint's own thread has ended by an error: all its rooms have failed, and it takes no calls any more.

    Nothing is known of reads and writes that were under way: its rooms are never released. Its cause says why.
    """


class SupersededError(DisaggKVError):
    """Another process has taken the place of this rank; this one takes no rooms while that one is there.

    Args:
        instance: the instance.
        rank: the rank in it.
        address: where the rank is now.
        epoch: the life that it is now.
    """

    def __init__(self, instance: str, rank: int, address: str, epoch: bytes) -> None:
        self.instance = instance
        self.rank = rank
        self.address = address
        self.epoch = epoch
        where = f"epoch {epoch.hex()} at {address} has taken its place"
        super().__init__(f"rank {rank} of instance {instance!r} lives elsewhere: {where}")


class IntegrityError(DisaggKVError):
    """What arrived is not what was sent."""


class PrefixChangedError(IntegrityError):
    """Pages of a held prefix are not what they were when they were kept.

    Args:
        message: the room, the page, the layer and both sums.
        rows: leading rows that are still right, whole pages.
    """

    def __init__(self, message: str, rows: int) -> None:
        self.rows = rows
        super().__init__(message)


def text_of(error: BaseException) -> str:
    """What an error says; its type, where it cannot even be printed. Foreign errors may raise in ``__str__``."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def without_frames(error: BaseException) -> None:
    """Take the tracebacks away from an error that is kept: their frames would keep a peer's watch, and a descriptor."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
