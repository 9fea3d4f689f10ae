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
    │   ├── StoreUnreachableError     the store of a rendezvous cannot be reached
    │   └── InstanceClosedError       a rank of the instance has closed and withdrawn its address
    ├── DeadlineError                 the room did not end within its own deadline
    ├── AbortedError                  one of the two engines aborted the room
    ├── EndpointBrokenError           the endpoint itself has failed, and rejects every call
    ├── SupersededError               another process has replaced this rank
    └── IntegrityError                received data differ from the sent data

Messages are for people: they name the room, the peer, the field and the numbers. Programs read ``code`` and the other
attributes of :class:`DisaggKVError`. Errors of other libraries are wrapped where the library calls them; the original
is ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import ClassVar, Self, TypedDict, Unpack

__all__ = [
    "AbortedError",
    "CapacityError",
    "ConfigurationError",
    "DeadlineError",
    "DisaggKVError",
    "EndpointBrokenError",
    "GeometryError",
    "IncompatiblePeerError",
    "InstanceClosedError",
    "IntegrityError",
    "LocalProtocolError",
    "MissingDependencyError",
    "OversizeError",
    "PeerLostError",
    "ProtocolError",
    "QuarantineFullError",
    "RegistrationError",
    "RemoteProtocolError",
    "StoreUnreachableError",
    "SupersededError",
    "TransportError",
    "UnknownNameError",
    "UnsupportedError",
]


class About(TypedDict, total=False):
    """What an error concerns; see :class:`DisaggKVError`."""

    instance: str | None
    rank: int | None
    epoch: bytes | None
    address: str | None
    room: bytes | None


class DisaggKVError(Exception):
    """Base of all errors of this library.

    ``code`` names the class for programs, and never changes. What is not known is None. ``pickle`` and ``copy`` keep
    the attributes and ``__cause__``.

    Args:
        message: what is wrong, with names and numbers.
        instance: name of the instance that the error is about: that of the peer, or of a rank of our own instance.
        rank: the rank in it.
        epoch: the incarnation of that rank, as in :class:`~disagg_kv.endpoints.PeerInfo`.
        address: where it was reached.
        room: id of the room that failed.
        retryable: True: the same may succeed later. False: it will not, before something else is corrected. None: it
            depends on the reason, which is in the message. By default as the table of errors says of the class.
    """

    code: ClassVar[str] = "failed"
    instance: str | None = None
    rank: int | None = None
    epoch: bytes | None = None
    address: str | None = None
    room: bytes | None = None
    retryable: bool | None = None

    def __init__(
        self,
        message: str = "",
        *,
        instance: str | None = None,
        rank: int | None = None,
        epoch: bytes | None = None,
        address: str | None = None,
        room: bytes | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.instance = instance
        self.rank = rank
        self.epoch = epoch
        self.address = address
        self.room = room
        if retryable is not None:
            self.retryable = retryable

    @property
    def peer(self) -> str | None:
        """The process that the error is about: ``instance/rank``, or as much of it as is known; None: none is known."""
        if self.instance is None:
            return self.address
        return self.instance if self.rank is None else f"{self.instance}/{self.rank}"

    def about(self, where: str = "", **known: Unpack[About]) -> Self:
        """Return the error with what it lacks of ``known``: a copy, since one error may end many rooms.

        Args:
            where: what the message of the copy begins with; empty: the message stays.
            known: attributes; those that the error has already stay.
        """
        lacking = {name: value for name, value in known.items() if value is not None and getattr(self, name) is None}
        if not lacking and not where:
            return self
        made = copy(self).with_traceback(self.__traceback__)
        made.__dict__.update(lacking)
        if where:
            made.args = (f"{where}: {text_of(self)}",)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        state = dict(self.__dict__)
        if self.__cause__ is not None:
            state["__cause__"] = self.__cause__
        return _restored, (type(self), self.args), state


def _restored(kind: type[DisaggKVError], args: tuple[object, ...]) -> DisaggKVError:
    """An error from its message, for ``pickle`` and ``copy``: a class's constructor may take other arguments."""
    return kind.__new__(kind, *args)


class ConfigurationError(DisaggKVError, ValueError):
    """The caller's arguments or setup cannot work."""

    code = "configuration"
    retryable = False


class UnknownNameError(ConfigurationError):
    """An unknown name.

    Args:
        kind: the kind of name, for example ``"transport"``.
        name: the unknown name.
        known: every known name.
    """

    code = "unknown_name"

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

    code = "missing_dependency"

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what = what
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{what}: {reason}; remedy: {remedy}")


class UnsupportedError(ConfigurationError):
    """The geometry can express it, but this version cannot move it."""

    code = "unsupported"


class GeometryError(ConfigurationError):
    """An inconsistent shard, split, plane or page table."""

    code = "geometry"


class IncompatiblePeerError(ConfigurationError):
    """Two sides that cannot work together.

    Args:
        field: the property that differs.
        ours: our value.
        theirs: the peer's value.
    """

    code = "incompatible_peer"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(f"incompatible peer: {field}: ours is {ours}, theirs is {theirs}")


class CapacityError(DisaggKVError):
    """A bounded resource is full."""

    code = "capacity"
    retryable = True


class OversizeError(CapacityError):
    """A request larger than the whole resource; it never fits.

    Args:
        what: the resource.
        asked: bytes, or another unit, requested.
        capacity: as many has the resource.
    """

    code = "oversize"
    retryable = False

    def __init__(self, what: str, asked: int, capacity: int, unit: str = "bytes") -> None:
        self.what = what
        self.asked = asked
        self.capacity = capacity
        super().__init__(f"{what}: {asked} {unit} requested, but there are only {capacity}")


class QuarantineFullError(CapacityError):
    """Too much memory waits for evidence that no peer can write to it any more."""

    code = "quarantine_full"


class ProtocolError(DisaggKVError):
    """A message or a call out of order."""

    code = "protocol"
    retryable = False


class LocalProtocolError(ProtocolError):
    """The caller broke the order of calls."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """A peer sent an invalid or unexpected frame."""

    code = "remote_protocol"


class TransportError(DisaggKVError):
    """A write or a connection failed. ``retryable``: the same write may succeed later; False unless it is given."""

    code = "transport"
    retryable = False


class RegistrationError(TransportError):
    """Memory that a transport cannot use: not registered, out of bounds, or of the wrong kind."""

    code = "registration"


class PeerLostError(DisaggKVError):
    """The peer has ended, cannot be reached, or has been silent for too long."""

    code = "peer_lost"
    retryable = True


class StoreUnreachableError(PeerLostError):
    """The store of a rendezvous, for example etcd, cannot be reached or does not answer."""

    code = "store_unreachable"


class InstanceClosedError(PeerLostError):
    """A rank of the instance has closed its endpoint and withdrawn its address from the rendezvous."""

    code = "instance_closed"
    retryable = False


class DeadlineError(DisaggKVError):
    """The room did not end within its own deadline."""

    code = "deadline"
    retryable = True


class AbortedError(DisaggKVError):
    """One of the two engines aborted the room."""

    code = "aborted"


class EndpointBrokenError(DisaggKVError):
    """An error has ended the endpoint's own thread. All its rooms have failed, and it rejects every call.

    Reads and writes in flight cannot be tracked any more, so its rooms are never released. ``__cause__`` is the error.
    """

    code = "endpoint_broken"
    retryable = False


class SupersededError(DisaggKVError):
    """Another process has replaced this rank. This process accepts no rooms any more.

    Args:
        instance: the instance.
        rank: the rank in it.
        address: the other process's address.
    """

    code = "superseded"
    retryable = False

    def __init__(self, instance: str, rank: int, address: str) -> None:
        message = f"rank {rank} of instance {instance!r} lives elsewhere: the process at {address} has taken its place"
        super().__init__(message, instance=instance, rank=rank, address=address)


class IntegrityError(DisaggKVError):
    """Received data differ from the sent data."""

    code = "integrity"


def text_of(error: BaseException) -> str:
    """An error's message; its type where it has none, or where ``__str__`` raises, as that of another library may."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def lasting(seconds: float) -> str:
    """How long something took, as messages say it."""
    return f"{seconds:.1f} s" if seconds >= 0.05 else "less than 0.1 s"


def without_frames(error: BaseException) -> None:
    """Remove the tracebacks of a stored error: their frames would keep process watches and file descriptors alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
