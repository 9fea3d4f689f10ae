"""Launching conversions: one launch for each kind of them, and one for what is copied as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial

import numpy as np

from ..errors import DisaggKVError
from ..memory import All, Buffer, Event, MemoryPool, PagedMemory
from .base import Checksums, Move, PageMove
from .checksum.mixing import U64
from .triton_copy_launch import CopyLauncher
from .triton_kernels import Tuning
from .triton_kinds import Kind, kinds_of, split_copies
from .triton_launch import Launcher, PreparedLaunch
from .triton_sums import ChecksumLauncher

Launch = Callable[[Event | None], Event | None]
"""Launches behind an event, and returns that of its end; None: it has ended."""


@cache
def _gather(kind: Kind, tuning: Tuning | None) -> Launcher:
    return Launcher("gather_converted", tuning, kind)


@cache
def _copier(kind: Kind, programs: int | None, tuning: Tuning | None) -> CopyLauncher:
    return CopyLauncher(programs, tuning, kind)


@cache
def _sums(kind: Kind) -> ChecksumLauncher:
    return ChecksumLauncher(kind=kind)


def gather(
    plain: Launcher,
    pool: MemoryPool,
    moves: Sequence[Move],
    staging: Buffer,
    after: Event | None,
    tuning: Tuning | None = None,
) -> Event | None:
    """Gather from a pool that is read as another cache; ``plain`` copies what needs no conversion.

    ``tuning``: how conversions are cut; None: as :data:`.triton_kernels.TUNED` says.
    """
    launchers = _gathers(plain, pool, moves, tuning)
    return beside([partial(launcher, pool, some, staging) for launcher, some in launchers], after)


def prepare_gather(plain: Launcher, pool: MemoryPool, moves: Sequence[Move], staging: Buffer) -> PreparedGathers | None:
    """The same up to its launches; see :class:`.base.SupportsPreparing`."""
    launchers = _gathers(plain, pool, moves)
    found = _prepared(launcher.prepare(pool, some, staging, moved=True) for launcher, some in launchers)
    return None if found is None else PreparedGathers(found)


def _gathers(
    plain: Launcher, pool: MemoryPool, moves: Sequence[Move], tuning: Tuning | None = None
) -> Iterator[tuple[Launcher, list[Move]]]:
    for kind, some, _ in kinds_of(pool).split(moves):
        yield plain if kind is None else _gather(kind, tuning), some


def copy(
    plain: CopyLauncher,
    moves: Sequence[PageMove],
    after: Event | None,
    programs: int | None,
    tuning: Tuning | None = None,
) -> Event | None:
    """Copy or convert pages into pages; ``programs``: see :class:`.triton_copy_launch.CopyLauncher`.

    The launches follow one another, so that all of them together take no more of the GPU than one does.
    """
    return in_turn([partial(launcher, some) for launcher, some in _copies(plain, moves, programs, tuning)], after)


def _copies(
    plain: CopyLauncher, moves: Sequence[PageMove], programs: int | None, tuning: Tuning | None = None
) -> Iterator[tuple[CopyLauncher, list[PageMove]]]:
    for kind, some in split_copies(moves):
        yield plain if kind is None else _copier(kind, programs, tuning), some


def checksum(plain: ChecksumLauncher, pool: MemoryPool, moves: Sequence[Move], after: Event | None) -> Checksums:
    """The sums of such a pool's cells after their conversion."""
    parts = [
        ((plain if kind is None else _sums(kind))(pool, some, after), masks)
        for kind, some, masks in kinds_of(pool).split(moves)
    ]
    lengths = [len(move.layout.plane) for move in moves]

    def read() -> Sequence[U64]:
        found = [np.zeros(length, np.uint64) for length in lengths]
        for sums, masks in parts:
            for into, mask, of in zip(found, masks, sums.read(), strict=True):
                into[mask] = of
        return found

    return Checksums(_all([sums.event for sums, _ in parts]), read)


def warm(plain: Launcher, pool: MemoryPool) -> None:
    """Compile the gathers of such a pool; see :meth:`.base.SupportsWarmUp.warm`."""
    for kind in kinds_of(pool).every:
        (plain if kind is None else _gather(kind, None)).warm(pool)


def warm_checksum(plain: ChecksumLauncher, pool: MemoryPool) -> None:
    """Compile the checksums of a pool; see :meth:`.base.SupportsWarmUp.warm_checksum`."""
    for kind in kinds_of(pool).every:
        (plain if kind is None else _sums(kind)).warm(pool)


def warm_copy(plain: CopyLauncher, source: PagedMemory, target: PagedMemory, programs: int | None) -> None:
    """Compile copies from one pool into another; see :meth:`.base.SupportsWarmUp.warm_copy`."""
    for kind in kinds_of(source).every:
        (plain if kind is None else _copier(kind, programs, None)).warm(source, target)


class PreparedGathers:
    """Several gathers as one; see :class:`.base.PreparedGather`."""

    def __init__(self, parts: Sequence[PreparedLaunch]) -> None:
        self._parts = parts

    def launch(self, base: int, after: Event | None) -> Event | None:
        """See :meth:`.base.PreparedGather.launch`."""
        try:
            return beside([partial(part.launch, base) for part in self._parts], after)
        finally:
            self.drop()

    def drop(self) -> None:
        """See :meth:`.base.Prepared.drop`."""
        for part in self._parts:
            part.drop()


def _prepared(parts: Iterable[PreparedLaunch | None]) -> list[PreparedLaunch] | None:
    """All parts; None where one of them cannot be prepared, or there are none."""
    found: list[PreparedLaunch] = []
    complete = False
    try:
        for part in parts:
            if part is None:
                break
            found.append(part)
        else:
            complete = bool(found)
    finally:
        for part in () if complete else found:
            part.drop()
    return found if complete else None


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
