"""Random caches, splits and pools for property tests."""

from __future__ import annotations

from typing import Literal

import numpy as np
from attrs import frozen
from hypothesis import strategies as st

from disagg_kv.geometry import CacheSpec, Component, Group, Holding, PageTable, Plane, Shard, Site, shard, stages
from disagg_kv.ids import GroupId, LayerId

Order = Literal["NHD", "HND", "fused"]
ORDERS: tuple[Order, ...] = ("NHD", "HND", "fused")


@frozen
class World:
    """A cache and how two instances split it."""

    spec: CacheSpec
    writers: tuple[Shard, ...]
    targets: tuple[Shard, ...]


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    """Up to five layers of K and V (of unequal size), of a latent, or of both kinds."""
    heads = draw(st.integers(1, 8))
    kv = (
        Component("k", "int8", heads, draw(st.integers(1, 3))),
        Component("v", "float16", draw(st.sampled_from([heads, heads, 2])), 2 * draw(st.integers(1, 2))),
    )
    latent = (Component("latent", "float16", 1, 6),)
    kinds = draw(st.lists(st.sampled_from([kv, kv, latent]), min_size=1, max_size=5))
    return CacheSpec({LayerId(i): kind for i, kind in enumerate(kinds)})


@st.composite
def sides(draw: st.DrawFn, spec: CacheSpec) -> tuple[Shard, ...]:
    """The shards of one instance: pipeline stages of tensor-parallel ranks, uneven, replicated or reordered."""
    pp = draw(st.integers(1, min(3, len(spec.layers))))
    shards: list[Shard] = []
    for stage in stages(spec, pp):
        tp = draw(st.integers(1, 4))
        units: list[dict[str, range]] = [{} for _ in range(tp)]
        for component in {c for layer in stage for c in spec.layers[layer]}:
            if tp > component.units or draw(st.integers(0, 4)) == 0:
                ways = draw(st.integers(1, min(tp, component.units)))
            else:
                ways = tp
            inner = draw(st.permutations(range(1, component.units)))[: ways - 1]
            edges = [0, *sorted(inner), component.units]
            for rank in range(tp):
                piece = rank * ways // tp
                units[rank][component.name] = range(edges[piece], edges[piece + 1])
        shards += [shard(spec, layers=stage, units=of) for of in units]
    return tuple(_reordered(one) if draw(st.booleans()) else one for one in shards)


def _reordered(one: Shard) -> Shard:
    """The same cells with the units of each plane in two runs, the upper one first in memory."""
    holdings: list[Holding] = []
    for h in one:
        middle = (h.units.start + h.units.stop) // 2
        pieces = [range(middle, h.units.stop), range(h.units.start, middle)]
        holdings += [Holding(h.component, h.layers, piece) for piece in pieces if piece]
    return Shard(holdings)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any cache and any two splits of it."""
    spec = draw(specs())
    return World(spec, draw(sides(spec)), draw(sides(spec)))


def build_site(spec: CacheSpec, held: Shard, page_rows: int, pages: int, order: Order, gap: int = 0) -> Site:
    """A pool with dense pages and ``gap`` bytes between them; ``fused``: K and V of a layer share each row."""
    group = Group(GroupId("kv"), page_rows, pages)
    sizes: dict[LayerId, dict[str, tuple[int, int]]] = {}
    for h in held:
        for layer in h.layers:
            nbytes = next(c.unit_bytes for c in spec.layers[layer] if c.name == h.component)
            before = sizes.setdefault(layer, {}).get(h.component, (0, 0))[0]
            sizes[layer][h.component] = (before + len(h.units), nbytes)
    planes: list[Plane] = []
    buffers: list[int] = []
    for layer, of in sorted(sizes.items()):
        row_bytes = sum(units * nbytes for units, nbytes in of.values())
        offset = 3
        for name, (units, nbytes) in of.items():
            page = page_rows * units * nbytes + gap
            match order:
                case "NHD":
                    planes.append(Plane(layer, name, group.id, len(buffers), 3, page, units * nbytes, nbytes))
                case "HND":
                    planes.append(Plane(layer, name, group.id, len(buffers), 3, page, nbytes, page_rows * nbytes))
                case "fused":
                    stride = page_rows * row_bytes + gap
                    planes.append(Plane(layer, name, group.id, len(buffers), offset, stride, row_bytes, nbytes))
                    offset += units * nbytes
            if order != "fused":
                buffers.append(3 + pages * page)
        if order == "fused":
            buffers.append(3 + pages * (page_rows * row_bytes + gap))
    site = Site(spec, held, (group,), planes, buffers)
    site.check()
    return site


def build_table(site: Site, start: int, stop: int, seed: int) -> PageTable:
    """Scattered pages for the rows ``[start, stop)``, now and then with runs of neighbours."""
    group = site.groups[0]
    first = start // group.rows_per_page * group.rows_per_page
    n = -(-(stop - first) // group.rows_per_page)
    rng = np.random.default_rng(seed)
    ids = np.arange(group.pages) if seed % 2 else rng.permutation(group.pages)
    return PageTable(group.id, ids[:n], first)
