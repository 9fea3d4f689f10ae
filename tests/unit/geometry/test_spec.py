"""What a cache is made of, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from disagg_kv.errors import GeometryError
from disagg_kv.geometry import CacheSpec, Component, item_bytes
from disagg_kv.ids import LayerId


def test_k_and_v_may_differ_in_dim_and_dtype() -> None:
    spec = CacheSpec.kv(2, 4, 128, "bfloat16", v_head_dim=64, v_dtype="float8_e4m3fn")
    assert [(c.name, c.units, c.unit_bytes) for c in spec.layers[LayerId(1)]] == [("k", 4, 256), ("v", 4, 64)]


def test_a_latent_is_one_unit() -> None:
    spec = CacheSpec.mla(1, 576, "bfloat16")
    assert spec.component(LayerId(0), "latent") == Component("latent", "bfloat16", 1, 1152)


def test_names_come_in_order_of_first_appearance() -> None:
    """That order is the order of planes in a staged segment; layers are sorted, whatever order they are given in."""
    late, early = Component("z", "int8", 1, 1), Component("a", "int8", 1, 1)
    assert CacheSpec({LayerId(5): [early, late], LayerId(2): [late]}).names() == ("z", "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bf16"}, "unknown dtype 'bf16'; known: bfloat16, "),
        ({"name": ""}, "needs a name"),
        ({"units": 0}, "positive sizes"),
        ({"unit_bytes": 3}, "unit_bytes 3 is not whole float16s"),
        ({"tokens_per_row": 0}, "a state has rows|tokens_per_row must be"),
        ({"rows": 2}, "a state has rows|tokens_per_row must be"),
        ({"tokens_per_row": -1}, "a state has rows|tokens_per_row must be"),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"tokens_per_row": 0, "rows": 1, "window": 4}, "a state has no tokens"),
    ],
)
def test_a_component_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    """The message has the field and the number."""
    fields: dict[str, Any] = {"name": "k", "dtype": "float16", "units": 2, "unit_bytes": 4, **change}
    with pytest.raises(GeometryError, match=message):
        Component(**fields)


@pytest.mark.parametrize("per_row", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 16, 17, 128])
def test_a_window_is_rounded_outwards_to_rows(window: int, per_row: int) -> None:
    """The rows hold the window of a room of any number of tokens, and no fewer rows do so for all of them."""
    extent = Component("k", "int8", 1, 1, tokens_per_row=per_row, window=window).extent
    fewest = []
    for tokens in range(1, 6 * max(window, per_row)):
        stop = -(-tokens // per_row)
        needed = max(0, tokens - window) // per_row
        assert extent.bounds(0, stop)[0] <= needed
        fewest.append(stop - needed)
    assert extent.window == max(fewest)


def test_rows_of_one_spec_have_the_same_number_of_tokens() -> None:
    """Else ``stop`` would not say how many rows a component has; states have no tokens."""
    one, four = Component("k", "int8", 1, 1), Component("c4", "int8", 1, 1, tokens_per_row=4)
    state = Component("ssm", "int8", 1, 1, tokens_per_row=0, rows=2)
    CacheSpec({LayerId(0): [state, four], LayerId(1): [four]})
    with pytest.raises(GeometryError, match="layer 0, 'k' has 1 and layer 1, 'c4' has 4"):
        CacheSpec({LayerId(0): [state, one], LayerId(1): [four]})


def test_specs_and_look_ups_that_cannot_be() -> None:
    """Each has its own message."""
    k = Component("k", "int8", 1, 1)
    with pytest.raises(GeometryError, match="at least one layer"):
        CacheSpec({})
    with pytest.raises(GeometryError, match=r"layer 0: needs components with distinct names, has \['k', 'k'\]"):
        CacheSpec.uniform(1, [k, k])
    with pytest.raises(GeometryError, match="layer must be 0 to 65535, not -1"):
        CacheSpec({LayerId(-1): [k]})
    with pytest.raises(GeometryError, match=r"layer 0 has no component 'q'; it has \['k'\]"):
        CacheSpec.uniform(1, [k]).component(LayerId(0), "q")
    with pytest.raises(GeometryError, match=r"layer 7 has no component 'k'; it has \[\]"):
        CacheSpec.uniform(1, [k]).component(LayerId(7), "k")
    with pytest.raises(GeometryError, match="unknown dtype"):
        item_bytes("float12")
