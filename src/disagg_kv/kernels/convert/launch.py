"""The Triton kernels: of a pool that is read as another cache, one launch for each kind of conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial

import numpy as np

from ... import arguments
from ...errors import DisaggKVError
from ...geometry import CONVERSION_NAMES
from ...memory import All, Buffer, Event, Flag, MemoryPool, PagedMemory
from ..base import Checksums, Move, PageMove, Prepared, PreparedGather
from ..checksum.mixing import U64
from ..triton_copy_launch import CopyLauncher
from ..triton_launch import Launcher, PreparedLaunch, waits_for
from ..triton_sums import ChecksumLauncher
from .kinds import Kind, kinds_of, op_of, split_copies

Launch = Callable[[Event | None], Event | None]
"""Launches behind an event, and returns that of its end; None: it has ended."""


@cache
def launcher(name: str, kind: Kind | None) -> Launcher:
    """The process's gathers of one kind, or its scatters; None: bytes are copied as they are."""
    return Launcher(op_of(name, kind))


@cache
def _copier(kind: Kind | None, programs: int | None) -> CopyLauncher:
    return CopyLauncher(op_of("copy", kind), programs)


@cache
def _summer(kind: Kind | None) -> ChecksumLauncher:
    return ChecksumLauncher(op_of("checksum", kind))


class TritonKernels:
    """Triton on GPUs: one launch per call and kind of conversion, on streams of their own.

    Args:
        programs: most programs of one copy into mapped pages, each of which takes a multiprocessor or less from a
            model that computes meanwhile. Fewer copy more slowly. None: one for two multiprocessors, or for each where
            it converts.
    """

    name = "triton"
    conversions = CONVERSION_NAMES

    def __init__(self, programs: int | None = None) -> None:
        if programs is not None:
            programs = arguments.count(programs, "kernels: programs", least=1, most=1 << 20)
        self._programs = programs
        self._gather, self._scatter = launcher("gather", None), launcher("scatter", None)
        self._copy, self._sum = _copier(None, programs), _summer(None)

    def orders(self, event: Event) -> bool:
        """The stream waits for torch's events, but not for others; where Triton interprets, it waits for none."""
        return waits_for(event)

    def gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None) -> Event | None:
        """Enqueue the copy of pages into staging behind ``after``; the event of its end."""
        if pool.site.converts is None:
            return self._gather(pool, moves, staging, after)
        parts = kinds_of(pool).split(moves)
        return beside([partial(launcher("gather", kind), pool, some, staging) for kind, some, _ in parts], after)

    def prepare_gather(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> PreparedGather | None:
        """Write the table of a gather; see :class:`..base.SupportsPreparing`."""
        if pool.site.converts is None:
            return self._gather.prepare(pool, moves, staging, moved=True)
        parts = kinds_of(pool).split(moves)
        found = _prepared(launcher("gather", kind).prepare(pool, some, staging, moved=True) for kind, some, _ in parts)
        return None if found is None else PreparedGathers(found)

    def scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Event | None:
        """Enqueue the copy of staging into pages; the event of its end."""
        return self._scatter(pool, moves, staging)

    def prepare_scatter(self, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> Prepared | None:
        """Write the table of a scatter and bring it to the GPU."""
        return self._scatter.prepare(pool, moves, staging)

    def copy(self, moves: Sequence[PageMove], after: Event | None, flags: Sequence[Flag] = ()) -> Event | None:
        """Enqueue the copy of pages into pages behind ``after``; the event of its end.

        One stream raises the flags. Conversions raise none. Their launches follow one another, so that all of them
        together take no more of the GPU than one does.
        """
        if all(move.source.pool.site.converts is None for move in moves):
            return self._copy(moves, after, flags)
        return in_turn([partial(_copier(kind, self._programs), some) for kind, some in split_copies(moves)], after)

    def checksum(self, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
        """Enqueue the sums of cells, after their conversion, behind ``after``, and their copy to the host."""
        if pool.site.converts is None:
            return self._sum(pool, moves, after)
        parts = [(_summer(kind)(pool, some, after), masks) for kind, some, masks in kinds_of(pool).split(moves)]
        lengths = [len(move.layout.plane) for move in moves]

        def read() -> Sequence[U64]:
            found = [np.zeros(length, np.uint64) for length in lengths]
            for sums, masks in parts:
                for into, mask, of in zip(found, masks, sums.read(), strict=True):
                    into[mask] = of
            return found

        return Checksums(_all([sums.event for sums, _ in parts]), read)

    def warm(self, pool: MemoryPool) -> None:
        """Compile what moves a pool; see :meth:`..base.SupportsWarmUp.warm`."""
        for kind, numbers in kinds_of(pool).planes():
            launcher("gather", kind).warm(pool, numbers)
        if pool.site.converts is None:
            self._scatter.warm(pool)

    def warm_checksum(self, pool: MemoryPool) -> None:
        """Compile the checksums of a pool; see :meth:`..base.SupportsWarmUp.warm_checksum`."""
        for kind, numbers in kinds_of(pool).planes():
            _summer(kind).warm(pool, numbers)

    def warm_copy(self, source: PagedMemory, target: PagedMemory) -> None:
        """Compile copies from one pool into another; see :meth:`..base.SupportsWarmUp.warm_copy`."""
        for kind, numbers in kinds_of(source).planes():
            _copier(kind, self._programs).warm(source, target, numbers)


class PreparedGathers:
    """Several gathers as one; see :class:`..base.PreparedGather`."""

    def __init__(self, parts: Sequence[PreparedLaunch]) -> None:
        self._parts = parts

    def launch(self, base: int, after: Event | None) -> Event | None:
        """See :meth:`..base.PreparedGather.launch`."""
        try:
            return beside([partial(part.launch, base) for part in self._parts], after)
        finally:
            self.drop()

    def drop(self) -> None:
        """See :meth:`..base.Prepared.drop`."""
        for part in self._parts:
            part.drop()


def _prepared(parts: Iterable[PreparedLaunch | None]) -> list[PreparedLaunch] | None:
    """All parts; None where one of them cannot be prepared, or there are none."""
    found: list[PreparedLaunch] = []
    with ExitStack() as dropped:
        for part in parts:
            if part is None:
                return None
            dropped.callback(part.drop)
            found.append(part)
        dropped.pop_all()
    return found or None


def beside(launches: Iterable[Launch], after: Event | None) -> Event | None:
    """Launch all behind ``after``; the end of them. Where one raises, that comes once the others have ended."""
    events: list[Event | None] = []
    try:
        for launch in launches:
            events.append(launch(after))
    except BaseException:
        _finish(events)
        raise
    return _all(events)


def in_turn(launches: Iterable[Launch], after: Event | None) -> Event | None:
    """The same, each behind the one before it."""
    last: Event | None = None
    try:
        for launch in launches:
            event = launch(after if last is None else last)
            last = last if event is None else event
    except BaseException:
        _finish([last])
        raise
    return last


def _finish(events: Iterable[Event | None]) -> None:
    """Wait for what was launched; in a broken context nothing runs."""
    for event in events:
        if event is not None:
            with suppress(DisaggKVError):
                event.synchronize()


def _all(events: Sequence[Event | None]) -> Event | None:
    """The end of all of them; None: they have ended."""
    left = [event for event in events if event is not None]
    return left[0] if len(left) == 1 else All(left) if left else None
