"""Two caches of one model in different formats: whether one can become the other, and one's pool as the other.

A pool is *read as* another spec: its site then has the other spec and the other's bytes, while its planes lie where
they lie. So plans, layouts and sums of a transfer that converts are those of the wanted cache, and kernels alone know
that the bytes in the pages are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from attrs import evolve, frozen

from ..ids import LayerId, room_text
from .formats import CONVERSIONS, conversion
from .layout import Plane, PlaneConversion, Site
from .shard import Holding, Shard
from .spec import CacheSpec, Component, item_bytes

KEPT = 64
"""Answers that are kept, by value."""

Components = Sequence[Component]


@frozen
class Difference:
    """A field in which two specs differ, beyond what conversions bridge: its name and the value of each."""

    field: str
    source: object
    target: object


def difference(source: CacheSpec, target: CacheSpec) -> Difference | None:
    """The first field for which a cache of ``source`` cannot become one of ``target``; None: it can.

    Components may differ in dtype where that conversion exists, with the scales of float8: given ones, or a component
    of scales that only one of the two caches has. A state is not converted, nor is an opaque format.
    """
    if len(source.layers) != len(target.layers):
        return Difference("spec.layers", len(source.layers), len(target.layers))
    if source == target:
        return None
    for layer, components in source.layers.items():
        where = f"spec.layers[{layer}]"
        others = target.layers.get(layer)
        if others is None:
            return Difference(where, "there", "missing")
        found = _of_layer(where, components, others)
        if found is not None:
            return found
    if source.model != target.model:
        # Last: a digest says less than a size or a type that differs, too.
        return Difference("spec.model", room_text(source.model), room_text(target.model))
    return None


def _of_layer(where: str, source: Components, target: Components) -> Difference | None:
    pairs = _pairs(source, target)
    if pairs is None:
        return Difference(where, [c.name for c in source], [c.name for c in target])
    for a, b in pairs:
        # The tokens of a row come first: they explain its bytes.
        for name in ("tokens_per_row", "units", "rows", "window", "format"):
            if getattr(a, name) != getattr(b, name):
                return Difference(f"{where}.{a.name}.{name}", getattr(a, name), getattr(b, name))
        if a.dtype == b.dtype:
            for name in ("unit_bytes", "scales", "scaled_by"):
                if getattr(a, name) != getattr(b, name):
                    return Difference(f"{where}.{a.name}.{name}", getattr(a, name), getattr(b, name))
            continue
        opaque = a.rows > 0 or not a.plain or a.tokens_per_row != 1
        if (a.dtype, b.dtype) not in CONVERSIONS or opaque:
            return Difference(f"{where}.{a.name}.dtype", a.dtype, b.dtype)
        elements = a.unit_bytes // item_bytes(a.dtype), b.unit_bytes // item_bytes(b.dtype)
        if elements[0] != elements[1]:
            return Difference(f"{where}.{a.name}, elements of a unit", *elements)
    return None


def _pairs(source: Components, target: Components) -> list[tuple[Component, Component]] | None:
    """The components that two layers share by name, in order; None: they differ by more than scales of one side."""
    theirs = {c.name: c for c in target}
    names = {c.name for c in source}
    dropped = {c.scaled_by for c in source if c.name not in theirs or theirs[c.name].dtype != c.dtype} - theirs.keys()
    added = {c.scaled_by for c in target if c.name in names and c.scaled_by is not None} - names
    ours = [c for c in source if c.name not in dropped]
    kept = [c for c in target if c.name not in added]
    if [c.name for c in ours] != [c.name for c in kept]:
        return None
    return list(zip(ours, kept, strict=True))


def conversions(source: CacheSpec, target: CacheSpec) -> frozenset[str]:
    """The names of the conversions that make a cache of ``target`` from one of ``source``, if that is possible."""
    return frozenset(
        conversion(c.dtype, wanted.dtype)
        for layer, components in source.layers.items()
        for c, wanted in _pairs(components, target.layers[layer]) or ()
        if c.dtype != wanted.dtype
    )


@lru_cache(KEPT)
def shards_as(shards: tuple[Shard, ...], source: CacheSpec, target: CacheSpec) -> tuple[Shard, ...]:
    """What ranks hold of a cache, as another spec names it: with computed scales, without those that are used up."""
    return shards if source == target else tuple(_shard_as(shard, source, target) for shard in shards)


def _shard_as(shard: Shard, source: CacheSpec, target: CacheSpec) -> Shard:
    holdings: list[Holding] = []
    for holding in shard:
        kept: dict[str, set[LayerId]] = {}
        for layer in sorted(holding.layers):
            for name in _gives(holding.component, source.layers[layer], target.layers[layer]):
                kept.setdefault(name, set()).add(layer)
        holdings += [evolve(holding, component=name, layers=frozenset(layers)) for name, layers in kept.items()]
    return Shard(tuple(holdings))


def _gives(name: str, source: Components, target: Components) -> Iterator[str]:
    """The components of the target that come from one of the source."""
    names = {c.name for c in source}
    for c in target:
        if c.name == name:
            yield name
            if c.scaled_by is not None and c.scaled_by not in names:
                yield c.scaled_by


@lru_cache(KEPT)
def read_as(site: Site, spec: CacheSpec) -> Site:
    """A pool as a cache of another spec, of which :func:`difference` finds none; the site itself for its own spec."""
    if site.spec == spec:
        return site
    (shard,) = shards_as((site.shard,), site.spec, spec)
    own = {(plane.layer, plane.component): plane for plane in site.planes}
    planes: list[Plane] = []
    found: list[PlaneConversion | None] = []
    for plane in site.planes:
        component = site.spec.component(plane.layer, plane.component)
        others = spec.layers[plane.layer]
        for name in _gives(plane.component, site.spec.layers[plane.layer], others):
            wanted = spec.component(plane.layer, name)
            planes.append(evolve(plane, component=name))
            if name == plane.component and wanted.dtype == component.dtype:
                found.append(None)
                continue
            units = [unit for run in site.shard.units(plane.layer, plane.component) for unit in run]
            found.append(_converted(component, spec.component(plane.layer, plane.component), name, units, own, plane))
    return evolve(site, spec=spec, shard=shard, planes=planes, conversions=found)


def _converted(
    source: Component,
    target: Component,
    name: str,
    units: Sequence[int],
    own: dict[tuple[LayerId, str], Plane],
    plane: Plane,
) -> PlaneConversion:
    """How one plane of the wanted cache, ``name``, comes from one of the pool, which holds these units."""
    what = source.dtype, target.dtype, source.unit_bytes
    if name != target.name:
        return PlaneConversion(*what, "scales")
    if target.scaled_by is not None:
        return PlaneConversion(*what, "computed")
    if source.scaled_by is not None:
        return PlaneConversion(*what, "read", scales=own[plane.layer, source.scaled_by])
    if target.scales:
        given = np.float32(1) / np.array(target.scales, np.float32)
    else:
        given = np.array(source.scales, np.float32)
    factors: list[float] = given.tolist()
    return PlaneConversion(*what, "given", tuple(factors) if len(factors) <= 1 else tuple(factors[u] for u in units))
