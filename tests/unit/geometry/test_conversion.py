"""Specs that convert into each other, scales that cannot be, and a pool that is read as another cache."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from attrs import evolve
from msgspec.structs import replace

from disagg_kv.core.wire.specs import spec_from_wire, spec_to_wire
from disagg_kv.errors import GeometryError, RemoteProtocolError
from disagg_kv.geometry import CacheSpec, Component, PlaneConversion, Site, conversions, difference, read_as, shard
from disagg_kv.geometry.formats import CONVERSIONS
from disagg_kv.ids import LayerId
from disagg_kv.memory import ConvertedPool, PagedPool

E4M3 = "float8_e4m3fn"
BF16 = CacheSpec.kv(2, 4, 8, "bfloat16")


@pytest.mark.parametrize("scale", [0.0, -1.0, nan, inf, -inf, 1e-45, 1e39])
def test_a_scale_is_finite_and_not_zero(scale: float) -> None:
    with pytest.raises(GeometryError, match="component 'k': scale 1 is"):
        Component("k", E4M3, 2, 8, scales=[1.0, scale])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": [1.0, 2.0, 3.0]}, "3 scales for 4 units"),
        ({"scales": "1.0"}, "list of numbers"),
        ({"scales": [None]}, "number is needed"),
        ({"scales": [1.0], "scaled_by": "k_scale"}, "one or the other"),
        ({"dtype": "bfloat16", "scales": [1.0]}, "bfloat16 has no scales"),
        ({"dtype": "bfloat16", "scaled_by": "k_scale"}, "bfloat16 has no scales"),
        ({"tokens_per_row": 0, "rows": 2, "scales": [1.0]}, "a state has no scales"),
    ],
)
def test_scales_that_cannot_be_are_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        Component(**{"name": "k", "dtype": E4M3, "units": 4, "unit_bytes": 8, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scale",
    [
        None,
        Component("k_scale", "float16", 4, 2),
        Component("k_scale", "float32", 2, 4),
        Component("k_scale", "float32", 4, 8),
        Component("k_scale", "float32", 4, 4, window=3),
    ],
)
def test_scales_of_rows_are_a_component_of_the_layer_with_a_float32_per_unit(scale: Component | None) -> None:
    k = Component("k", E4M3, 4, 8, scaled_by="k_scale")
    with pytest.raises(GeometryError, match="layer 0, 'k': scaled_by 'k_scale'"):
        CacheSpec.uniform(1, [k] if scale is None else [k, scale])


@pytest.mark.parametrize("scales", [(0.0,), (nan,), (1.0, 2.0)])
def test_scales_that_come_from_a_peer_are_checked_before_anything_is_written(scales: tuple[float, ...]) -> None:
    wire = spec_to_wire(CacheSpec.uniform(1, [Component("k", E4M3, 4, 8, scales=[1.0])]))
    ((k,),) = wire.kinds
    broken = replace(wire, kinds=((replace(k, scales=scales),),))
    with pytest.raises(RemoteProtocolError, match="component 'k'"):
        spec_from_wire(broken)


def test_scales_cross_the_wire_and_make_another_spec() -> None:
    spec = CacheSpec.uniform(1, [Component("k", E4M3, 2, 8, scales=[0.1, 2.0])])
    assert spec_from_wire(spec_to_wire(spec)) == spec
    assert spec.component(LayerId(0), "k").scales[0] == np.float32(0.1)
    assert spec != CacheSpec.uniform(1, [Component("k", E4M3, 2, 8)])
    computed = BF16.cast(E4M3, computed=True)
    assert spec_from_wire(spec_to_wire(computed)) == computed


@pytest.mark.parametrize(("source", "target"), sorted(CONVERSIONS))
def test_every_conversion_is_between_specs_that_cast_makes(source: str, target: str) -> None:
    spec = CacheSpec.kv(2, 4, 8, source)
    cast = spec.cast(target)
    assert cast == CacheSpec.kv(2, 4, 8, target)
    assert difference(spec, cast) is None
    assert conversions(spec, cast) == {f"{source} to {target}"}
    assert conversions(spec, spec) == frozenset()


def test_a_cast_back_leaves_out_the_scales() -> None:
    assert BF16.cast(E4M3, computed=True).cast("bfloat16") == BF16
    assert difference(BF16.cast(E4M3, computed=True), BF16) is None


def test_a_cast_keeps_states_opaque_formats_and_other_dtypes() -> None:
    spec = CacheSpec.uniform(
        1,
        [
            Component("index", "int8", 1, 8),
            Component("tile", "bfloat16", 2, 8, format="tiled"),
            Component("ssm", "float32", 2, 16, tokens_per_row=0, rows=3),
        ],
    )
    assert spec.cast(E4M3, computed=True) == spec
    with pytest.raises(GeometryError, match="bfloat16 has no scales"):
        spec.cast("bfloat16", computed=True)
    with pytest.raises(GeometryError, match="unknown dtype"):
        spec.cast("float4")


def test_what_has_other_layers_or_components_differs() -> None:
    other = CacheSpec({LayerId(0): BF16.layers[LayerId(0)], LayerId(7): BF16.layers[LayerId(0)]})
    found = difference(BF16, other)
    assert found is not None
    assert (found.field, found.target) == ("spec.layers[1]", "missing")
    found = difference(BF16, CacheSpec.kv(3, 4, 8, "bfloat16"))
    assert found is not None
    assert found.field == "spec.layers"
    found = difference(BF16, CacheSpec.mla(2, 8, "bfloat16"))
    assert found is not None
    assert found.field == "spec.layers[0]"


def test_a_pool_that_is_read_as_another_cache_has_its_planes_where_they_lie() -> None:
    """Per head: the factors are the reciprocals of the scales of the rank's own heads."""
    decode = CacheSpec(
        {n: [evolve(c, scales=[1.0, 2.0, 4.0, 8.0]) for c in cs] for n, cs in BF16.cast(E4M3).layers.items()}
    )
    pool = PagedPool.allocate(BF16, shard(BF16, tp=2, rank=1), pages=4, page_size=2)
    converted = ConvertedPool(pool, decode)
    assert converted.site.spec == decode
    assert converted.site.planes == pool.site.planes
    assert set(converted.site.conversions) == {PlaneConversion("bfloat16", E4M3, 16, "given", (0.25, 0.125))}
    assert tuple(converted.buffers) == tuple(pool.buffers)
    assert read_as(pool.site, BF16) is pool.site


def test_a_site_has_a_conversion_or_none_per_plane() -> None:
    site = PagedPool.allocate(BF16, shard(BF16), pages=4, page_size=2).site
    with pytest.raises(GeometryError, match="PlaneConversion or None"):
        Site(site.spec, site.shard, site.groups, site.planes, site.buffers, conversions=["k"])  # type: ignore[list-item]


def test_a_converted_pool_gives_the_aux_rows_of_its_pool() -> None:
    pool = PagedPool.allocate(BF16, shard(BF16), pages=2, page_size=2, aux_slots=2, aux_bytes=4)
    converted = ConvertedPool(pool, BF16.cast(E4M3))
    converted.write_aux(1, b"abcd")
    assert (converted.aux_bytes, converted.read_aux(1), pool.read_aux(1)) == (4, b"abcd", b"abcd")


@pytest.mark.parametrize(("model", "shown"), [(b"llama-3", "llama-3"), (b"\xff\x00", "ff00"), (b"", "")])
def test_models_that_are_text_are_shown_as_text(model: bytes, shown: str) -> None:
    """A digest is shown as its hex digits."""
    ours, theirs = (CacheSpec.kv(2, 4, 8, "float16", model=one) for one in (model, b"qwen"))
    found = difference(ours, theirs)
    assert found is not None
    assert (found.field, found.source, found.target) == ("spec.model", shown, "qwen")
