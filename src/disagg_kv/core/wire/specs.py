"""Geometry to and from its wire form. What does not make sense as geometry is the peer's error."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigurationError, RemoteProtocolError
from ...geometry import CacheSpec, Component, Group, Holding, Plane, Shard, Site
from ...ids import GroupId, LayerId
from .frames import MAX_ENTRIES, WireComponent, WireHolding, WireSite, WireSpec
from .runs import (
    check_total,
    layers_from_runs,
    layers_to_runs,
    numbers_from_runs,
    numbers_to_runs,
    planes_from_runs,
    planes_to_runs,
)

MAX_HELD = 4 * MAX_ENTRIES
"""Most layers of all holdings of the ranks of an instance; ranks that hold the same count once."""


def spec_to_wire(spec: CacheSpec) -> WireSpec:
    """Layers with equal components are written once."""
    kinds: dict[tuple[Component, ...], int] = {}
    layers = tuple((int(layer), kinds.setdefault(cs, len(kinds))) for layer, cs in spec.layers.items())
    return WireSpec(spec.model, tuple(tuple(_component_to_wire(c) for c in cs) for cs in kinds), layers)


def _component_to_wire(c: Component) -> WireComponent:
    of_rows = c.tokens_per_row, c.rows, c.window
    return WireComponent(c.name, c.dtype, c.units, c.unit_bytes, *of_rows, c.format, c.scales, c.scaled_by)


def _component_from_wire(c: WireComponent) -> Component:
    of_rows = c.tokens_per_row, c.rows, c.window
    return Component(c.name, c.dtype, c.units, c.unit_bytes, *of_rows, c.format, c.scales, c.scaled_by)


def spec_from_wire(wire: WireSpec) -> CacheSpec:
    """The spec, validated."""
    try:
        kinds = [tuple(_component_from_wire(c) for c in cs) for cs in wire.kinds]
        check_total("components of all layers", (len(kinds[kind]) for _, kind in wire.layers))
        return CacheSpec({LayerId(layer): kinds[kind] for layer, kind in wire.layers}, wire.model)
    except (ConfigurationError, IndexError) as exc:
        raise RemoteProtocolError(f"a cache spec that cannot be: {exc}") from exc


def shard_to_wire(shard: Shard) -> tuple[WireHolding, ...]:
    """Holding by holding."""
    return tuple(WireHolding(h.component, layers_to_runs(sorted(h.layers)), h.units.start, h.units.stop) for h in shard)


def shards_from_wire(wire: Sequence[Sequence[WireHolding]], spec: CacheSpec) -> tuple[Shard, ...]:
    """The shards of all ranks, checked against the spec. Ranks that hold the same share one."""
    known = dict.fromkeys(wire)
    check_total("layers of all holdings", (count for one in known for h in one for _, count in h.layers), MAX_HELD)
    shards = {one: shard_from_wire(one, spec) for one in known}
    return tuple(shards[one] for one in wire)


def shard_from_wire(wire: Sequence[WireHolding], spec: CacheSpec) -> Shard:
    """The shard, checked against the spec."""
    check_total("layers of a rank's holdings", (count for h in wire for _, count in h.layers))
    holdings = [(h, layers_from_runs(h.layers, max(spec.layers, default=-1) + 1)) for h in wire]
    if any(len(set(layers)) < len(layers) for _, layers in holdings):
        raise RemoteProtocolError("a shard that cannot be: it names a layer twice")
    try:
        shard = Shard(
            tuple(
                Holding(h.component, frozenset(map(LayerId, layers)), range(h.start, h.stop)) for h, layers in holdings
            )
        )
        shard.check(spec)
    except ConfigurationError as exc:
        raise RemoteProtocolError(f"a shard that cannot be: {exc}") from exc
    return shard


def site_to_wire(site: Site) -> WireSite:
    """Groups, planes and buffer sizes."""
    return WireSite(
        tuple((g.id, g.rows_per_page, g.pages, g.null_page) for g in site.groups),
        planes_to_runs(
            [
                (int(p.layer), p.component, p.group, p.buffer, p.offset, p.page_stride, p.row_stride, p.unit_stride)
                for p in site.planes
            ]
        ),
        numbers_to_runs(site.buffers),
    )


def site_from_wire(wire: WireSite, spec: CacheSpec, shard: Shard) -> Site:
    """The site, every plane checked against its buffer. Those beyond what the shard holds are not even unfolded."""
    check_total("planes", (count * len(pattern) for count, pattern in wire.planes), sum(len(h.layers) for h in shard))
    try:
        site = Site(
            spec,
            shard,
            tuple(Group(GroupId(name), rows, pages, null) for name, rows, pages, null in wire.groups),
            tuple(
                Plane(LayerId(layer), component, GroupId(group), buffer, offset, page, row, unit)
                for layer, component, group, buffer, offset, page, row, unit in planes_from_runs(wire.planes)
            ),
            numbers_from_runs(wire.buffers),
        )
        site.check()
    except ConfigurationError as exc:
        raise RemoteProtocolError(f"a pool that cannot be: {exc}") from exc
    return site
