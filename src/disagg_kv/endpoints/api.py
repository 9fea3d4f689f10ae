"""What an engine sees: senders and receivers, and a handle per room.

Every call checks the types and ranges of its arguments before anything is queued, and raises a
:class:`~disagg_kv.errors.ConfigurationError` that names the argument. Counts may be of any type that supports
``__index__``, such as ``np.int64``, but no ``bool``. Once the endpoint is closed, calls that begin something raise a
:class:`~disagg_kv.errors.LocalProtocolError`: ``open``, ``step``, ``layer_ready``, ``send_chunk``, ``finish``,
``withdraw``, ``expect`` and ``confirm_terminated``. ``abort``, ``poll``, ``peers`` and ``close`` stay harmless, as does
the ``close`` of a forward pass.

No call here blocks on a peer or on the wire, except ``close`` and an event's ``synchronize``. One engine thread calls;
an endpoint's own thread makes progress, so that heartbeats, grants and completions never wait for a forward pass.

``close`` may be called from any thread but the endpoint's own, and in a signal handler, whatever call of the endpoint
the handler interrupts: that call then returns, or is refused as any call after ``close``. A handler may also ``abort``
and ``poll``. ``close`` waits for the endpoint's thread, which calls the observer, the transport and the log: no lock
that one of those needs may be held by code that the handler interrupts. A ``close`` that an exception interrupts goes
on without its caller; call it again to wait for its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from attrs import define, field, frozen

from ..errors import DisaggKVError
from ..geometry import PageTable
from ..ids import Epoch, GroupId, LayerId, Rank, RoomId
from ..memory import Event, Mark
from ..protocol import Phase
from ..rendezvous import Source
from ..strategies import Feature
from .expectation import Expectation


@define
class Report:
    """What one room cost on this rank so far; live, written by the endpoint's thread.

    Args:
        path: how the bytes crossed; on prefill the last choice, on decode what arrived.
        reason: why that path.
        groups: into how many groups the layers of the last chunk were cut; 0: not decided yet.
        schedule: why so many.
        nbytes: bytes written to peers, or landed in our pages.
        descriptors: writes posted.
        segments: segments acknowledged, or landed.
        seconds: time per phase: ``gather``, ``post``, ``wire`` (a write is in flight), ``scatter``, ``checksum``,
            ``total``.
        placed: on decode, when this rank's rows were all in its pages, which the other ranks of its instance have still
            to say of theirs; seconds of the endpoint's clock. None: they are not.
        ended: when the room's outcome was known here, seconds of the endpoint's clock; None: it is not.
    """

    path: str = ""
    reason: str = ""
    groups: int = 0
    schedule: str = ""
    nbytes: int = 0
    descriptors: int = 0
    segments: int = 0
    seconds: dict[str, float] = field(factory=dict)
    placed: float | None = None
    ended: float | None = None
    _flying: int = field(default=0, init=False, repr=False)
    _since: float = field(default=0.0, init=False, repr=False)
    _over: float = field(default=0.0, init=False, repr=False)

    def spend(self, phase: str, seconds: float) -> None:
        """Add to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def write_begins(self, now: float) -> None:
        """A write is in flight from ``now`` on, which may be told late: no time counts twice."""
        if not self._flying:
            self._since = max(now, self._over)
        self._flying += 1

    def write_ends(self, now: float) -> None:
        """One that began has ended."""
        self._flying -= 1
        self._over = now
        if not self._flying:
            self.spend("wire", now - self._since)


PeerState = Literal["connected", "silent", "lost", "ended"]


@frozen
class PeerInfo:
    """Another endpoint, and what it keeps here: one life, which ``confirm_terminated`` takes by its epoch.

    Args:
        instance, rank, address, epoch, host, pid: as it introduced itself.
        state: ``connected``; ``silent``: it has missed heartbeats; ``lost``; ``ended``: its process has ended, as was
            seen or confirmed, and its last writes may still land.
        silent_s: seconds since it was last heard; infinite where nothing is known of that any more.
        ring_bytes: decode: ring leases of failed rooms that it may still write to. A lease that waits for several peers
            counts for each.
        page_bytes: decode: exposed pages of failed rooms that it may still write to, all of such a room's. Prefill:
            pages of failed rooms from which writes to it may still read.
        slot_bytes: prefill: staging slots of failed rooms from which writes to it may still read.
        rooms: the failed rooms that wait for evidence about it.
    """

    instance: str
    rank: Rank
    address: str
    epoch: Epoch
    host: str
    pid: int
    state: PeerState
    silent_s: float
    ring_bytes: int = 0
    page_bytes: int = 0
    slot_bytes: int = 0
    rooms: tuple[RoomId, ...] = ()

    @property
    def held_bytes(self) -> int:
        """All of it."""
        return self.ring_bytes + self.page_bytes + self.slot_bytes


class Handle(Protocol):
    """One room on one rank."""

    @property
    def room(self) -> RoomId:
        """Its id."""
        ...

    @property
    def phase(self) -> Phase:
        """How far it is. ``DONE`` and ``FAILED`` are final, and equal on all ranks of the instance."""
        ...

    @property
    def released(self) -> bool:
        """True, for good: nobody reads or writes the room's pages any more. Free pages on this only."""
        ...

    @property
    def error(self) -> DisaggKVError | None:
        """Why it failed."""
        ...

    @property
    def report(self) -> Report:
        """What it cost so far."""
        ...

    def abort(self, reason: str) -> None:
        """Give the room up; idempotent, harmless after its end and on an endpoint that is broken or closed.

        Before ``expect`` it declines the room.
        """
        ...


class Delivery(Handle, Protocol):
    """A room on a prefill rank."""

    @property
    def held(self) -> Mapping[GroupId, int] | None:
        """Rows that decode holds already, per group; None until it has said so."""
        ...

    def send_chunk(self, stop: int, pages: Sequence[PageTable], ready: Event | None = None) -> None:
        """Hand over the rows up to ``stop``, final now or at ``ready``.

        Args:
            stop: one past the last row; grows from call to call, except after ``withdraw``.
            pages: one table per group that covers the rows since the last call; after ``withdraw``, since row 0 or
                whatever has to be given again.
            ready: when the bytes are final.

        Raises:
            GeometryError: tables that do not cover the rows, page ids out of range or twice.
            LocalProtocolError: after ``finish``, or ``stop`` does not grow.
        """
        ...

    def finish(
        self,
        stop: int,
        *,
        state: Sequence[PageTable] = (),
        aux: int | None = None,
        tag: bytes = b"",
        ready: Event | None = None,
    ) -> None:
        """Nothing is added: the room's rows end at ``stop``.

        Args:
            stop: where the last chunk ended; 0 for a room without rows.
            state: the room's slot in every group of states; its states are final at ``ready`` too.
            aux: the aux row to send along; the lowest rank that gives one counts.
            tag: at most 256 bytes that must equal decode's, if both have one (a digest of the prompt, say).
            ready: when the aux row is final.

        A room with states that is withdrawn has to be finished again, once all its chunks were given again.

        Raises:
            GeometryError: not one slot of every group of states.
            LocalProtocolError: called twice, or ``stop`` is not where the chunks ended.
        """
        ...

    def withdraw(self) -> Event:
        """Preemption: stop reading the pages. The event fires when reads have ended; the room stays open.

        An event that has not fired when the endpoint breaks or has closed raises an
        :class:`~disagg_kv.errors.EndpointBrokenError` or an :class:`~disagg_kv.errors.AbortedError`, and the pages are
        never free.
        """
        ...


class Reception(Handle, Protocol):
    """A room on a decode rank."""

    def expect(self, expectation: Expectation) -> Mapping[GroupId, int]:
        """Await rows. Returns the held rows that count, per group.

        The held rows that count are the fewest of any group, rounded down to the end of a page in all groups.

        Raises:
            GeometryError: tables that do not cover the rows, page ids out of range or twice, an aux row that does not
                exist, or a held prefix that is longer than ``stop``.
            ConfigurationError: held rows, but the endpoint's selection is not ``incremental``; or ``verify`` is
                ``"full"`` and the held rows have no checksums.
            LocalProtocolError: called twice.
        """
        ...


class Step(Protocol):
    """One forward pass over many rooms."""

    def layer_ready(self, layer: LayerId, ready: Event | Mark | None = None) -> bool:
        """A layer's rows are final, now or at ``ready``, for all rooms of the step; layers come in any order, once.

        False: everything crosses when the step is closed, so the engine may leave out all other layers. Who does so
        gives ``close`` an event that comes after them, unless a function was given whose stream computes them too.

        An event per layer takes time that only some of them are worth. Given a function that makes one, the step calls
        it, before this returns, for layers that may complete a group, and not for those of which it knows that they do
        not: they are final at the next event that is made so, at the latest by ``close``, which calls the last such
        function if it has to. So the functions of a pass make events of one stream, whichever is current then.

        Raises:
            ConfigurationError: the function raises, or returns no event.
            GeometryError: no such layer on this rank.
            LocalProtocolError: announced twice, or after ``close``.
        """
        ...

    def close(self, ready: Event | None = None) -> None:
        """Every layer that was not announced is final at ``ready``.

        None: now, or behind all that was asked of the stream of those functions that ``layer_ready`` was given.

        Raises:
            LocalProtocolError: called twice.
        """
        ...


class Sender(Protocol):
    """A prefill rank's endpoint."""

    def open(self, room: RoomId, *, silence_s: float | None = None, total_s: float | None = None) -> Delivery:
        """Begin a room; None: the endpoint's options.

        A room that this returns always ends, also if ``close`` runs in another thread at the same moment.

        Raises:
            ConfigurationError: an id that is not 1 to 64 bytes (text has to be encoded), or a time that is not positive
                and finite.
            LocalProtocolError: the room is open already, or the endpoint is closed.
            QuarantineFullError: too much staging memory waits for evidence.
            SupersededError: another process has taken the place of this rank.
        """
        ...

    def step(self, chunks: Mapping[RoomId, tuple[int, Sequence[PageTable]]], uses: Collection[Feature] = ()) -> Step:
        """Announce a forward pass: per room where its rows will end, and their pages. Grants are asked for now.

        ``uses`` names what the engine does in this pass that may forbid to send single layers. All ranks of an
        instance announce the same passes.
        """
        ...

    def poll(self) -> Sequence[Delivery]:
        """Rooms whose ``phase`` or ``released`` changed since the last call.

        Nothing is lost, however long an engine does not call: each room has at most one entry until it is told of.
        """
        ...

    def peers(self) -> Sequence[PeerInfo]:
        """Every peer that is connected or still holds memory here; from any thread."""
        ...

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """The operator's evidence that the process of a peer's life has ended; its epoch, or that in 32 hex digits.

        Raises:
            UnknownNameError: nothing is known of such a life; says which hold memory here.
        """
        ...

    def close(self, drain_s: float = 5.0) -> None:
        """Abort what is open, wait at most ``drain_s`` for writes in flight and stop; again is harmless.

        Raises:
            LocalProtocolError: called by the endpoint's own thread, for example by an event; nothing is closed.
            TransportError: the transport could not be closed; all else is.
        """
        ...


class Receiver(Protocol):
    """A decode rank's endpoint."""

    def open(
        self, room: RoomId, source: Source, *, silence_s: float | None = None, total_s: float | None = None
    ) -> Reception:
        """Begin a room; see :meth:`Sender.open`."""
        ...

    def poll(self) -> Sequence[Reception]:
        """Rooms whose ``phase`` or ``released`` changed since the last call.

        An engine polls once per step. The endpoint may keep some of those that have ended well for the next call, so
        that few requests join one step; rooms that failed are never kept back.
        """
        ...

    def peers(self) -> Sequence[PeerInfo]:
        """Every peer that is connected or still holds memory here; from any thread."""
        ...

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """The operator's evidence that the process of a peer's life has ended; its epoch, or that in 32 hex digits.

        Raises:
            UnknownNameError: nothing is known of such a life; says which hold memory here.
        """
        ...

    def close(self, drain_s: float = 5.0) -> None:
        """Abort what is open, wait at most ``drain_s`` for evidence and stop; see :meth:`Sender.close`."""
        ...
