"""What one prefill rank sends to one decode rank, as both of their pools see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from attrs import field, frozen

from ..geometry import Group, Plane, Share, Site
from .base import EVERY, PageCopy, RowRange, Segment
from .cache import PlanCache
from .staged import PartView, part_view


@frozen
class Run:
    """The same rows of the same units of one plane on both sides; units are counted within each plane.

    Args:
        source, target: the planes; source_group, target_group: their page spaces.
        source_unit, target_unit: the first unit on either side.
        units: how many; unit_bytes: bytes of one.
        start, stop: the rows.
    """

    source: Plane
    target: Plane
    source_group: Group
    target_group: Group
    source_unit: int
    target_unit: int
    units: int
    unit_bytes: int
    start: int
    stop: int

    def dense(self) -> bool:
        """True where the units of a row follow one another on both sides."""
        return self.units == 1 or self.source.unit_stride == self.target.unit_stride == self.unit_bytes


@frozen
class RunKind:
    """Planes of some layers that take equal numbers of writes of any segment: most layers do.

    Args:
        run: one of them; its rows mean nothing.
        index, ways: which of how many near-equal pieces of a run of rows they have.
        low, high: the rows that are needed of them.
        planes: how many they are.
    """

    run: Run
    index: int
    ways: int
    low: int
    high: int
    planes: int

    def rows(self, segment: Segment) -> tuple[int, int]:
        """Which rows of a segment they have; none where the second is not above the first."""
        low = max(self.low, segment.start)
        needed = max(min(self.high, segment.stop) - low, 0)
        return low + needed * self.index // self.ways, low + needed * (self.index + 1) // self.ways


def _shares(parts: Iterable[Share]) -> tuple[Share, ...]:
    return tuple(parts)


@frozen(eq=False)
class PairPlan:
    """The parts that one writer was elected to send to one target. Immutable: one serves all rooms of the same window.

    Args:
        source: the writer's pool, read as the receiver's cache where that has other dtypes.
        target: the receiver's pool.
        parts: what the writer was elected to send.
        rows: which rows of a room are awaited.
    """

    source: Site
    target: Site
    parts: tuple[Share, ...] = field(converter=_shares)
    rows: RowRange = EVERY
    _kinds: PlanCache[tuple[int, int, bool], tuple[RunKind, ...]] = field(init=False, factory=PlanCache, repr=False)

    @cached_property
    def source_view(self) -> PartView:
        """The parts in the writer's pool.

        Pairs with the same bytes have the same view, so that they are gathered once.

        Raises:
            GeometryError: the pool does not have the parts.
        """
        return part_view(self.source, self.parts).for_rows(self.rows)

    @cached_property
    def target_view(self) -> PartView:
        """The parts in the receiver's pool.

        Raises:
            GeometryError: the pool does not have the parts.
        """
        return part_view(self.target, self.parts).for_rows(self.rows)

    def page_copy(self, segment: Segment) -> PageCopy:
        """What goes from the writer's pages into the receiver's for a segment.

        Raises:
            GeometryError: a pool does not have the parts.
        """
        return PageCopy(self.source_view.layout(segment), self.target_view.layout(segment))

    def runs(self, segment: Segment) -> Iterator[Run]:
        """The planes that a segment touches, in the order of the bytes of a staged segment.

        Raises:
            GeometryError: a pool does not have the parts.
        """
        yield from self._runs(self.source_view, self.target_view, segment)

    def _runs(self, here: PartView, there: PartView, segment: Segment) -> Iterator[Run]:
        source, target, ours, theirs = self.source, self.target, here.layout(segment), there.layout(segment)
        groups, others = ({group.id: group for group in site.groups} for site in (source, target))
        planes, rows = (ours.plane, theirs.plane), (ours.row_start, ours.row_stop)
        units = ours.first_unit, theirs.first_unit, ours.units
        columns = [column.tolist() for column in (*planes, *units, *rows)]
        for a, b, source_unit, target_unit, number, start, stop in zip(*columns, strict=True):
            one, other = source.planes[a], target.planes[b]
            yield Run(
                one,
                other,
                groups[one.group],
                others[other.group],
                source_unit,
                target_unit,
                number,
                source.spec.component(one.layer, one.component).unit_bytes,
                start,
                stop,
            )

    def kinds(self, segment: Segment) -> tuple[RunKind, ...]:
        """The planes of a segment's layers, by kind: a room is cut into many segments of the same layers."""
        key = segment.first, segment.last, segment.state
        found = self._kinds.get(key)
        return self._kinds.keep(key, self._kinds_of(segment)) if found is None else found

    def _kinds_of(self, segment: Segment) -> tuple[RunKind, ...]:
        source, target = self.source, self.target
        ours, theirs = self.source_view.planes(segment), self.target_view.planes(segment)
        columns = (ours.plane, theirs.plane, ours.units, ours.index, ours.ways, ours.lows, ours.highs)
        found: dict[tuple[int, ...], tuple[Run, int]] = {}
        for a, b, units, *bounds in zip(*(c.tolist() for c in columns), strict=True):
            one, other = source.planes[a], target.planes[b]
            group, unit_bytes = source.group(one.group), source.spec.component(one.layer, one.component).unit_bytes
            kind = (*bounds, units, unit_bytes, group.rows_per_page, one.row_stride, one.unit_stride, other.unit_stride)
            run, planes = found.get(kind, (None, 0))
            if run is None:
                run = Run(one, other, group, target.group(other.group), 0, 0, units, unit_bytes, 0, 1)
            found[kind] = run, planes + 1
        return tuple(RunKind(run, kind[0], kind[1], kind[2], kind[3], n) for kind, (run, n) in found.items())

    @cached_property
    def direct_refusal(self) -> str | None:
        """Why the two pools cannot exchange whole pages, with the numbers; None: they can.

        Raises:
            GeometryError: a pool does not have the parts.
        """
        layers = [layer for part in self.parts for layer in part.layers]
        if not layers:
            return None
        source, target = self.source, self.target
        every_row = max(part.row_ways for part in self.parts)
        tokens = Segment(0, every_row, min(layers), max(layers) + 1)
        states = Segment(0, source.spec.state_rows(), tokens.first, tokens.last, state=True)
        views = part_view(source, self.parts), part_view(target, self.parts)
        for run in (*self._runs(*views, tokens), *self._runs(*views, states)):
            where = f"layer {run.source.layer}, {run.source.component!r}"
            held, wanted = (
                sum(len(r) for r in site.shard.units(run.source.layer, run.source.component))
                for site in (source, target)
            )
            rows, theirs = run.source_group.rows_per_page, run.target_group.rows_per_page
            if rows != theirs and run.source.group not in source.state_groups:
                return f"{where}: pages of {rows} rows here and of {theirs} rows there"
            if not run.units == held == wanted:
                return f"{where}: {run.units} units to send, but rows have {held} units here and {wanted} there"
            if rows > 1 and run.source.row_stride != run.target.row_stride:
                return f"{where}: rows are {run.source.row_stride} bytes apart here and {run.target.row_stride} there"
            if held > 1 and run.source.unit_stride != run.target.unit_stride:
                ours, others = run.source.unit_stride, run.target.unit_stride
                return f"{where}: units are {ours} bytes apart here and {others} there"
        return None
