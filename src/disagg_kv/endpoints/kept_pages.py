"""Checksums of the pages that decode keeps: what a request builds on must still be what was kept.

Each page is summed when its rows are final, and once more when a room builds on it; the second sum is compared with the
first, never with one of prefill's. Rows that decode computed itself are rounded otherwise than prefill's, but nothing
may change them while they are held either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import field, frozen

from .. import arguments
from ..errors import DisaggKVError, GeometryError, PrefixChangedError
from ..geometry import I32, I64, PageTable, Plane, Site
from ..ids import GroupId, LayerId
from ..kernels import Kernels, Move
from ..kernels.checksum.mixing import U64
from ..memory import Event, MemoryPool
from ..planning import StagedLayout


@frozen(eq=False)
class CachedPages:
    """Pages of a held prefix in one group, and what they summed up to when their rows became final.

    Args:
        table: from row 0 on.
        sums: uint64 ``[pages, layers]``, as :func:`page_sums` gives them.
    """

    table: PageTable
    sums: U64 = field(repr=False)

    def __attrs_post_init__(self) -> None:
        arguments.one(self.table, "kept pages: table", PageTable, GeometryError)
        sums: object = self.sums
        if not isinstance(sums, np.ndarray):
            raise arguments.wrong("kept pages: sums", sums, "uint64 [pages, layers] is needed", GeometryError)


@frozen(eq=False)
class PageChecksums:
    """Sums of pages that are being computed.

    Args:
        event: when they are there, and pages are read no more; None: already.
        read: gives them after that, once: uint64 ``[pages, layers]``.
    """

    event: Event | None
    read: Callable[[], U64]


def kept_layers(site: Site, group: GroupId) -> tuple[LayerId, ...]:
    """The layers of a group whose held rows are built on, ascending: all but those that only have a sliding window.

    The rows that a window still sees are sent afresh, so that none of them is ever built on.
    """
    return site.kept_layers.get(group, ())


def page_sums(
    kernels: Kernels, pool: MemoryPool, table: PageTable, which: Sequence[int], after: Event | None = None
) -> PageChecksums:
    """Sum whole pages of a request where they lie, all in one launch, per layer of :func:`kept_layers`.

    Equal rows at the same place of a prompt have equal sums in every pool that holds the same heads, whatever its page
    ids and layout; a page that stands at another place of the prompt has others.

    Args:
        kernels: for the pool's device.
        pool: ours.
        table: the request's pages.
        which: of them, those to sum, counted from the table's first.
        after: when the pages hold what they should; None: already.

    Raises:
        ConfigurationError: another type.
        GeometryError: no such group or page, or a number that is not one of the table's.
    """
    arguments.methods(kernels, "kernels", "a set of kernels", "checksum")
    arguments.attributes(pool, "pool", "a pool", "site", "buffers")
    arguments.one(table, "table", PageTable, GeometryError)
    arguments.event(after, "after")
    which = arguments.counts(which, "which", error=GeometryError)
    if which and max(which) >= len(table.pages):
        raise GeometryError(f"page {max(which)} of a table of {len(table.pages)} pages")
    size = pool.site.group(table.group).rows_per_page
    table.check(pool.site.group(table.group), table.first, table.first + len(table.pages) * size)
    parts = _Parts.of(pool.site, table.group)
    starts = [table.first + number * size for number in which]
    moves = [Move(parts.rows(start, start + size), {table.group: table}, 0) for start in starts]
    sums = kernels.checksum(pool, moves, after)
    return PageChecksums(
        sums.event, lambda: np.array([parts.by_layer(of) for of in sums.read()]).reshape(len(moves), -1)
    )


def check_kept(where: str, site: Site, kept: Sequence[CachedPages], start: int) -> tuple[CachedPages, ...]:
    """Kept pages as far as row ``start``; the engine may reuse its arrays.

    Raises:
        GeometryError: they are not of every group that is built on, each once, from row 0 to ``start``.
    """
    groups = [group.id for group in site.token_groups if kept_layers(site, group.id)]
    if sorted(one.table.group for one in kept) != sorted(groups):
        given = [one.table.group for one in kept]
        raise GeometryError(f"{where}: sums of kept pages of groups {given}; there are {groups}")
    found = []
    for one in kept:
        group = site.group(one.table.group)
        pages, layers = start // group.rows_per_page, len(kept_layers(site, group.id))
        if one.table.first or one.sums.dtype != np.uint64 or one.sums.shape != (len(one.table.pages), layers):
            raise GeometryError(
                f"{where}: kept pages of group {group.id!r} begin at row {one.table.first}, not 0, or have sums "
                f"{one.sums.dtype} {one.sums.shape}, not uint64 ({len(one.table.pages)}, {layers})"
            )
        cut = PageTable(group.id, one.table.pages[:pages].copy())
        try:
            cut.check(group, 0, start)
        except GeometryError as exc:
            raise GeometryError(f"{where}: kept pages: {exc}") from exc
        found.append(CachedPages(cut, one.sums[:pages].copy()))
    return tuple(found)


class CachedPagesCheck:
    """Whether the kept pages of one room are what they were; one launch where they are, one more to name what is not.

    Args:
        where: the room, for the message.
        kernels: for the pool's device.
        pool: ours.
        kept: as :func:`check_kept` gives them.
    """

    def __init__(self, where: str, kernels: Kernels, pool: MemoryPool, kept: Sequence[CachedPages]) -> None:
        self._where = where
        self._kernels = kernels
        self._pool = pool
        self._left = deque(kept)
        self._event: Event | None = None
        self._look: Callable[[], None] | None = None

    def done(self) -> bool:
        """Go on; True once nothing is read any more and every page is what it was.

        Raises:
            PrefixChangedError: one is not.
            DisaggKVError: the sums could not be made.
        """
        try:
            while self._event is None or self._event.query():
                look, self._look, self._event = self._look, None, None
                if look is not None:
                    look()
                if self._look is None:
                    if not self._left:
                        return True
                    self._sum(self._left.popleft())
        except DisaggKVError:
            raise
        except Exception as exc:
            raise DisaggKVError(f"{self._where}: what is held could not be summed: {exc}") from exc
        return False

    def _sum(self, kept: CachedPages) -> None:
        """Sums add up: one sum over all pages says whether all are right."""
        site = self._pool.site
        group = site.group(kept.table.group)
        parts = _Parts.of(site, group.id)
        rows = parts.rows(0, len(kept.table.pages) * group.rows_per_page)
        sums = self._kernels.checksum(self._pool, [Move(rows, {group.id: kept.table}, 0)], None)

        def look() -> None:
            (found,) = sums.read()
            if not np.array_equal(parts.by_layer(found), kept.sums.sum(axis=0, dtype=np.uint64)):
                self._name(kept)

        self._event, self._look = sums.event, look

    def _name(self, kept: CachedPages) -> None:
        """Sum page by page, to say which."""
        sums = page_sums(self._kernels, self._pool, kept.table, range(len(kept.table.pages)))

        def look() -> None:
            raise _changed(self._where, self._pool.site, kept, sums.read())

        self._event, self._look = sums.event, look


def _changed(where: str, site: Site, kept: CachedPages, found: U64) -> PrefixChangedError:
    group, wrong = site.group(kept.table.group), np.argwhere(found != kept.sums)
    if not len(wrong):
        return PrefixChangedError(f"{where}: pages of group {group.id!r} changed while the held prefix was summed", 0)
    number, column = wrong[0].tolist()
    layer, first = kept_layers(site, group.id)[column], number * group.rows_per_page
    others = len(np.unique(wrong[:, 0])) - 1
    more = f"; so have {others} pages after it" if others else ""
    return PrefixChangedError(
        f"{where}: layer {layer} of page {int(kept.table.pages[number])} of group {group.id!r}, held rows "
        f"{first}-{first + group.rows_per_page}, has changed since it was kept: the sum is "
        f"{int(found[number, column]):016x}, it was {int(kept.sums[number, column]):016x}{more}",
        first,
    )


@frozen(eq=False)
class _Parts:
    """Every unit of a group that held rows have, in runs: what checksums are made of."""

    plane: I32
    first_unit: I32
    units: I32
    column: I64
    layers: int

    @classmethod
    def of(cls, site: Site, group: GroupId) -> _Parts:
        """A group's."""
        columns = {layer: i for i, layer in enumerate(kept_layers(site, group))}
        found: list[tuple[int, int, int, int]] = []
        for number, plane in _planes(site, group):
            first = 0
            for run in site.shard.units(plane.layer, plane.component):
                found.append((number, first, len(run), columns[plane.layer]))
                first += len(run)
        table = np.array(found, np.int64).reshape(-1, 4)
        numbers, first_unit, units = (table[:, i].astype(np.int32) for i in range(3))
        return cls(numbers, first_unit, units, table[:, 3], len(columns))

    def rows(self, start: int, stop: int) -> StagedLayout:
        """These rows of everything; they go nowhere."""
        n = len(self.plane)
        starts, stops = np.full(n, start, np.int64), np.full(n, stop, np.int64)
        return StagedLayout(self.plane, self.first_unit, self.units, starts, stops, np.zeros(n, np.int64), 0)

    def by_layer(self, entries: U64) -> U64:
        """Entries' sums, added up per layer."""
        sums = np.zeros(self.layers, np.uint64)
        np.add.at(sums, self.column, entries)
        return sums


def _planes(site: Site, group: GroupId) -> Iterator[tuple[int, Plane]]:
    for number, plane in enumerate(site.planes):
        if plane.group == group and not site.spec.component(plane.layer, plane.component).window:
            yield number, plane
