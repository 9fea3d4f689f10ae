"""Which rows of which layers have landed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from attrs import define, field

from ..errors import GeometryError


@define
class _Band:
    """The layers ``[first, last)``, which all have the same rows: the sorted, disjoint ``[starts[i], stops[i])``."""

    first: int
    last: int
    starts: list[int] = field(factory=list)
    stops: list[int] = field(factory=list)

    def part(self, first: int, last: int) -> _Band:
        return _Band(first, last, self.starts.copy(), self.stops.copy())

    def add(self, start: int, stop: int) -> None:
        """Put in ``[start, stop)``; runs that it touches become one with it."""
        a, b = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if a < b:
            start, stop = min(start, self.starts[a]), max(stop, self.stops[b - 1])
        self.starts[a:b] = [start]
        self.stops[a:b] = [stop]

    def until(self, start: int) -> int:
        """The largest ``stop`` such that ``[start, stop)`` is in; ``start`` if it is not."""
        i = bisect_right(self.starts, start) - 1
        return max(start, self.stops[i]) if i >= 0 else start

    def touches(self, start: int, stop: int) -> bool:
        """True if any row of ``[start, stop)`` is in."""
        i = bisect_right(self.stops, start)
        return i < len(self.starts) and self.starts[i] < stop


class Coverage:
    """A set of cells (row, layer) that grows by rectangles.

    Layers with the same rows share one list of intervals, and adjacent intervals merge: rectangles that arrive in
    order cost constant memory.
    """

    def __init__(self) -> None:
        self._bands: list[_Band] = []

    def add(self, start: int, stop: int, first: int, last: int) -> None:
        """Put in the rows ``[start, stop)`` of the layers ``[first, last)``; cells that are in already stay.

        Raises:
            GeometryError: an empty or negative rectangle.
        """
        if not (0 <= start < stop and 0 <= first < last):
            raise GeometryError(f"rows [{start}, {stop}) of layers [{first}, {last}) are not a rectangle of the cache")
        if not self._bands:
            self._bands.append(_Band(first, last))
        if len(self._bands) == 1 and (self._bands[0].first, self._bands[0].last) == (first, last):
            self._bands[0].add(start, stop)  # as nearly always: no other band can become its equal
            return
        self._cut(first)
        self._cut(last)
        low, high = self._between(first, last)
        filled: list[_Band] = []
        for band in self._bands[low:high]:
            position = filled[-1].last if filled else first
            if position < band.first:
                filled.append(_Band(position, band.first))
            filled.append(band)
        position = filled[-1].last if filled else first
        if position < last:
            filled.append(_Band(position, last))
        for band in filled:
            band.add(start, stop)
        before, after = max(0, low - 1), min(len(self._bands), high + 1)
        self._bands[before:after] = _joined([*self._bands[before:low], *filled, *self._bands[high:after]])

    def contains(self, start: int, stop: int, first: int, last: int) -> bool:
        """True if every cell of the rectangle is in; an empty rectangle always is."""
        if start >= stop or first >= last:
            return True
        low, high = self._between(first, last)
        position = first
        for band in self._bands[low:high]:
            if band.first > position or band.until(start) < stop:
                return False
            position = band.last
        return position >= last

    def overlaps(self, start: int, stop: int, first: int, last: int) -> bool:
        """True if any cell of the rectangle is in; of an empty rectangle none is."""
        if start >= stop or first >= last:
            return False
        low, high = self._between(first, last)
        return any(band.touches(start, stop) for band in self._bands[low:high])

    def _between(self, first: int, last: int) -> tuple[int, int]:
        """Numbers ``[low, high)`` of the bands that have a layer of ``[first, last)``."""
        low = bisect_right(self._bands, first, key=lambda band: band.last)
        return low, bisect_left(self._bands, last, key=lambda band: band.first)

    def _cut(self, layer: int) -> None:
        """Make no band reach across ``layer``."""
        low, high = self._between(layer, layer + 1)
        if low < high and self._bands[low].first < layer:
            band = self._bands[low]
            self._bands[low : low + 1] = [band.part(band.first, layer), band.part(layer, band.last)]


def _joined(bands: Iterable[_Band]) -> list[_Band]:
    """The same bands, with equal neighbours merged."""
    joined: list[_Band] = []
    for band in bands:
        before = joined[-1] if joined else None
        if before and before.last == band.first and (before.starts, before.stops) == (band.starts, band.stops):
            before.last = band.last
        else:
            joined.append(band)
    return joined
