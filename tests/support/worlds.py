"""Random caches, splits and pools for property tests."""

from __future__ import annotations

from typing import Literal

import numpy as np
from attrs import evolve, frozen
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
def hybrid_specs(draw: st.DrawFn) -> CacheSpec:
    """Up to five layers: attention over everything or a window, states of one or several rows, or both in one layer."""
    heads = draw(st.integers(1, 6))
    window = draw(st.integers(1, 12))
    full = (Component("k", "int8", heads, 2), Component("v", "float16", heads, 2))
    sliding = tuple(evolve(c, window=window) for c in full)
    conv = tuple(
        Component(f"conv.{block}", "int8", units, 2, tokens_per_row=0, rows=3)
        for block, units in (("q", heads), ("v", draw(st.sampled_from([heads, 2 * heads]))))
    )
    states = (*conv, Component("ssm", "float16", heads, 6, tokens_per_row=0, rows=1))
    kinds = draw(
        st.lists(
            st.sampled_from([full, sliding, states, (*full, *states), (*states, *sliding)]), min_size=1, max_size=5
        )
    )
    return CacheSpec({LayerId(i): kind for i, kind in enumerate(kinds)})


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
def worlds(draw: st.DrawFn, of: st.SearchStrategy[CacheSpec] | None = None) -> World:
    """Any cache and any two splits of it."""
    spec = draw(specs() if of is None else of)
    return World(spec, draw(sides(spec)), draw(sides(spec)))


def build_site(spec: CacheSpec, held: Shard, page_rows: int, pages: int, order: Order, gap: int = 0) -> Site:
    """A pool with dense pages and ``gap`` bytes between them; ``fused``: K and V of a layer share each row.

    States lie in slots of their own group, row after row.
    """
    group = Group(GroupId("kv"), page_rows, pages)
    slots = Group(GroupId("state"), 5, 4)
    components = {(layer, c.name): c for layer, cs in spec.layers.items() for c in cs}
    sizes: dict[LayerId, dict[str, tuple[int, int]]] = {}
    for h in held:
        for layer in h.layers:
            nbytes = next(c.unit_bytes for c in spec.layers[layer] if c.name == h.component)
            before = sizes.setdefault(layer, {}).get(h.component, (0, 0))[0]
            sizes[layer][h.component] = (before + len(h.units), nbytes)
    planes: list[Plane] = []
    buffers: list[int] = []
    for layer, of in sorted(sizes.items()):
        tokens = {name: of[name] for name in of if not components[layer, name].rows}
        row_bytes = sum(units * nbytes for units, nbytes in tokens.values())
        offset = 3
        for name, (units, nbytes) in tokens.items():
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
        if order == "fused" and tokens:
            buffers.append(3 + pages * (page_rows * row_bytes + gap))
        for name in sorted(set(of) - set(tokens)):
            units, nbytes = of[name]
            page = components[layer, name].rows * units * nbytes + gap
            planes.append(Plane(layer, name, slots.id, len(buffers), 1, page, units * nbytes, nbytes))
            buffers.append(1 + slots.pages * page)
    used = {plane.group for plane in planes}
    site = Site(spec, held, [g for g in (group, slots) if g.id in used], planes, buffers)
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
