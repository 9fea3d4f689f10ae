"""What planning produces: segments, staged layouts and batches of writes. Values only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import attrs
import numpy as np
from attrs import field, frozen

from ..errors import GeometryError
from ..geometry import I32, I64
from ..ids import Rank

ALIGN = 256
"""Bytes to which writers' parts are aligned in a lease."""

_same = attrs.cmp_using(eq=np.array_equal)


class Segment(NamedTuple):
    """A rectangle of the cache: rows ``[start, stop)`` of the layers ``[first, last)``.

    It is the unit and the key of request, lease, gather, write, notice and scatter. The rows are tokens, or with
    ``state`` those of recurrent states; of a component that has not all of them it means those that there are.

    A tuple, because a transfer looks each of its segments up some fifty times, and C computes the hash of a tuple.
    """

    start: int
    stop: int
    first: int
    last: int
    state: bool = False

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start

    def labels(self) -> dict[str, str]:
        """Labels of its spans in traces."""
        kind = "states" if self.state else "rows"
        return {"layers": f"{self.first}-{self.last}", kind: f"{self.start}-{self.stop}"}

    @property
    def layers(self) -> range:
        """The layers, as a range of layer ids."""
        return range(self.first, self.last)


@frozen
class RowRange:
    """Which tokens of a room decode awaits; the rows that a window needs follow from it.

    Args:
        start: the first row; decode holds those before it.
        stop: one past the room's last row; None: not known yet.
    """

    start: int = 0
    stop: int | None = None


EVERY = RowRange()
"""All tokens of a room of any length."""


@frozen
class Limits:
    """What cuts rows and layers into segments: the staging memory of both sides, and the pages.

    Args:
        slot_bytes: the most bytes that one writer's part of a segment may have.
        lease_bytes: the most bytes that the lease of a segment may have.
        page_rows: rows of a page; segments end at multiples of it where a page fits.
        alignment: bytes; each writer's part begins at a multiple of it in the lease.

    Raises:
        GeometryError: ``page_rows`` or ``alignment`` are below 1.
    """

    slot_bytes: int
    lease_bytes: int
    page_rows: int = 1
    alignment: int = ALIGN

    def __attrs_post_init__(self) -> None:
        if min(self.page_rows, self.alignment) < 1:
            raise GeometryError(f"segments at pages of {self.page_rows} rows, parts aligned to {self.alignment} bytes")

    def aligned(self, nbytes: int) -> int:
        """``nbytes``, rounded up to the alignment."""
        return -(-nbytes // self.alignment) * self.alignment

    def exceeded(self, sizes: Mapping[Rank, int]) -> tuple[str, int, int] | None:
        """The limit that parts of these bytes exceed: its name, the bytes asked, the limit; None: they fit."""
        largest = max(sizes.values(), default=0)
        if largest > self.slot_bytes:
            return "staging slot", largest, self.slot_bytes
        lease = sum(map(self.aligned, sizes.values()))
        return ("staging lease", lease, self.lease_bytes) if lease > self.lease_bytes else None


UNLIMITED = Limits(1 << 62, 1 << 62)
"""Limits of a path that needs no staging memory."""


@frozen
class StagedLayout:
    """One writer's part of one segment, as seen from one pool: one entry per plane, in the order of the bytes.

    Entry ``i`` says: the rows ``[row_start[i], row_stop[i])`` of the room, units ``first_unit[i]`` and the
    ``units[i] - 1`` after it (counted within the plane) of the pool's plane ``plane[i]`` lie at byte ``offset[i]`` of
    the part as ``[rows, units, unit_bytes]`` without padding.

    Args:
        plane: int32 ``[n]``; first_unit: int32 ``[n]``; units: int32 ``[n]``.
        row_start: int64 ``[n]``; row_stop: int64 ``[n]``; offset: int64 ``[n]``.
        nbytes: bytes of the whole part.
    """

    plane: I32 = field(eq=_same)
    first_unit: I32 = field(eq=_same)
    units: I32 = field(eq=_same)
    row_start: I64 = field(eq=_same)
    row_stop: I64 = field(eq=_same)
    offset: I64 = field(eq=_same)
    nbytes: int
    alike: Hashable = field(default=None, init=False, eq=False, repr=False)
    """Parts that are equal in this differ in nothing but ``row_start[0]``; None, as after ``evolve``: not known."""

    def one_of(self, alike: Hashable) -> StagedLayout:
        """Mark this part and others that differ from it in nothing but ``row_start[0]``; returns the part."""
        object.__setattr__(self, "alike", alike)
        return self


@frozen
class PageCopy:
    """One writer's part of one segment from pages to pages: the same rows and units, as seen from two pools.

    Entry ``i`` of ``source`` and entry ``i`` of ``target`` name equal rows and equally many units of equal bytes. The
    offsets in staging mean nothing here. :meth:`.PairPlan.page_copy` makes one.

    Args:
        source: in the pool that is read.
        target: in the pool that is written.
    """

    source: StagedLayout
    target: StagedLayout

    def __attrs_post_init__(self) -> None:
        ours, theirs = self.source, self.target
        assert ours.nbytes == theirs.nbytes
        assert len(ours.plane) == len(theirs.plane)


@frozen
class Writes:
    """A batch of one-sided writes that ends as one: ``nbytes`` bytes from (local, local_off) to (remote, remote_off).

    A planner fills ``local`` and ``remote`` with buffer numbers of the two sites; :meth:`renamed` makes region ids.

    Args:
        local: int32 ``[n]``; local_off: int64 ``[n]``, bytes.
        remote: int32 ``[n]``; remote_off: int64 ``[n]``, bytes.
        nbytes: int64 ``[n]``.
    """

    local: I32 = field(eq=_same)
    local_off: I64 = field(eq=_same)
    remote: I32 = field(eq=_same)
    remote_off: I64 = field(eq=_same)
    nbytes: I64 = field(eq=_same)

    def __attrs_post_init__(self) -> None:
        n = len(self.local)
        assert len(self.local_off) == len(self.remote) == len(self.remote_off) == len(self.nbytes) == n

    def __len__(self) -> int:
        return len(self.local)

    @classmethod
    def one(cls, local: int, local_off: int, remote: int, remote_off: int, nbytes: int) -> Writes:
        """A single write: what the staged path posts per segment, writer and destination."""
        regions, places = np.array([local, remote], np.int32), np.array([local_off, remote_off, nbytes], np.int64)
        return cls(regions[:1], places[:1], regions[1:], places[1:2], places[2:])

    def renamed(self, local: I32, remote: I32) -> Writes:
        """The same writes with ``local[i]`` and ``remote[i]`` in place of buffer ``i``."""
        return Writes(local[self.local], self.local_off, remote[self.remote], self.remote_off, self.nbytes)

    def batches(self, most: int | None) -> Iterator[Writes]:
        """The same writes, in batches of at most ``most``; None: in one."""
        if most is None or len(self) <= most:
            yield self
            return
        for start in range(0, len(self), most):
            cut = slice(start, start + most)
            yield Writes(self.local[cut], self.local_off[cut], self.remote[cut], self.remote_off[cut], self.nbytes[cut])

    def total(self) -> int:
        """Bytes of the whole batch."""
        return int(self.nbytes.sum())
