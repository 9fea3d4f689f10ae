"""The transfer plan of a decode rank: what it gets from the ranks of a prefill instance, and how that is cut.

Both sides compute this from the same shards, so that only ranges ever cross the wire, never sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import attrs
import numpy as np
from attrs import field, frozen

from ..errors import GeometryError, OversizeError
from ..geometry import I64, CacheSpec, Extent, Shard, Share, elect
from ..ids import LayerId, Rank
from .base import ALIGN, EVERY, Limits, RowRange, Segment
from .cache import PlanCache

_same = attrs.cmp_using(eq=np.array_equal)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


@frozen
class _Share:
    """What one writer sends of components of one extent: of a run of rows the ``index``-th of ``ways`` pieces."""

    writer: Rank
    index: int
    ways: int
    extent: Extent

    def rows(self, n: int) -> int:
        """How many of ``n`` rows; it depends on their number alone, not on where they begin."""
        return n * (self.index + 1) // self.ways - n * self.index // self.ways


_Cut = tuple[Segment, Limits]
"""A box, and what it is cut by."""

_Bound = tuple[_Share, int, int, int]
"""A share, its bytes of one row of some layers, and the rows that are needed of it: first and end."""


@frozen
class RankPlan:
    """The transfer plan of a rank: the parts that each writer sends to it, and the sizes of any segment of them.

    Build it with :meth:`build`.

    Args:
        parts: for each writer, by rank, what it was elected to send.
        stages: runs of layers that the target needs and that the same writers hold, ascending: a segment lies in one.

    Attributes:
        room: which rows the sizes are for, as far as they depend on that.
    """

    parts: tuple[tuple[Share, ...], ...]
    stages: tuple[range, ...]
    _stages_of: tuple[tuple[range, ...], ...]
    _shares: tuple[_Share, ...]
    _row_bytes: I64 = field(eq=_same)  # [layers of the span + 1, shares]: bytes of a row, summed over the layers before
    _first: int
    _kinds: tuple[tuple[range, tuple[Extent, ...]], ...]  # runs of layers whose components have the same extents
    _slides: bool
    room: RowRange = EVERY
    _known: PlanCache[tuple[int, int, bool], list[_Bound]] = field(init=False, factory=PlanCache, eq=False, repr=False)
    _rooms: PlanCache[RowRange, RankPlan] = field(init=False, factory=PlanCache, eq=False, repr=False)
    _cuts: PlanCache[_Cut, tuple[Segment, ...]] = field(init=False, factory=PlanCache, eq=False, repr=False)
    _sized: PlanCache[Segment, dict[Rank, int]] = field(init=False, factory=PlanCache, eq=False, repr=False)

    @classmethod
    def build(cls, spec: CacheSpec, writers: Sequence[Shard], target: Shard, rotation: int = 0) -> RankPlan:
        """Elect writers and prepare the arithmetic.

        Args:
            spec: the whole cache.
            writers: the shard of every rank of the prefill instance, by rank.
            target: the decode rank's shard.
            rotation: which replica takes which piece; any integer.

        Raises:
            GeometryError: as :func:`disagg_kv.geometry.elect`.
        """
        parts = elect(spec, writers, target, rotation)
        layers = target.layers()
        if not layers:
            raise GeometryError("the target holds no layers: there is nothing to send to it")
        stages, stages_of = _stages(layers, writers)
        first = layers[0]
        shares: dict[_Share, I64] = {}
        unit_bytes = _unit_bytes(spec, first, layers[-1] + 1)
        extents: dict[tuple[str, tuple[LayerId, ...]], dict[Extent, list[LayerId]]] = {}  # replicas share most of them
        for rank, mine in enumerate(parts):
            for part in mine:
                key = part.component, part.layers
                if key not in extents:
                    extents[key] = _by_extent(spec, part)
                for extent, of_part in extents[key].items():
                    share = _Share(Rank(rank), part.row_index, part.row_ways, extent)
                    of = shares.setdefault(share, np.zeros(layers[-1] - first + 2, np.int64))
                    index = np.array(of_part) - first
                    of[index + 1] += unit_bytes[part.component][index] * len(part.units)
        row_bytes = np.cumsum(np.stack(list(shares.values()), axis=1), axis=0)
        kinds = _kinds_of(spec, target, stages)
        return cls(parts, stages, stages_of, tuple(shares), row_bytes, first, kinds, spec.slides())

    def for_rows(self, rows: RowRange) -> RankPlan:
        """The same plan for a room of which decode awaits ``rows``; itself where that changes nothing.

        With a sliding window the sizes of a segment depend on where the room ends.
        """
        if not self._slides:
            return self
        found = self._rooms.get(rows)
        return self._rooms.keep(rows, attrs.evolve(self, room=rows)) if found is None else found

    def floor(self, start: int) -> int:
        """The first token of which anything is sent: ``start``, or where a window begins before it."""
        stop = self.room.stop
        return min(
            (e.bounds(start, stop)[0] for _, extents in self._kinds for e in extents if not e.rows), default=start
        )

    def needed(self, rows: RowRange) -> tuple[Segment, ...]:
        """What has to land: for each run of layers whose needs are alike its tokens, and its states.

        Args:
            rows: as for :meth:`for_rows`, with the room's end.
        """
        assert rows.stop is not None
        boxes: list[Segment] = []
        for layers, extents in self._kinds:
            tokens = [e.bounds(rows.start, self.room.stop)[0] for e in extents if not e.rows]
            if tokens and min(tokens) < rows.stop:
                boxes.append(Segment(min(tokens), rows.stop, layers.start, layers.stop))
            states = max(e.rows for e in extents)
            if states:
                boxes.append(Segment(0, states, layers.start, layers.stop, state=True))
        return tuple(boxes)

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
        if segment.state and segment.stop > self._state_rows(segment.layers):
            rows = self._state_rows(segment.layers)
            raise GeometryError(f"state rows up to {segment.stop}, but layers {segment.layers} have {rows}")

    def part_bytes(self, segment: Segment, writer: Rank) -> int:
        """Bytes that one writer sends of this segment."""
        return self._sizes(segment).get(writer, 0)

    def lease(self, segment: Segment, alignment: int = ALIGN) -> tuple[dict[Rank, tuple[int, int]], int]:
        """Where each writer's part lies in the segment's lease: ``{writer: (offset, nbytes)}``, and the lease's bytes.

        Writers without bytes are left out. Offsets and the whole are multiples of ``alignment``.
        """
        places: dict[Rank, tuple[int, int]] = {}
        offset = 0
        for writer, nbytes in self._sizes(segment).items():
            if nbytes:
                places[writer] = (offset, nbytes)
                offset += _ceil(nbytes, alignment) * alignment
        return places, offset

    def cut(self, start: int, stop: int, layers: range, limits: Limits) -> list[Segment]:
        """Cut the tokens ``[start, stop)`` of ``layers`` into segments, the same for every writer of these layers.

        All layers stay together, and rows are cut into near-equal pieces within the limits, of which the first and the
        last are half as long, at the nearest multiples of a page's rows where a page fits. Only where not even one row
        fits, the layers are cut too, into as few runs as possible. Where not all rows fit at once and a window begins
        among them, they are cut there first. Rows of which nothing is needed are in no segment.

        Args:
            start: first row.
            stop: one past the last row.
            layers: layer ids, a run within one of :attr:`stages`.
            limits: of staging memory.

        Raises:
            GeometryError: rows or layers that make no segment.
            OversizeError: one row of one layer is more than a limit.
        """
        key = Segment(start, stop, layers.start, layers.stop), limits
        known = self._cuts.get(key)
        if known is None:
            if not 0 <= start <= stop:
                raise GeometryError(f"cannot cut rows [{start}, {stop})")
            self._check_layers(layers)
            known = self._cuts.keep(key, tuple(self._cut(key[0], limits)))
        return list(known)

    def cut_states(self, layers: range, limits: Limits) -> list[Segment]:
        """Cut the states of ``layers`` into segments; none where they have no state. Else as :meth:`cut`."""
        key = Segment(0, 0, layers.start, layers.stop, state=True), limits
        known = self._cuts.get(key)
        if known is None:
            self._check_layers(layers)
            box = key[0]._replace(stop=self._state_rows(layers))
            segments = self._cut(box, attrs.evolve(limits, page_rows=1)) if box.rows else []
            known = self._cuts.keep(key, tuple(segments))
        return list(known)

    def segments(self, writer: Rank, start: int, stop: int, limits: Limits) -> list[Segment]:
        """Every segment of the layers that a writer holds: the tokens ``[start, stop)``, and the states.

        Raises:
            GeometryError, OversizeError: as :meth:`cut`.
        """
        return [
            segment
            for layers in self.ranges(writer)
            for segment in (*self.cut(start, stop, layers, limits), *self.cut_states(layers, limits))
        ]

    def _cut(self, box: Segment, limits: Limits) -> list[Segment]:
        bounds = self._bounds(box)
        if not bounds:
            return []
        low, high = max(box.start, min(a for a, _ in bounds)), min(box.stop, max(b for _, b in bounds))
        if low >= high:
            return []
        whole = box._replace(start=low, stop=high)
        if limits.exceeded(self._sizes(whole)) is None:
            return [whole]
        segments: list[Segment] = []
        for start, stop in pairwise(sorted({low, high, *(e for ab in bounds for e in ab if low < e < high)})):
            for run in self._layer_runs(box._replace(start=start, stop=start + 1), limits):
                segments += self._row_runs(run._replace(stop=stop), limits)
        return segments

    def _row_runs(self, box: Segment, limits: Limits) -> list[Segment]:
        """Near-equal runs of rows that fit, of which the first and the last are half as long; one row fits.

        While the first is gathered the wire is idle, and while the last is scattered: so both are short. All rows of
        ``box`` have the same bytes.
        """
        if not any(self._sizes(box).values()):
            return []
        most = self._most_rows(box, limits)
        step = limits.page_rows if most >= limits.page_rows else 1
        low, high = box.start // step, _ceil(box.stop, step)
        count = 1 if most == box.rows else _ceil(high - low, most // step)
        if count == 1:
            return [box]
        inner = {(low + ((high - low) * (2 * i + 1) + count) // (2 * count)) * step for i in range(count)}
        edges = [box.start, *sorted(edge for edge in inner if box.start < edge < box.stop), box.stop]
        return [box._replace(start=a, stop=b) for a, b in pairwise(edges)]

    def _check_layers(self, layers: range) -> None:
        if not any(stage.start <= layers.start < layers.stop <= stage.stop for stage in self.stages):
            runs = ", ".join(f"[{r.start}, {r.stop})" for r in self.stages)
            raise GeometryError(f"layers [{layers.start}, {layers.stop}) are not a run within one of {runs}")

    def _state_rows(self, layers: range) -> int:
        """The most rows that a state of these layers has; 0: they have none."""
        kinds = (e for of, extents in self._kinds if of.start < layers.stop and layers.start < of.stop for e in extents)
        return max((e.rows for e in kinds), default=0)

    def _shares_of(self, box: Segment) -> list[_Bound]:
        """Each share of the box's kind of rows that has bytes in its layers; remembered, as few runs of layers are."""
        key = (box.first, box.last, box.state)
        known = self._known.get(key)
        if known is None:
            row_bytes: list[int] = (
                self._row_bytes[box.last - self._first] - self._row_bytes[box.first - self._first]
            ).tolist()
            room, both = self.room, zip(self._shares, row_bytes, strict=True)
            known = [
                (share, n, *share.extent.bounds(room.start, room.stop))
                for share, n in both
                if n and (share.extent.rows > 0) == box.state
            ]
            self._known.keep(key, known)
        return known

    def _bounds(self, box: Segment) -> set[tuple[int, int]]:
        """The rows that are needed of the components of the box's layers."""
        return {(low, high) for _, _, low, high in self._shares_of(box)}

    def _sizes(self, box: Segment) -> dict[Rank, int]:
        """Bytes per writer, ascending; shares of one writer follow one another. Remembered: never change it."""
        sizes = self._sized.get(box)
        if sizes is None:
            sizes = {}
            for share, row_bytes, low, high in self._shares_of(box):
                rows = max(0, min(high, box.stop) - max(low, box.start))
                sizes[share.writer] = sizes.get(share.writer, 0) + share.rows(rows) * row_bytes
            self._sized.keep(box, sizes)
        return sizes

    def _layer_runs(self, row: Segment, limits: Limits) -> list[Segment]:
        """As few runs of the layers of one row as possible that fit."""
        if not limits.exceeded(self._sizes(row)):
            return [row]
        runs: list[Segment] = []
        first = row.first
        for layer in row.layers:
            if problem := limits.exceeded(self._sizes(row._replace(first=layer, last=layer + 1))):
                what, asked, capacity = problem
                raise OversizeError(f"{what}, for one row of layer {layer}", asked, capacity)
            if limits.exceeded(self._sizes(row._replace(first=first, last=layer + 1))):
                runs.append(row._replace(first=first, last=layer))
                first = layer
        return [*runs, row._replace(first=first)]

    def _most_rows(self, box: Segment, limits: Limits) -> int:
        """The most rows, up to those of the box, of which every number up to that fits.

        Of ``n`` rows a share takes ``n // ways`` of them, rounded up or down as it happens. Only the rounded-up number
        grows steadily with ``n``, so the search uses that; one row is known to fit.
        """
        shares = [(share, n) for share, n, first, end in self._shares_of(box) if first <= box.start < end]
        low, high = 1, box.rows
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


_rank_plans: PlanCache[tuple[CacheSpec, tuple[Shard, ...], Shard, int], RankPlan] = PlanCache()


def rank_plan_of(spec: CacheSpec, writers: tuple[Shard, ...], target: Shard, rotation: int) -> RankPlan:
    """The plan of these values: endpoints of one process that are split alike share it. As :meth:`RankPlan.build`."""
    key = spec, writers, target, rotation
    return _rank_plans.get(key) or _rank_plans.keep(key, RankPlan.build(*key))


def _stages(
    layers: tuple[LayerId, ...], writers: Sequence[Shard]
) -> tuple[tuple[range, ...], tuple[tuple[range, ...], ...]]:
    """Runs of layers that the same writers hold; and those of each writer."""
    stage_of = [frozenset(shard.layers()) for shard in writers]
    holders = [tuple(rank for rank, stage in enumerate(stage_of) if layer in stage) for layer in layers]
    starts = [i for i in range(len(layers)) if i == 0 or layers[i] != layers[i - 1] + 1 or holders[i] != holders[i - 1]]
    runs = [(range(layers[a], layers[b - 1] + 1), frozenset(holders[a])) for a, b in pairwise([*starts, len(layers)])]
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


def _by_extent(spec: CacheSpec, part: Share) -> dict[Extent, list[LayerId]]:
    """The layers of a part by the extent that its component has there."""
    layers: dict[Extent, list[LayerId]] = {}
    for layer in part.layers:
        layers.setdefault(spec.component(layer, part.component).extent, []).append(layer)
    return layers


def _kinds_of(spec: CacheSpec, target: Shard, stages: Sequence[range]) -> tuple[tuple[range, tuple[Extent, ...]], ...]:
    """Runs of layers, none across a stage, whose components that the target holds have the same extents."""
    extents: dict[LayerId, set[Extent]] = {}
    for holding in target:
        for layer in holding.layers:
            extents.setdefault(layer, set()).add(spec.component(layer, holding.component).extent)
    runs: list[tuple[range, tuple[Extent, ...]]] = []
    for stage in stages:
        alike = groupby(stage, key=lambda layer: extents[LayerId(layer)])
        for found, of in ((frozenset(found), list(of)) for found, of in alike):
            runs.append((range(of[0], of[-1] + 1), tuple(sorted(found, key=lambda e: (e.rows, e.window or 0)))))
    return tuple(runs)
