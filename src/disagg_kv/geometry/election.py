"""Writer election: each cell of a target gets exactly one of the writers that hold it.

Replicas divide the cells that they share, so that each replica's link carries a part. They divide layers if there are
enough of them, else rows. A rotation (a stable hash of the room) decides which replica takes which piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from attrs import frozen

from ..errors import GeometryError
from ..ids import LayerId, Rank
from .shard import Shard
from .spec import CacheSpec


@frozen(cache_hash=True)
class Share:
    """A box that one writer sends to one target: one run of units in each plane of either side.

    Args:
        component: the component's name.
        layers: the layers, ascending.
        units: global unit numbers ``[start, stop)``.
        row_index, row_ways: of a run of rows the ``row_index``-th of ``row_ways`` near-equal pieces; (0, 1): all.
    """

    component: str
    layers: tuple[LayerId, ...]
    units: range
    row_index: int = 0
    row_ways: int = 1

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of ``[start, stop)`` that belong to this part; possibly none."""
        n = stop - start
        return start + n * self.row_index // self.row_ways, start + n * (self.row_index + 1) // self.row_ways


@frozen
class _Box:
    """Cells that all have the same ``holders``: one component, some layers (ascending), one run of units."""

    component: str
    layers: tuple[LayerId, ...]
    units: range
    holders: tuple[Rank, ...]


def elect(spec: CacheSpec, writers: Sequence[Shard], target: Shard, rotation: int = 0) -> tuple[tuple[Share, ...], ...]:
    """Divide the cells of ``target`` among the ``writers``; returns the shares of each writer, by rank.

    The shares of all writers together are exactly the target's cells, each once, for every ``rotation``. Shares are
    ordered as in :meth:`CacheSpec.names`, then by first unit, then by layers.

    Raises:
        GeometryError: a shard names something that the spec lacks, or no writer holds a cell that the target needs.
    """
    layers_of: list[dict[tuple[str, int, int, int, int], list[LayerId]]] = [{} for _ in writers]
    for box in _boxes(spec, writers, target):
        name, units, ways = box.component, box.units, len(box.holders)
        by_rows = len(box.layers) < ways
        for j in range(ways):
            key = (name, units.start, units.stop, j, ways) if by_rows else (name, units.start, units.stop, 0, 1)
            first, last = len(box.layers) * j // ways, len(box.layers) * (j + 1) // ways
            piece = box.layers if by_rows else box.layers[first:last]
            layers_of[box.holders[(j + rotation) % ways]].setdefault(key, []).extend(piece)
    order = {name: i for i, name in enumerate(spec.names())}
    return tuple(
        tuple(
            sorted(
                (
                    Share(name, tuple(sorted(layers)), range(start, stop), index, ways)
                    for (name, start, stop, index, ways), layers in mine.items()
                ),
                key=lambda p: (order[p.component], p.units.start, p.layers, p.row_index),
            )
        )
        for mine in layers_of
    )


def rotations(spec: CacheSpec, writers: Sequence[Shard], target: Shard) -> int:
    """The period of :func:`elect` in ``rotation``, so that callers may keep its results by the remainder.

    Raises:
        GeometryError: as :func:`elect`.
    """
    return math.lcm(*(len(box.holders) for box in _boxes(spec, writers, target)))


def _boxes(spec: CacheSpec, writers: Sequence[Shard], target: Shard) -> Iterator[_Box]:
    """Cut the target into boxes that are maximal in layers."""
    target.check(spec)
    for shard in dict.fromkeys(writers):
        shard.check(spec)
    for name in spec.names():
        found: dict[tuple[int, int, tuple[Rank, ...]], list[LayerId]] = {}
        for layers, wanted, held in _alike(name, writers, target):
            for units, holders in _split(wanted, held):
                if not holders:
                    raise GeometryError(f"no writer holds layer {layers[0]}, {name!r}, unit {units.start}")
                found.setdefault((units.start, units.stop, holders), []).extend(layers)
        for (start, stop, holders), layers in found.items():
            yield _Box(name, tuple(sorted(layers)), range(start, stop), holders)


def _alike(
    name: str, writers: Sequence[Shard], target: Shard
) -> Iterator[tuple[list[LayerId], list[range], list[tuple[Rank, range]]]]:
    """Classes of layers that the same holdings name: their layers, the units wanted, and the units held by whom."""
    wanted = [h for h in target if h.component == name]
    held = [(Rank(rank), h) for rank, shard in enumerate(writers) for h in shard if h.component == name]
    named_by: dict[LayerId, list[int]] = {layer: [] for h in wanted for layer in sorted(h.layers)}
    for i, holding in enumerate([*wanted, *(h for _, h in held)]):
        for layer in holding.layers:
            if layer in named_by:
                named_by[layer].append(i)
    classes: dict[tuple[int, ...], list[LayerId]] = {}
    for layer in sorted(named_by):
        classes.setdefault(tuple(named_by[layer]), []).append(layer)
    for numbers, layers in classes.items():
        ours = [wanted[i].units for i in numbers if i < len(wanted)]
        theirs = [(held[i - len(wanted)][0], held[i - len(wanted)][1].units) for i in numbers if i >= len(wanted)]
        yield layers, ours, theirs


def _split(wanted: Iterable[range], held: Sequence[tuple[Rank, range]]) -> Iterator[tuple[range, tuple[Rank, ...]]]:
    """Cut runs of units so that each piece lies within one run of every rank that holds a unit of it."""
    edges = {edge for _, units in held for edge in (units.start, units.stop)}
    for run in wanted:
        cuts = sorted({run.start, run.stop, *(edge for edge in edges if run.start < edge < run.stop)})
        for start, stop in pairwise(cuts):
            yield range(start, stop), tuple(rank for rank, units in held if start in units)
