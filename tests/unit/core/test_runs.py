"""``Hello`` is short where a cache is regular, and still says everything where it is not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_kv.core import Codec
from disagg_kv.core.wire import runs as r
from disagg_kv.core.wire.frames import MAX_ENTRIES, Hello, WireComponent, WireHolding, WireSpec
from disagg_kv.core.wire.specs import (
    MAX_HELD,
    shard_to_wire,
    shards_from_wire,
    site_from_wire,
    site_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from disagg_kv.errors import RemoteProtocolError
from disagg_kv.geometry import CacheSpec, Group, Plane, Site, shard
from disagg_kv.ids import GroupId, LayerId

few = st.integers(0, 3)
rows = st.tuples(few, st.sampled_from("kv"), st.just("g"), few, few, st.just(1), few, st.just(1))


def large(own_buffers: bool) -> tuple[CacheSpec, Site]:
    """A rank of eight of a model with 80 layers: a buffer for every plane, or one for all."""
    spec = CacheSpec.kv(80, kv_heads=8, head_dim=128, dtype="bfloat16")
    mine = shard(spec, tp=8, rank=0)
    names = [(layer, name) for layer in range(80) for name in ("k", "v")]
    page, nbytes = 16 * 256, 1000 * 16 * 256
    planes = [
        Plane(LayerId(layer), name, GroupId("kv"), *((n, 0) if own_buffers else (0, n * nbytes)), page, 256, 256)
        for n, (layer, name) in enumerate(names)
    ]
    buffers = (nbytes,) * 160 if own_buffers else (160 * nbytes,)
    return spec, Site(spec, mine, (Group(GroupId("kv"), 16, 1000),), planes, buffers)


def introduction(spec: CacheSpec, site: Site) -> Hello:
    return Hello(
        src=bytes(16), dst=bytes(16), version=3, address="tcp://10.0.0.1:40000", role="decode", instance="decode-1",
        rank=0, host="h", pid=1, started=1, born=1, spec=spec_to_wire(spec),
        shards=tuple(shard_to_wire(shard(spec, tp=8, rank=n)) for n in range(8)), site=site_to_wire(site),
        regions=tuple(range(len(site.buffers))), transport="t", descriptor=b"", paths=(("staged", 1),), conversions=(),
        verdict="elected",
        slot_bytes=0, ring_region=0, ring_bytes=0, lease_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize("own_buffers", [True, False])
def test_a_hello_of_eighty_layers_takes_less_than_a_kilobyte_beside_its_descriptor(own_buffers: bool) -> None:
    spec, site = large(own_buffers)
    hello = introduction(spec, site)
    assert len(hello.site.planes) == 1
    assert len(Codec().encode(hello)) < 1024
    assert site_from_wire(hello.site, spec, site.shard) == site


def test_a_hello_that_comes_again_is_known_by_its_bytes_and_shares_its_parts() -> None:
    """Of several peers alike each part is there once; what differs in one byte is another ``Hello``."""
    codec = Codec()
    first = introduction(*large(True))
    other = msgspec.structs.replace(first, src=bytes(15) + b"x")
    one, again, two = (codec.decode(codec.encode(hello)) for hello in (first, first, other))
    assert one is again
    assert (one, two) == (first, other)
    assert isinstance(one, Hello)
    assert isinstance(two, Hello)
    assert one.site is two.site
    assert one.shards is two.shards


@given(st.lists(rows, max_size=12), st.integers(1, 5), st.lists(rows, max_size=3))
def test_planes_come_back_in_their_order(pattern: list[r.PlaneRow], times: int, rest: list[r.PlaneRow]) -> None:
    planes = [(one[0] + 2 * n, *one[1:]) for n in range(times) for one in pattern] + rest
    assert r.planes_from_runs(r.planes_to_runs(planes)) == planes


@given(st.lists(st.integers(0, 40), unique=True).map(sorted), st.lists(few))
def test_layers_and_numbers_come_back(layers: list[int], numbers: list[int]) -> None:
    assert list(r.layers_from_runs(r.layers_to_runs(layers))) == layers
    assert list(r.numbers_from_runs(r.numbers_to_runs(numbers))) == numbers


PLANE = (1, "k", "g", 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("steps", "says"), [((-1, 0, 0), "cannot be"), ((0, -1, 0), "cannot be"), ((0, 0, -1), "cannot be"),
                        ((MAX_ENTRIES, 0, 0), "cannot be"), ((0, 0, 2**62), "cannot be")],
)  # fmt: skip
def test_planes_that_cannot_be_are_the_peers_error(steps: tuple[int, int, int], says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        r.planes_from_runs([(3, ((*PLANE, *steps),))])


@settings(max_examples=25)
@given(st.lists(st.sampled_from((2, 30_000, MAX_ENTRIES)), min_size=2, max_size=9), st.booleans())
def test_what_a_hello_unfolds_to_is_bounded_in_all(counts: list[int], ranks: bool) -> None:
    """Each list is short enough; together they would be gigabytes: they are refused by name, before they are made."""
    spec = CacheSpec.kv(1, 1, 8, "float16")
    holdings = [WireHolding("k", ((0, count),), 0, n + 1) for n, count in enumerate(counts)]
    told = [(one,) for one in holdings] if ranks else [tuple(holdings)]
    says = "layer .* in a Hello; at most 0 is allowed"
    if sum(counts) > MAX_HELD:
        says = f"{sum(counts)} layers of all holdings in a Hello; at most {MAX_HELD}"
    elif sum(counts) > MAX_ENTRIES and not ranks:
        says = f"{sum(counts)} layers of a rank's holdings in a Hello; at most {MAX_ENTRIES}"
    with pytest.raises(RemoteProtocolError, match=says):
        shards_from_wire(told, spec)


def test_a_spec_is_bounded_in_all() -> None:
    """Layers are many and components few, or the reverse."""
    kind = tuple(WireComponent(f"c{n}", "float16", 1, 2, 1, 0, None, "", (), None) for n in range(256))
    wire = WireSpec(b"", (kind,), tuple((layer, 0) for layer in range(257)))
    with pytest.raises(RemoteProtocolError, match="65792 components of all layers in a Hello; at most 65536"):
        spec_from_wire(wire)


def test_ranks_that_hold_the_same_share_a_shard() -> None:
    """Thousands of ranks are unfolded once for each part that is held."""
    spec = CacheSpec.kv(80, kv_heads=8, head_dim=128, dtype="bfloat16")
    wire = tuple(shard_to_wire(shard(spec, tp=8, rank=rank % 8)) for rank in range(64))
    shards = shards_from_wire(wire, spec)
    assert shards[:8] == tuple(shard(spec, tp=8, rank=rank) for rank in range(8))
    assert all(shards[rank] is shards[rank % 8] for rank in range(64))


def test_a_short_hello_does_not_unfold_to_a_long_one() -> None:
    """All three lists are bounded before they are made."""
    with pytest.raises(RemoteProtocolError, match="planes in a Hello; at most 65536"):
        r.planes_from_runs([(MAX_ENTRIES, ((*PLANE, 0, 0, 0),))] * 2)
    with pytest.raises(RemoteProtocolError, match="numbers in a Hello"):
        r.numbers_from_runs([(1, MAX_ENTRIES)] * 2)
    with pytest.raises(RemoteProtocolError, match="layers in a Hello"):
        r.layers_from_runs([(0, MAX_ENTRIES)] * 2)
    with pytest.raises(RemoteProtocolError, match="layer 65536 in a Hello"):
        r.layers_from_runs([(1, MAX_ENTRIES)])
