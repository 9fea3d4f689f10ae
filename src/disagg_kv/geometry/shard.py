"""The part of the cache that a rank owns.

The rules for an even split are those of the engines. With more heads than ranks, each rank has a run of heads. With
more ranks than heads, rank ``r`` of ``tp`` holds head ``r * heads // tp`` (replication).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from attrs import field, frozen

from .. import arguments
from ..errors import GeometryError
from ..ids import LayerId
from .spec import CacheSpec


def _layers(layers: Iterable[int]) -> frozenset[LayerId]:
    return frozenset(map(LayerId, arguments.counts(layers, "layers", error=GeometryError)))


@frozen
class Holding:
    """One box: these units of one component in these layers, all rows of them.

    Args:
        component: the component's name.
        layers: the layers.
        units: global unit numbers ``[start, stop)``, step 1.
    """

    component: str
    layers: frozenset[LayerId] = field(converter=_layers)
    units: range

    def __attrs_post_init__(self) -> None:
        where = f"holding of {arguments.shown(self.component)}"
        arguments.text(self.component, where, most=256)
        arguments.one(self.units, f"{where}: units", range, GeometryError)
        if not self.layers or self.units.step != 1 or self.units.start < 0 or len(self.units) == 0:
            raise GeometryError(f"holding of {self.component!r}: needs layers and a non-empty run of units: {self}")


def _holdings(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    return arguments.several(holdings, "holdings", Holding, GeometryError)


@frozen(cache_hash=True)
class Shard:
    """A set of boxes: everything one rank owns. No cell is in two of its holdings.

    In a rank's memory the units of one (layer, component) lie in the order in which the holdings name them.

    Raises:
        GeometryError: a unit is in two holdings of one layer.
    """

    holdings: tuple[Holding, ...] = field(converter=_holdings)

    def __attrs_post_init__(self) -> None:
        seen: dict[tuple[str, LayerId], list[Holding]] = {}
        for holding in self.holdings:
            for layer in holding.layers:
                seen.setdefault((holding.component, layer), []).append(holding)
        for (component, layer), holdings in seen.items():
            units = sorted((h.units.start, h.units.stop) for h in holdings)
            if any(a[1] > b[0] for a, b in pairwise(units)):
                raise GeometryError(f"layer {layer}, {component!r}: units held twice: {units}")

    def __iter__(self) -> Iterator[Holding]:
        return iter(self.holdings)

    def layers(self) -> tuple[LayerId, ...]:
        """The layers of which this shard holds anything, ascending."""
        return tuple(sorted({layer for h in self.holdings for layer in h.layers}))

    def units(self, layer: int, component: str) -> tuple[range, ...]:
        """The runs of units held of one component in one layer, in memory order."""
        layer = LayerId(arguments.count(layer, "layer", error=GeometryError))
        arguments.one(component, "component", str, GeometryError)
        return tuple(h.units for h in self.holdings if h.component == component and layer in h.layers)

    def check(self, spec: CacheSpec) -> None:
        """Raise a :class:`GeometryError` if a holding names something that the spec lacks."""
        arguments.one(spec, "spec", CacheSpec)
        for h in self.holdings:
            for layer in h.layers:
                units = spec.component(layer, h.component).units
                if h.units.stop > units:
                    raise GeometryError(f"layer {layer}, {h.component!r}: unit {h.units.stop - 1} of {units} units")


def even_units(units: int, tp: int, rank: int) -> range:
    """The units of rank ``rank`` of ``tp``; refuses with the numbers where neither divides the other."""
    if not 0 <= rank < tp:
        raise GeometryError(f"tensor-parallel rank {rank} of {tp}")
    if units % tp == 0:
        each = units // tp
        return range(rank * each, (rank + 1) * each)
    if tp % units == 0:
        only = rank * units // tp
        return range(only, only + 1)
    raise GeometryError(
        f"{units} units do not divide over {tp} ranks; say which units each rank holds with shard(..., units=...)"
    )


def shard(
    spec: CacheSpec,
    *,
    tp: int = 1,
    rank: int = 0,
    layers: Iterable[int] | None = None,
    units: Mapping[str, range] | None = None,
) -> Shard:
    """The part of the cache that one rank holds.

    Args:
        spec: the whole cache.
        tp: the attention's tensor-parallel size; with attention data parallelism, the whole size divided by that.
        rank: this rank's tensor-parallel index.
        layers: the layers of this pipeline stage; None: all.
        units: the units of this rank per component name, for heads that do not divide evenly.

    Raises:
        GeometryError: units that do not divide over ``tp`` ranks, nor ranks over units, and that ``units`` does not
            name; a rank, layer, component or unit out of range.
    """
    arguments.one(spec, "spec", CacheSpec)
    tp = arguments.count(tp, "tp", least=1, error=GeometryError)
    rank = arguments.count(rank, "rank", error=GeometryError)
    given = arguments.mapping({} if units is None else units, "units")
    known = {arguments.text(name, "units"): arguments.one(run, "units", range) for name, run in given.items()}
    stage = frozenset(spec.layers) if layers is None else _layers(layers)
    groups: dict[tuple[str, range], set[LayerId]] = {}
    for layer in sorted(stage):
        if layer not in spec.layers:
            raise GeometryError(f"layer {layer} is not in the spec, which has {len(spec.layers)} layers")
        for c in spec.layers[layer]:
            held = known[c.name] if c.name in known else even_units(c.units, tp, rank)
            groups.setdefault((c.name, held), set()).add(layer)
    result = Shard(tuple(Holding(name, frozenset(of), held) for (name, held), of in groups.items()))
    result.check(spec)
    return result


def stages(spec: CacheSpec, pp: int) -> Sequence[tuple[LayerId, ...]]:
    """The layers of each of ``pp`` pipeline stages. If they do not divide evenly, the first stages have one more.

    Raises:
        GeometryError: fewer layers than stages.
    """
    every = tuple(arguments.one(spec, "spec", CacheSpec).layers)
    pp = arguments.count(pp, "pp", error=GeometryError)
    if not 1 <= pp <= len(every):
        raise GeometryError(f"{pp} pipeline stages of {len(every)} layers")
    each, more = divmod(len(every), pp)
    starts = [i * each + min(i, more) for i in range(pp + 1)]
    return [every[a:b] for a, b in pairwise(starts)]
