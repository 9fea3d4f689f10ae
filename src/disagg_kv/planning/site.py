"""A pool's site as engines lay it out, for plans that no pool stands behind."""

from __future__ import annotations

from ..errors import ConfigurationError
from ..geometry import CacheSpec, Group, Plane, Shard, Site
from ..ids import KV, LayerId


def plain_site(spec: CacheSpec, shard: Shard, rows: int, page_size: int, order: str = "NHD") -> Site:
    """A pool as engines lay it out: a buffer per plane, dense pages, room for one request of ``rows`` tokens.

    Args:
        spec: the whole cache.
        shard: what the rank holds.
        rows: tokens.
        page_size: rows of a page.
        order: ``"NHD"``: units of a row together; ``"HND"``: rows of a unit together, page by page.

    Raises:
        ConfigurationError: another order, or sizes below 1.
    """
    if order not in ("NHD", "HND") or rows < 1 or page_size < 1:
        raise ConfigurationError(f"a pool of {rows} tokens in pages of {page_size}, order {order!r} (NHD or HND)")
    tokens = Group(KV, page_size, -(-rows // page_size))
    states = Group("state", max(1, spec.state_rows()), 1)
    planes: list[Plane] = []
    sizes: list[int] = []
    held: dict[tuple[LayerId, str], int] = {}
    for holding in shard:
        for layer in holding.layers:
            held[layer, holding.component] = held.get((layer, holding.component), 0) + len(holding.units)
    for (layer, name), units in sorted(held.items()):
        component = spec.component(layer, name)
        nbytes, size = component.unit_bytes, component.rows or page_size
        group = states if component.rows else tokens
        row, unit = (units * nbytes, nbytes) if order == "NHD" else (nbytes, size * nbytes)
        planes.append(Plane(layer, name, group.id, len(sizes), 0, size * units * nbytes, row, unit))
        sizes.append(group.pages * size * units * nbytes)
    used = {plane.group for plane in planes}
    return Site(spec, shard, [g for g in (tokens, states) if g.id in used], planes, sizes)
