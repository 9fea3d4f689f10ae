"""What one decode rank gets from the ranks of a prefill instance, and how that is cut into segments.

Both sides compute this from the same shards, so that only ranges ever cross the wire, never sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np
from attrs import field, frozen

from ..errors import GeometryError, OversizeError
from ..geometry import I64, CacheSpec, Part, Shard, elect
from ..ids import LayerId, Rank
from .base import Segment

ALIGN = 256
"""Bytes to which writers' parts are aligned in a lease."""

_same = attrs.cmp_using(eq=np.array_equal)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


@frozen
class _Share:
    """What one writer sends of a run of rows: the ``index``-th of ``ways`` pieces of it."""

    writer: Rank
    index: int
    ways: int

    def rows(self, n: int) -> int:
        """How many of ``n`` rows; it depends on their number alone, not on where they begin."""
        return n * (self.index + 1) // self.ways - n * self.index // self.ways


@frozen
class Intake:
    """The parts that each writer sends to one target, and the sizes of any segment of them.

    Build it with :meth:`build`.

    Args:
        parts: for each writer, by rank, what it was elected to send.
        stages: runs of layers that the target needs and that the same writers hold, ascending: a segment lies in one.
    """

    parts: tuple[tuple[Part, ...], ...]
    stages: tuple[range, ...]
    _stages_of: tuple[tuple[range, ...], ...]
    _shares: tuple[_Share, ...]
    _row_bytes: I64 = field(eq=_same)  # [layers of the span + 1, shares]: bytes of a row, summed over the layers before
    _first: int

    @classmethod
    def build(cls, spec: CacheSpec, writers: Sequence[Shard], target: Shard, rotation: int = 0) -> Intake:
        """Elect writers and prepare the arithmetic.

        Args:
            spec: the whole cache.
            writers: the shard of every rank of the prefill instance, by rank.
            target: the decode rank's shard.
            rotation: which replica takes which piece; any integer.

        Raises:
            GeometryError, UnsupportedError: as :func:`disagg_kv.geometry.elect`.
        """
        parts = elect(spec, writers, target, rotation)
        layers = target.layers()
        if not layers:
            raise GeometryError("the target holds no layers: there is nothing to send to it")
        stages, stages_of = _stages(layers, writers)
        first = layers[0]
        shares: dict[_Share, I64] = {}
        unit_bytes = _unit_bytes(spec, first, layers[-1] + 1)
        for rank, mine in enumerate(parts):
            for part in mine:
                share = _Share(Rank(rank), part.row_index, part.row_ways)
                of = shares.setdefault(share, np.zeros(layers[-1] - first + 2, np.int64))
                index = np.array(part.layers) - first
                of[index + 1] += unit_bytes[part.component][index] * len(part.units)
        row_bytes = np.cumsum(np.stack(list(shares.values()), axis=1), axis=0)
        return cls(parts, stages, stages_of, tuple(shares), row_bytes, first)

    def ranges(self, writer: Rank) -> tuple[range, ...]:
        """The runs of layers that segments of this writer may span, ascending.

        A run is what its pipeline stage and the target share, split where layer ids are not contiguous and where the
        set of writers changes (the stages of an ordinary pipeline do not overlap; then the latter never happens).
        """
        return self._stages_of[writer]

    def validate(self, segment: Segment) -> None:
        """Raise a :class:`GeometryError` unless the segment has rows and lies within one of :attr:`stages`."""
        if not 0 <= segment.start < segment.stop:
            raise GeometryError(f"a segment of rows [{segment.start}, {segment.stop})")
        self._check_layers(segment.layers)

    def writers(self, segment: Segment) -> tuple[Rank, ...]:
        """The ranks that have bytes in this segment, ascending."""
        return tuple(w for w, nbytes in self._sizes(segment.rows, segment.layers).items() if nbytes)

    def part_bytes(self, segment: Segment, writer: Rank) -> int:
        """Bytes that one writer sends of this segment."""
        return self._sizes(segment.rows, segment.layers).get(writer, 0)

    def lease(self, segment: Segment, alignment: int = ALIGN) -> tuple[dict[Rank, tuple[int, int]], int]:
        """Where each writer's part lies in the segment's lease: ``{writer: (offset, nbytes)}``, and the lease's bytes.

        Writers without bytes are left out. Offsets and the whole are multiples of ``alignment``.
        """
        places: dict[Rank, tuple[int, int]] = {}
        offset = 0
        for writer, nbytes in self._sizes(segment.rows, segment.layers).items():
            if nbytes:
                places[writer] = (offset, nbytes)
                offset += _ceil(nbytes, alignment) * alignment
        return places, offset

    def cut(
        self,
        start: int,
        stop: int,
        layers: range,
        *,
        slot_bytes: int,
        lease_bytes: int,
        page_rows: int = 1,
        alignment: int = ALIGN,
    ) -> list[Segment]:
        """Cut the rows ``[start, stop)`` of ``layers`` into segments: the same on both sides, for the same arguments.

        All layers stay together, and rows are cut into as few near-equal pieces as the limits allow, at multiples of
        ``page_rows`` where a page fits. Only where not even one row fits, the layers are cut too, into as few runs as
        possible.

        Args:
            start: first row.
            stop: one past the last row.
            layers: a run of layers within one of :attr:`stages`.
            slot_bytes: what one writer's part may have at most.
            lease_bytes: what a whole lease may have at most.
            page_rows: rows of a page.
            alignment: as for :meth:`lease`.

        Raises:
            GeometryError: rows or layers that make no segment.
            OversizeError: one row of one layer is more than a limit.
        """
        if not 0 <= start <= stop or page_rows < 1:
            raise GeometryError(f"cannot cut rows [{start}, {stop}) at pages of {page_rows} rows")
        self._check_layers(layers)
        if start == stop:
            return []
        limits = _Limits(slot_bytes, lease_bytes, alignment)
        segments: list[Segment] = []
        for run in self._layer_runs(layers, limits):
            most = self._most_rows(stop - start, run, limits)
            step = page_rows if most >= page_rows else 1
            low, high = start // step, _ceil(stop, step)
            count = 1 if most == stop - start else _ceil(high - low, most // step)
            edges = [start, *((low + _ceil((high - low) * i, count)) * step for i in range(1, count)), stop]
            segments += [Segment(a, b, run.start, run.stop) for a, b in pairwise(edges)]
        return segments

    def _check_layers(self, layers: range) -> None:
        if not any(stage.start <= layers.start < layers.stop <= stage.stop for stage in self.stages):
            runs = ", ".join(f"[{r.start}, {r.stop})" for r in self.stages)
            raise GeometryError(f"layers [{layers.start}, {layers.stop}) are not a run within one of {runs}")

    def _shares_of(self, layers: range) -> list[tuple[_Share, int]]:
        """Each share with its bytes of one row of these layers."""
        row_bytes: list[int] = (
            self._row_bytes[layers.stop - self._first] - self._row_bytes[layers.start - self._first]
        ).tolist()
        return list(zip(self._shares, row_bytes, strict=True))

    def _sizes(self, rows: int, layers: range) -> dict[Rank, int]:
        """Bytes per writer, ascending; shares of one writer follow one another."""
        sizes: dict[Rank, int] = {}
        for share, row_bytes in self._shares_of(layers):
            sizes[share.writer] = sizes.get(share.writer, 0) + share.rows(rows) * row_bytes
        return sizes

    def _layer_runs(self, layers: range, limits: _Limits) -> list[range]:
        """As few runs of layers as possible of which one row fits."""
        if not limits.exceeded(self._sizes(1, layers)):
            return [layers]
        runs: list[range] = []
        first = layers.start
        for layer in layers:
            if problem := limits.exceeded(self._sizes(1, range(layer, layer + 1))):
                what, asked, capacity = problem
                raise OversizeError(f"{what}, for one row of layer {layer}", asked, capacity)
            if limits.exceeded(self._sizes(1, range(first, layer + 1))):
                runs.append(range(first, layer))
                first = layer
        return [*runs, range(first, layers.stop)]

    def _most_rows(self, rows: int, layers: range, limits: _Limits) -> int:
        """The most rows, up to ``rows``, of which every number up to that fits.

        Of ``n`` rows a share takes ``n // ways`` of them, rounded up or down as it happens. Only the rounded-up number
        grows steadily with ``n``, so the search uses that; one row is known to fit.
        """
        shares = self._shares_of(layers)
        low, high = 1, rows
        while low < high:
            middle = (low + high + 1) // 2
            sizes: dict[Rank, int] = {}
            for share, row_bytes in shares:
                sizes[share.writer] = sizes.get(share.writer, 0) + _ceil(middle, share.ways) * row_bytes
            if limits.exceeded(sizes):
                high = middle - 1
            else:
                low = middle
        return low


@frozen
class _Limits:
    slot_bytes: int
    lease_bytes: int
    alignment: int

    def exceeded(self, sizes: dict[Rank, int]) -> tuple[str, int, int] | None:
        """What does not fit, its bytes and the limit; None: everything fits."""
        largest = max(sizes.values())
        if largest > self.slot_bytes:
            return "staging slot", largest, self.slot_bytes
        lease = sum(_ceil(nbytes, self.alignment) * self.alignment for nbytes in sizes.values())
        return ("staging lease", lease, self.lease_bytes) if lease > self.lease_bytes else None


def _stages(
    layers: tuple[LayerId, ...], writers: Sequence[Shard]
) -> tuple[tuple[range, ...], tuple[tuple[range, ...], ...]]:
    """Runs of layers that the same writers hold; and those of each writer."""
    stage_of = [frozenset(shard.layers()) for shard in writers]
    holders = [tuple(rank for rank, stage in enumerate(stage_of) if layer in stage) for layer in layers]
    starts = [i for i in range(len(layers)) if i == 0 or layers[i] != layers[i - 1] + 1 or holders[i] != holders[i - 1]]
    runs = [(range(layers[a], layers[b - 1] + 1), holders[a]) for a, b in pairwise([*starts, len(layers)])]
    of = tuple(tuple(run for run, ranks in runs if rank in ranks) for rank in range(len(writers)))
    return tuple(run for run, _ in runs), of


def _unit_bytes(spec: CacheSpec, first: int, last: int) -> dict[str, I64]:
    """Bytes of one unit of one row per component, by layer of ``[first, last)``; 0 where a layer lacks it."""
    table = {name: np.zeros(last - first, np.int64) for name in spec.names()}
    for layer, components in spec.layers.items():
        if first <= layer < last:
            for component in components:
                table[component.name][layer - first] = component.unit_bytes
    return table
