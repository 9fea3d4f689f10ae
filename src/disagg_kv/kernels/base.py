"""Gather, scatter, copy and checksum: between pages and a staging buffer, from pages to pages, and sums over pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ..geometry import PageTable
from ..ids import GroupId
from ..memory import Buffer, Event, Flag, MemoryPool, PagedMemory
from ..planning import PageCopy, StagedLayout


@frozen
class Move:
    """One writer's part of one segment between one pool's pages and staging.

    Args:
        layout: which rows and units of which planes, and where in the part.
        tables: the room's pages, per group.
        base: byte in the staging buffer at which the part begins.
    """

    layout: StagedLayout
    tables: Mapping[GroupId, PageTable]
    base: int


@frozen
class Pages:
    """The pages of one room in one pool.

    Args:
        pool: a pool of this process, or a peer's that is mapped here.
        tables: the room's pages, per group.
    """

    pool: PagedMemory
    tables: Mapping[GroupId, PageTable]


@frozen
class PageMove:
    """One writer's part of one segment, straight from pages into pages, which may be mapped memory of a peer.

    Args:
        copy: which rows and units of which planes, on both sides.
        source: the pages that are read.
        target: the pages that are written; they share no byte with those of ``source``, or of another move's target.
    """

    copy: PageCopy
    source: Pages
    target: Pages


@frozen
class Checksums:
    """Checksums that may still be computed.

    Args:
        event: after it the sums are ready and the pages are no longer read; None: they are ready.
        read: returns the sums after ``event``, once: for each move the sum of every entry, uint64 ``[entries]``.
    """

    event: Event | None
    read: Callable[[], Sequence[npt.NDArray[np.uint64]]]


class Kernels(Protocol):
    """Gather, scatter, copy and checksum for one kind of memory. Bit exact: bytes outside the target are never touched.

    Callers check page tables and bounds; kernels do not.
    """

    name: str

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        """Copy pages into staging: all moves in one launch, after ``after``. None: it is done already."""
        ...

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Copy staging into pages: all moves in one launch. None: it is done already."""
        ...

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        """Copy pages into pages: all moves, to any number of pools, in one launch, after ``after``.

        All pools lie on one device, as this process sees them. None: it is done already, and other processes see the
        bytes. Otherwise both hold once the event has happened. The caller keeps the pools and the flags until then:
        they keep the memory mapped. Called by the thread that advances an endpoint, and so by several at a time.

        Args:
            moves: what is copied.
            after: what it comes after.
            flags: raised where the device does it without a thread: behind all moves, and before the event of the
                end. Otherwise they stay as they are. A call that raises an error that may be retried has raised none.
        """
        ...

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Sum the cells of pages that the moves name, after ``after``; staging and :attr:`Move.base` are not used.

        Equal cells have equal sums in every pool. :mod:`disagg_kv.kernels.checksum.mixing` has the formula.
        """
        ...


@runtime_checkable
class SupportsStreams(Protocol):
    """Kernels that queue their work on a device: no thread waits for an event before they begin, or while they copy."""

    def orders(self, event: Event) -> bool:
        """Whether ``gather(..., after=event)`` returns at once, whenever the event happens."""
        ...


@runtime_checkable
class SupportsConversions(Protocol):
    """Kernels that read a pool as a cache of another spec (:class:`~disagg_kv.memory.ConvertedPool`).

    They give ``gather``, ``checksum`` and the source of ``copy`` the bytes of that cache: ``site.conversions`` says for
    each plane how. The rules are those of :mod:`disagg_kv.geometry.formats`; equal rules make equal bytes.
    """

    @property
    def conversions(self) -> Collection[str]:
        """Names of the conversions they know, of :data:`~disagg_kv.geometry.CONVERSION_NAMES`."""
        ...


class Prepared(Protocol):
    """A launch of which all is done that can be done before its bytes are there. One thread; the first call counts."""

    def launch(self) -> Event | None:
        """Enqueue it now and return the event of its end; None: it is done already. Bytes are read from now on.

        Raises:
            LocalProtocolError: it was launched or dropped before.
        """
        ...

    def drop(self) -> None:
        """Release its resources without a launch. After either call, further calls do nothing."""
        ...


class PreparedGather(Protocol):
    """The same for a gather, of which the place in staging is not known yet."""

    def launch(self, base: int, after: Event | None) -> Event | None:
        """As :meth:`Prepared.launch`, behind ``after``; each part moves on by ``base`` bytes, a multiple of 16."""
        ...

    def drop(self) -> None:
        """Give back what the launch holds; it is not launched any more."""
        ...


@runtime_checkable
class SupportsPreparing(Protocol):
    """Kernels whose launches cost the host less once they are prepared."""

    def prepare_scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Prepared | None:
        """Prepare ``scatter`` of these moves, while the staging bytes may still change; neither waits nor allocates.

        None: preparing saves nothing, or the limit of prepared launches is reached. Call ``scatter`` instead. Raises
        the errors of ``scatter``.
        """
        ...

    def prepare_gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> PreparedGather | None:
        """The same for ``gather``: pages are read when it is launched, and not before its ``after``."""
        ...


@runtime_checkable
class SupportsWarmUp(Protocol):
    """Kernels that have to be compiled."""

    def warm(self, pool: MemoryPool) -> None:
        """Compile now the kernels that requests for this pool need, whatever peers take of it. Blocks; on any thread.

        Of a pool that is read as another cache these are the gathers.
        """
        ...

    def warm_checksum(self, pool: MemoryPool) -> None:
        """The same for checksums of the pool. Blocks; on any thread."""
        ...

    def warm_copy(self, source: PagedMemory, target: PagedMemory) -> None:
        """The same for copies from one pool into another, which may be mapped. Blocks; on any thread.

        After a call with one pool as both, those into a mapped pool of the same spec are ready, whatever it holds and
        however it lays that out. Only one that is aligned worse, or of another spec, has more to be compiled.
        """
        ...
