"""One-sided writes from one rank's registered memory into another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event
from ..planning import Writes


@frozen
class Capabilities:
    """What a transport promises; the conformance suite checks what it can observe.

    Args:
        devices: kinds of memory it registers: ``"cpu"``, ``"cuda"``.
        own_memory_only: the *target* of a write must come from the transport's own ``allocate`` (SupportsAllocate).
        in_process_only: both sides live in one process.
        needs_target_polling: writes progress only while the target calls ``poll``.
        waits_events: ``submit`` honours ``after`` itself; otherwise the endpoint waits first.
        notifies: ``submit(notify=...)`` arrives at the target as ``Heard``, after the data, at most once.
        detects_peer_death: a killed peer is reported as ``Heard(data=None)`` or as a failed ticket.
        late_writes: bytes may still land after a ticket ended with ``quiesced=False``.
        max_batch: descriptors of one ``submit``; None: no limit.
        drain_s: seconds after a peer's observed exit in which its last writes have landed, and those posted to it
            before read and write nothing more; None: unknown.
        write_s: rough cost of one more descriptor, seconds; for the cost model only.
        bytes_per_s: rough bulk speed; for the cost model only.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    own_memory_only: bool = False
    in_process_only: bool = False
    needs_target_polling: bool = False
    waits_events: bool = False
    notifies: bool = False
    detects_peer_death: bool = False
    late_writes: bool = False
    max_batch: int | None = None
    drain_s: float | None = None
    write_s: float = 1e-6
    bytes_per_s: float = 4e9


@frozen
class WriteEnded:
    """The one terminal event of a ticket.

    Args:
        ticket: which.
        error: None: every byte is visible to whoever reads at the target after this. Else a TransportError or
            PeerLostError, with the library's own exception as its cause.
        quiesced: True: no byte of the ticket is read or written from now on. Always True with ``error=None``.
    """

    ticket: Ticket
    error: Exception | None = None
    quiesced: bool = True


@frozen
class Settled:
    """After ``Ended(quiesced=False)``, at most once: the ticket is quiet now. This is evidence."""

    ticket: Ticket


@frozen
class Heard:
    """A notification from a peer, or (``data=None``) that it is lost.

    Args:
        peer: who.
        data: what ``submit(notify=...)`` carried; None: the peer is lost.
        fenced: with ``data=None``: the transport proves that nothing of that peer lands any more.
    """

    peer: Peer
    data: bytes | None
    fenced: bool = False


class Transport(Protocol):
    """Registers memory and writes it into a peer's. Nothing but ``connect`` and ``close`` blocks.

    It belongs to the process that made it: in a forked child its calls raise a LocalProtocolError and change nothing.
    One thread calls, with one exception: :meth:`connect` may be called from any thread, several at once, while that one
    thread makes the other calls.

    Neither side's memory may be reused before its ticket is quiet: no library can cancel a write in flight.
    """

    name: str
    caps: Capabilities

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Make buffers readable as sources and, where possible, writable for peers; ids in the same order.

        Their owners are kept alive until they are deregistered.

        Raises:
            RegistrationError: memory of another kind, unreadable, or overlapping a live region.
        """
        ...

    def deregister(self, regions: Sequence[RegionId]) -> None:
        """Forget regions that no unquiet ticket uses.

        Raises:
            RegistrationError: unknown region, or one that an unquiet ticket uses.
        """
        ...

    def local_descriptor(self) -> bytes:
        """What a peer needs for ``connect``: incarnation and all regions registered so far. Opaque, versioned."""
        ...

    def peer_of(self, descriptor: bytes) -> Peer:
        """Which peer a descriptor names, before anything is connected; ``connect`` returns the same.

        Raises:
            RemoteProtocolError: the descriptor is garbage or of another version.
        """
        ...

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Learn a peer from its descriptor; again with a newer descriptor of the same incarnation: more regions.

        Any thread, several at once, also for one peer; blocks its caller for at most ``timeout_s``, and no other
        thread. Writes to the peer that are under way, and those that use regions of an older descriptor, go on. A
        peer is not disconnected, nor the transport closed, while a thread is connecting it.

        Raises:
            TransportError: it cannot be reached in time; PeerLostError: it is gone.
            RemoteProtocolError: the descriptor is garbage or of another version.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; tickets to it still end. Unknown peers are ignored."""
        ...

    def submit(self, peer: Peer, writes: Writes, *, notify: bytes | None = None, after: Event | None = None) -> Ticket:
        """Post a batch; the source bytes are final (or will be at ``after``, with ``caps.waits_events``).

        Whatever goes wrong after the ticket exists ends the ticket; it is not raised. An empty batch ends at once.

        Raises:
            RegistrationError: a range outside a registered region of either side, found before anything is written.
            TransportError: peer unknown, too many descriptors, ``notify`` or ``after`` without the capability.
        """
        ...

    def poll(self) -> Sequence[WriteEnded | Settled | Heard]:
        """What happened since the last call; in a forked child, nothing. Never blocks, never raises."""
        ...

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Let tickets end for at most ``drain_s`` seconds; return those not proven quiet. Later calls do nothing."""
        ...


@runtime_checkable
class SupportsAllocate(Protocol):
    """A transport that can give memory which peers are able to write to."""

    def allocate(self, nbytes: int) -> Buffer:
        """``nbytes`` of such memory, zeroed, aligned to a page; freed when its owner is."""
        ...

    def allocated(self, buffer: Buffer) -> bool:
        """True if all of the buffer is memory that ``allocate`` gave."""
        ...
