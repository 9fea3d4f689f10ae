"""Launching conversions: one launch for each kind of them, and one for what is copied as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ..memory import All, Buffer, Event, MemoryPool
from .base import Checksums, Move
from .checksum.mixing import U64
from .triton_kinds import Kind, kinds_of
from .triton_launch import Launcher
from .triton_sums import ChecksumLauncher


@cache
def _gather(kind: Kind) -> Launcher:
    return Launcher("gather_converted", kind=kind)


@cache
def _sums(kind: Kind) -> ChecksumLauncher:
    return ChecksumLauncher(kind=kind)


def gather(
    plain: Launcher, pool: MemoryPool, moves: Sequence[Move], staging: Buffer, after: Event | None
) -> Event | None:
    """Gather from a pool that is read as another cache; ``plain`` copies what needs no conversion."""
    launchers = ((plain if kind is None else _gather(kind), some) for kind, some, _ in kinds_of(pool).split(moves))
    return _all([launcher(pool, some, staging, after) for launcher, some in launchers])


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


def _all(events: Sequence[Event | None]) -> Event | None:
    """The end of all of them; None: they have ended."""
    left = [event for event in events if event is not None]
    return left[0] if len(left) == 1 else All(left) if left else None
