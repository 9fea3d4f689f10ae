"""Geometry to and from the wire."""

from __future__ import annotations

import msgspec
import pytest

from disagg_kv.core.wire import specs as w
from disagg_kv.core.wire.frames import LEAST_RATE, MOST_RATE, SLOWEST_S, WireComponent, WirePace, WireSite, wire_pace
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.geometry import CacheSpec, Component, Group, Plane, Shard, Site, shard, stages
from disagg_kv.ids import GroupId, LayerId

KV = CacheSpec.kv(4, 8, 16, "bfloat16", v_head_dim=8, v_dtype="int8", model=b"m")
MIXED = CacheSpec(
    {
        LayerId(0): (Component("k", "int8", 2, 4), Component("v", "int8", 2, 4)),
        LayerId(2): (Component("latent", "bfloat16", 1, 32, window=8, format="f"),),
        LayerId(3): (Component("state", "float32", 4, 8, tokens_per_row=0, rows=3),),
    }
)


def site(spec: CacheSpec, mine: Shard) -> Site:
    groups = (Group(GroupId("all"), 4, 10, null_page=0), Group(GroupId("states"), 4, 10))
    planes = []
    at = 0
    for layer in mine.layers():
        for c in spec.layers[layer]:
            units = sum(len(r) for r in mine.units(layer, c.name))
            row = units * c.unit_bytes
            group = groups[c.rows > 0].id
            planes.append(Plane(layer, c.name, group, 0, at, 4 * row, row, c.unit_bytes))
            at += 40 * row
    return Site(spec, mine, groups, tuple(planes), (at,))


@pytest.mark.parametrize("spec", [KV, MIXED, CacheSpec.mla(3, 64, "bfloat16")], ids=["kv", "mixed", "mla"])
def test_specs_shards_and_sites_come_back_as_they_went(spec: CacheSpec) -> None:
    assert w.spec_from_wire(w.spec_to_wire(spec)) == spec
    for tp, rank, layers in [(1, 0, None), (2, 1, stages(spec, 2)[0])]:
        mine = shard(spec, tp=tp, rank=rank, layers=layers)
        assert w.shard_from_wire(w.shard_to_wire(mine), spec) == mine
        there = site(spec, mine)
        assert w.site_from_wire(w.site_to_wire(there), spec, mine) == there


def test_equal_layers_cross_once() -> None:
    assert len(w.spec_to_wire(KV).kinds) == 1
    assert len(w.spec_to_wire(MIXED).kinds) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kinds": ()}, "spec"), ({"layers": ()}, "layer"), ({"layers": ((0, 7),)}, "spec")],
)
def test_a_spec_that_cannot_be_is_the_peers_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        w.spec_from_wire(msgspec.structs.replace(w.spec_to_wire(KV), **change))


def test_a_component_that_cannot_be_is_the_peers_error() -> None:
    broken = WireComponent("k", "bit", 1, 1, 1, 0, None, "plain", (), None)
    with pytest.raises(RemoteProtocolError, match="unknown dtype 'bit'"):
        w.spec_from_wire(msgspec.structs.replace(w.spec_to_wire(KV), kinds=((broken,),)))


@pytest.mark.parametrize("change", [{"stop": 9}, {"start": 8}, {"layers": ()}, {"layers": ((9, 1),)}])
def test_a_shard_that_cannot_be_is_the_peers_error(change: dict[str, object]) -> None:
    holding = w.shard_to_wire(shard(KV))[0]
    with pytest.raises(RemoteProtocolError, match=r"a shard that cannot be|layer 9 in a Hello"):
        w.shard_from_wire([msgspec.structs.replace(holding, **change)], KV)


@pytest.mark.parametrize(
    "change",
    [{"groups": ()}, {"planes": ()}, {"buffers": ()}, {"buffers": ((1, 1),)}, {"groups": (("all", 0, 1, None),)}],
)
def test_a_pool_whose_planes_leave_their_buffers_is_the_peers_error(change: dict[str, object]) -> None:
    mine = shard(KV)
    there: WireSite = msgspec.structs.replace(w.site_to_wire(site(KV, mine)), **change)
    with pytest.raises(RemoteProtocolError, match="a pool that cannot be"):
        w.site_from_wire(there, KV, mine)


@pytest.mark.parametrize("rate", [1e-9, 0.5, 1.0, 3e9, 1e18, 1e30])
def test_any_pace_that_was_measured_can_be_sent(rate: float) -> None:
    """A frame that its receiver refuses would be repeated until the room's deadline."""
    sent = wire_pace(1e12, rate, 1e12)
    assert sent == (SLOWEST_S, min(max(rate, LEAST_RATE), MOST_RATE), SLOWEST_S)
    assert msgspec.convert(list(sent), WirePace) == sent
