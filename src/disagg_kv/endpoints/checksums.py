"""Checksums per layer, of a writer's part of a segment: prefill sends them, decode compares its own pages with them.

Both sides sum their *pages*: what is wrong in gather, on the wire, in the ring, in scatter, or in either side's idea of
which page holds which row shows; sums of what lies in staging would miss half of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from attrs import frozen

from ..core import SUM_BYTES
from ..errors import IntegrityError
from ..geometry import Site
from ..ids import Rank
from ..kernels import Kernels, Move
from ..kernels.checksum.mixing import U64
from ..memory import Event, MemoryPool
from ..planning import Segment, StagedLayout
from ..strategies import Tables

K = TypeVar("K", bound=Hashable)

NAMED = 16
"""Pages that a message names; of more it says how many."""


@frozen
class PendingChecksums(Generic[K]):
    """Sums that are being computed.

    Args:
        event: when they are there; None: already.
        read: gives them after that, once: per key the sums of a segment's layers, as ``ChunkReady`` carries them.
    """

    event: Event | None
    read: Callable[[], Mapping[K, bytes]]


def layer_sums(
    kernels: Kernels,
    pool: MemoryPool,
    segment: Segment,
    layouts: Mapping[K, StagedLayout],
    tables: Tables,
    after: Event | None,
) -> PendingChecksums[K]:
    """Sum parts of one segment where they lie in our pages, all in one launch, after ``after``.

    Args:
        kernels: for the pool's device.
        pool: ours.
        segment: what all parts are of.
        layouts: the parts, in our pool.
        tables: the room's pages.
        after: when the pages hold what they should.
    """
    sums = kernels.checksum(pool, [Move(layout, tables, 0) for layout in layouts.values()], after)

    def read() -> Mapping[K, bytes]:
        found = zip(layouts.items(), sums.read(), strict=True)
        return {key: _by_layer(pool.site, segment, layout, of) for (key, layout), of in found}

    return PendingChecksums(sums.event, read)


def _by_layer(site: Site, segment: Segment, layout: StagedLayout, entries: U64) -> bytes:
    layers = np.zeros(len(segment.layers), np.uint64)
    where = np.array([site.planes[number].layer for number in layout.plane.tolist()], np.int64) - segment.first
    np.add.at(layers, where, entries)
    return layers.astype("<u8").tobytes()


def compare(
    where: str,
    site: Site,
    segment: Segment,
    tables: Tables,
    layouts: Mapping[Rank, StagedLayout],
    theirs: Mapping[Rank, bytes],
    ours: Mapping[Rank, bytes],
    path: str,
) -> IntegrityError | None:
    """What arrived but is not what was sent; None: everything is.

    Args:
        where: the room, for the message.
        site: our pool.
        segment: what arrived.
        tables: the room's pages.
        layouts: each writer's part in our pool.
        theirs: what each writer's part sums up to in its pages, per layer.
        ours: the same in our pages.
        path: how the bytes crossed.
    """
    found: list[str] = []
    for rank, said in theirs.items():
        for i, layer in enumerate(segment.layers):
            sums = [one[rank][i * SUM_BYTES : (i + 1) * SUM_BYTES][::-1].hex() for one in (theirs, ours)]
            if sums[0] != sums[1]:
                rows, pages = _place(site, layouts[rank], layer, tables)
                found.append(
                    f"layer {layer}, rows {rows} ({pages}), written by prefill rank {rank} by path {path}: "
                    f"the sum is {sums[1]}, the writer's {sums[0]}"
                )
        assert len(said) == len(ours[rank])
    if not found:
        return None
    more = f"; and {len(found) - 1} more layers of this segment" if len(found) > 1 else ""
    return IntegrityError(f"{where}: {found[0]}{more}")


def _place(site: Site, layout: StagedLayout, layer: int, tables: Tables) -> tuple[str, str]:
    """The rows of a part in a layer, and the pages in which we keep them."""
    entries = [i for i, number in enumerate(layout.plane.tolist()) if site.planes[number].layer == layer]
    if not entries:
        return "none", "nothing was expected"
    start, stop = int(layout.row_start[entries].min()), int(layout.row_stop[entries].max())
    group = site.group(site.planes[int(layout.plane[entries[0]])].group)
    table = tables[group.id]
    first, last = (start - table.first) // group.rows_per_page, -(-(stop - table.first) // group.rows_per_page)
    pages: Sequence[int] = table.pages[first:last].tolist()
    named = ", ".join(map(str, pages[:NAMED]))
    return f"{start}-{stop}", f"pages {named}" + (f" and {len(pages) - NAMED} more" if len(pages) > NAMED else "")
