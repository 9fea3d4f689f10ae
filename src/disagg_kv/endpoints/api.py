"""The interfaces of an engine: senders and receivers, and a handle per room.

Every call checks the types and ranges of its arguments before it queues anything, and raises a
:class:`~disagg_kv.errors.ConfigurationError` that names the argument. Counts may be of any type that supports
``__index__``, such as ``np.int64``, but not ``bool``. After ``close``, calls that begin something raise a
:class:`~disagg_kv.errors.LocalProtocolError`: ``open``, ``step``, ``layer_ready``, ``send_chunk``, ``finish``,
``withdraw``, ``expect`` and ``confirm_terminated``. ``abort``, ``poll``, ``peers`` and ``close`` stay harmless, as does
the ``close`` of a forward pass.

No call blocks on a peer or on the network, except ``close``, ``wait`` and an event's ``synchronize``. One engine thread
calls. Its calls advance the endpoint, and the endpoint's own thread does where no call comes, so heartbeats, grants and
completions never wait for a forward pass.

Any thread may call ``close``. A signal handler may call ``close``, ``abort`` and ``poll``, even if it interrupts a call
of the endpoint. The interrupted call then returns, or fails like a call after ``close``. Where ``close`` interrupts an
advance, it returns at once, and the endpoint closes when that has ended. Elsewhere ``close`` waits for the endpoint's
thread, which calls the observer, the transport and the log. Code that a handler interrupts must hold no lock that one
of those needs. If an exception interrupts ``close``, closing continues; call ``close`` again to wait for its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..core import Phase
from ..errors import DisaggKVError
from ..geometry import PageTable
from ..ids import Epoch, GroupId, RoomId
from ..memory import Event
from ..rendezvous import Source
from .expectation import Expectation
from .status import EndpointStatus, PeerInfo, Report, Usage


class SupportsStatus(Protocol):
    """An endpoint that shows everything at once. Any thread may call it, also after ``close``."""

    def status(self, rooms: int) -> EndpointStatus:
        """Return its state, memory, peers, and at most ``rooms`` rooms."""
        ...


class SupportsUsage(Protocol):
    """An endpoint that shows what it keeps. Any thread may call it."""

    def usage(self) -> Usage:
        """Return rooms by phase, and staging memory."""
        ...

    def peers(self) -> Sequence[PeerInfo]:
        """Return every peer that is connected or still holds memory here."""
        ...


class Handle(Protocol):
    """One room on one rank."""

    @property
    def room(self) -> RoomId:
        """Id of the room."""
        ...

    @property
    def phase(self) -> Phase:
        """State of the room. ``DONE`` and ``FAILED`` are final.

        Ranks of an instance agree on them, except in two cases when rank 0 is lost; docs/protocol.md names them.
        """
        ...

    @property
    def released(self) -> bool:
        """True: no peer and no copy reads or writes the room's pages any more; final. Free pages only then."""
        ...

    @property
    def error(self) -> DisaggKVError | None:
        """Why the room failed; None: it did not fail."""
        ...

    @property
    def report(self) -> Report:
        """Cost of the room so far."""
        ...

    def abort(self, reason: str) -> None:
        """End the room with a failure. Harmless if repeated, after the room's end, and after the endpoint's end.

        Before ``expect`` it declines the room, and prefill is notified.
        """
        ...


class Delivery(Handle, Protocol):
    """A room on a prefill rank."""

    @property
    def held(self) -> Mapping[GroupId, int] | None:
        """Rows that decode holds already, per group; None: decode has not reported them yet."""
        ...

    def check_chunk(self, stop: int, pages: Sequence[PageTable]) -> None:
        """Raise what :meth:`send_chunk` would raise for these rows, as a pass would; nothing else happens.

        One room that is refused fails a whole ``step``, so an engine with many requests in a step asks first.

        Raises:
            GeometryError: as :meth:`send_chunk`.
            LocalProtocolError: as :meth:`send_chunk`.
        """
        ...

    def send_chunk(self, stop: int, pages: Sequence[PageTable], ready: Event | None = None) -> None:
        """Submit the rows up to ``stop`` for sending. In a room that has ended, only the arguments are checked.

        Args:
            stop: one past the last row; grows from call to call, except after ``withdraw``.
            pages: one table per group that covers the rows since the last call; after ``withdraw``, the rows since row
                0. Rows that decode holds, as ``held`` says, need no pages. Rows of a sliding window may lie in the null
                page; if decode needs one of them, the room fails.
            ready: fires when the bytes are final; None: they are final now.

        Raises:
            GeometryError: tables that do not cover the rows, page ids out of range or twice.
            LocalProtocolError: the call follows ``finish``, or ``stop`` does not grow.
        """
        ...

    def finish(
        self,
        stop: int,
        *,
        state: Sequence[PageTable] = (),
        aux: int | None = None,
        ready: Event | None = None,
    ) -> None:
        """Declare that the room's rows end at ``stop``. In a room that has ended, only the arguments are checked.

        After ``withdraw``, a room with states must be finished again, once all its chunks were submitted again.

        Args:
            stop: where the last chunk ended; 0 for a room without rows.
            state: the room's slot in every group of states.
            aux: the aux row to send; of several ranks that give one, the lowest counts.
            ready: fires when the aux row and the states are final; None: they are final now.

        Raises:
            GeometryError: not one slot of every group of states.
            LocalProtocolError: called twice, or ``stop`` is not where the chunks ended.
            OversizeError: the pool gives more than 512 KiB of aux data.
        """
        ...

    def withdraw(self) -> Event:
        """Preempt the room: stop reading its pages. The room stays open.

        Returns an event that fires when all reads have ended. If the endpoint breaks or closes before, the event raises
        an :class:`~disagg_kv.errors.EndpointBrokenError` or an :class:`~disagg_kv.errors.AbortedError`, and the pages
        must not be reused.
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
            ConfigurationError: held rows, but the endpoint's selection is not ``incremental``.
            LocalProtocolError: called twice.
        """
        ...


class Receiver(Protocol):
    """A decode rank's endpoint."""

    def open(
        self,
        room: RoomId,
        source: Source,
        *,
        tag: bytes = b"",
        total_s: float | None = None,
        claim_s: float | None = None,
    ) -> Reception:
        """Open a room that the prefill instance ``source`` sends.

        Arguments and errors are those of :meth:`~disagg_kv.endpoints.DecodeEndpoint.open`.
        """
        ...

    def poll(self) -> Sequence[Reception]:
        """Return the rooms whose ``phase`` or ``released`` changed since the last call.

        Changes are kept until the next call, one entry per room. ``phase`` and ``released`` of a returned handle stay
        as they are until the next call, or the endpoint's end. So one call alone returns a handle that is released.
        An engine polls once per step.

        Raises:
            EndpointBrokenError: the endpoint cannot go on.
        """
        ...

    def peers(self) -> Sequence[PeerInfo]:
        """Return every peer that is connected or still holds memory here. Any thread may call it."""
        ...

    def confirm_terminated(self, epoch: Epoch | str) -> None:
        """Declare that the process of a peer has ended: evidence that memory held for it may be reused.

        Args:
            epoch: the peer's epoch, as in :class:`PeerInfo`; or its 32 hex digits.

        Raises:
            UnknownNameError: no such epoch is known; the message lists those that hold memory here.
        """
        ...

    def close(self, drain_s: float = 5.0) -> None:
        """Abort the open rooms, wait at most ``drain_s`` seconds for writes in flight, and stop.

        Peers learn it at once. Their memory is free for them, unless a write or copy is still in flight then: they wait
        for its end until this process has ended. A second call is harmless.

        Raises:
            LocalProtocolError: this is a forked child of the process that has the endpoint; nothing is closed.
            TransportError: the transport could not be closed; everything else is closed.
        """
        ...
