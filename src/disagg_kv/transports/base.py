"""One-sided writes from one rank's registered memory into another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from ..ids import Peer, RegionId, Ticket
from ..memory import Buffer, Event, Flag
from ..planning import Writes


@frozen
class LinkCost:
    """What a process holds for one connected peer, and gives back when the peer is disconnected.

    Args:
        nbytes: bytes of memory.
        descriptors: file descriptors.
    """

    nbytes: int
    descriptors: int

    def __add__(self, other: LinkCost) -> LinkCost:
        return LinkCost(self.nbytes + other.nbytes, self.descriptors + other.descriptors)


@frozen
class Capabilities:
    """The promises of a transport. The conformance suite checks those that it can observe.

    Args:
        devices: kinds of memory that can be registered: ``"cpu"``, ``"cuda"``.
        own_memory_only: the *target* of a write must be memory of the transport's own ``allocate`` (SupportsAllocate).
        in_process_only: both sides must be in one process.
        needs_target_polling: writes progress only while the target calls ``poll``.
        waits_events: ``submit`` takes ``after``, and writes once that has fired; otherwise the endpoint waits first.
        detects_peer_death: a killed peer is reported as :class:`PeerLost` or as a failed ticket.
        late_writes: bytes may still land after a ticket ended with ``quiesced=False``.
        max_batch: descriptors of one ``submit``; None: no limit.
        drain_s: seconds after the observed exit of a peer's process. By then the peer's last writes have landed, and
            writes that were posted to it read and write nothing more. None: unknown.
        bytes_per_s: rough bulk speed in bytes per second: endpoints look more often at writes of fast wires.
        link: what a connected peer costs this process; the default is a guess.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    own_memory_only: bool = False
    in_process_only: bool = False
    needs_target_polling: bool = False
    waits_events: bool = False
    detects_peer_death: bool = False
    late_writes: bool = False
    max_batch: int | None = None
    drain_s: float | None = None
    bytes_per_s: float = 4e9
    link: LinkCost = LinkCost(16_384, 2)


@frozen
class WriteEnded:
    """The one terminal event of a ticket.

    Args:
        ticket: the ticket that ended.
        error: None: every byte is visible to reads at the target after this event. Otherwise a TransportError or
            PeerLostError with a message. Its cause is the exception of the library, or of the event, if there is one.
        quiesced: True: no byte of the ticket is read or written from now on. Always True with ``error=None``.
    """

    ticket: Ticket
    error: Exception | None = None
    quiesced: bool = True


@frozen
class Settled:
    """Evidence: a ticket that ended with ``WriteEnded(quiesced=False)`` is quiet now. At most once per ticket."""

    ticket: Ticket


@frozen
class PeerLost:
    """The loss of a peer, which is reported at most once.

    Args:
        peer: the peer.
        fenced: the transport proves that no write of that peer lands any more.
    """

    peer: Peer
    fenced: bool = False


class Transport(Protocol):
    """Registers memory and writes it into a peer's memory. Only ``connect`` and ``close`` may block.

    A transport belongs to the process that created it. In a forked child, its calls raise a LocalProtocolError and
    change nothing. One thread makes all calls but :meth:`connect`, which any thread may call, several at a time.

    The memory of either side must not be reused before the ticket is quiet: no library can cancel a write in flight.
    """

    name: str
    caps: Capabilities

    def register(self, buffers: Sequence[Buffer]) -> Sequence[RegionId]:
        """Register buffers as sources of writes and, where possible, as targets of peers' writes.

        Returns their region ids in the same order. Descriptors that are made later have them. The buffers' owners are
        kept alive until ``close``.

        Raises:
            ConfigurationError: memory that overlaps a live region, or itself: the caller's fault.
            RegistrationError: memory of another kind, or unreadable memory.
        """
        ...

    def local_descriptor(self) -> bytes:
        """Return the bytes that a peer passes to ``connect``: incarnation and all regions so far. Opaque, versioned."""
        ...

    def peer_of(self, descriptor: bytes) -> Peer:
        """Return the peer that a descriptor names, without connecting it; ``connect`` returns the same.

        Raises:
            RemoteProtocolError: the descriptor is invalid or of another version.
        """
        ...

    def connect(self, descriptor: bytes, timeout_s: float) -> Peer:
        """Connect the peer of a descriptor. A newer descriptor of the same incarnation adds its new regions.

        Any thread may call it, several at a time, also for one peer. It blocks its caller for at most ``timeout_s``
        seconds, and no other thread. Writes in flight, and writes to regions of an older descriptor, continue. The
        caller neither disconnects the peer nor closes the transport while a thread connects it.

        Raises:
            TransportError: the peer cannot be reached in time.
            PeerLostError: the peer has ended.
            RemoteProtocolError: the descriptor is invalid or of another version.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer. Its tickets still end. An unknown peer is ignored."""
        ...

    def submit(self, peer: Peer, writes: Writes, *, after: Event | None = None) -> Ticket:
        """Post a batch of writes, and return its ticket.

        Errors after the ticket exists end the ticket; they are not raised. An empty batch ends at once.

        Args:
            peer: a connected peer.
            writes: source ranges, and target ranges in the peer's regions.
            after: fires when the source bytes are final, with ``caps.waits_events``; None: they are final now.

        Raises:
            RegistrationError: a range outside a registered region of either side; nothing is written.
            TransportError: an unknown peer, too many descriptors, or ``after`` without the capability.
        """
        ...

    def poll(self) -> Sequence[WriteEnded | Settled | PeerLost]:
        """Return the events since the last call; in a forked child, none. Never blocks, never raises."""
        ...

    def close(self, drain_s: float) -> Sequence[Ticket]:
        """Wait at most ``drain_s`` seconds for tickets; return those not proven quiet. Later calls do nothing."""
        ...


@runtime_checkable
class SupportsAllocate(Protocol):
    """A transport that allocates memory that peers can write to."""

    def allocate(self, nbytes: int) -> Buffer:
        """Return ``nbytes`` of such memory, zeroed and aligned to a page; freed with its owner."""
        ...

    def allocated(self, buffer: Buffer) -> bool:
        """Return True if the whole buffer is memory of ``allocate``."""
        ...


class Flags(Protocol):
    """A peer's page of completion flags, as this process raises them. One thread makes all calls; nothing blocks.

    A raised flag shows the peer that bytes of ours are in its memory. See :mod:`disagg_kv.transports.flags`.
    """

    def arm(self, slot: int, value: int, record: tuple[int, int, int, int, int], device: str) -> Flag | None:
        """Store a record, and return what kernels of ``device`` store behind its bytes to raise the flag.

        The page stays mapped while the returned value is referenced.

        Args:
            slot: of the flag.
            value: what raises it.
            record: what has landed then.
            device: of the kernels, as in :attr:`Buffer.device`.

        Returns:
            None if kernels of such a device cannot store there, or if the slot has a later flag.

        Raises:
            TransportError: the page has no such slot.
        """
        ...


@runtime_checkable
class SupportsFlags(Protocol):
    """A transport whose peers on one host share words of host memory."""

    def flag_page(self, nbytes: int) -> tuple[Buffer, bytes]:
        """Return ``nbytes`` of zeroed host memory, and what a peer passes to :meth:`open_flags`.

        The memory is freed with its owner. Peers that have opened it keep it.

        Raises:
            RegistrationError: the host does not give it.
        """
        ...

    def open_flags(self, peer: Peer, page: bytes) -> Flags:
        """Open the flag page of a connected peer. Any thread, as :meth:`Transport.connect`; it may take milliseconds.

        Raises:
            PeerLostError: the peer has ended or given the page back.
            TransportError: an unknown peer, or one that shares no memory with this process.
            RemoteProtocolError: ``page`` is not of this transport.
        """
        ...


@runtime_checkable
class SupportsMapping(Protocol):
    """A transport that maps a peer's memory, so that kernels of this process write into the peer's pages.

    Kernels write at their own time: no ticket, no ``poll`` and no :meth:`Transport.disconnect` of the transport's waits
    for them. A mapping outlives its peer's process, ``disconnect``, and ``close`` of either side: it stays
    for as long as the owner of a returned buffer is referenced. That is also why neither side can take it back.

    It may expose more than the region: the whole allocation that holds it.

    Any thread may call both methods, as :meth:`Transport.connect`, also while another one polls. The caller submits
    nothing to the peer meanwhile.
    """

    def unmappable(self, peer: Peer, regions: Sequence[RegionId], device: str) -> str | None:
        """Why kernels of ``device`` cannot write to these regions of a connected peer; None: no reason is known.

        Never blocks, maps nothing, and never raises. The reason names the obstacle: the memory's kind, the devices, the
        region or the peer that is not known. A later :meth:`map` may fail nevertheless.
        """
        ...

    def map(self, peer: Peer, region: RegionId, device: str) -> Buffer:
        """Return a region of a connected peer as memory of this process, for kernels of ``device``.

        The buffer has the region's length, ``device`` as its device, and an owner that keeps the mapping. The first
        call for a region may take milliseconds. Later ones are quick, and return an equal buffer until ``disconnect``.
        What a kernel stores there is visible to the peer's reads once the kernel's event has happened.

        Args:
            peer: a connected peer.
            region: in the descriptor that it was connected with.
            device: of the kernels that will write, as in :attr:`Buffer.device`.

        Raises:
            RegistrationError: the region is not known, or its memory cannot be mapped for such a device: says why.
            PeerLostError: the peer has ended.
            TransportError: an unknown peer, or the system refuses the mapping.
        """
        ...
