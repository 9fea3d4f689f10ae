"""What vLLM's attention layers say of their float8 caches; see ``model_executor/layers/attention`` of vLLM 0.32.

vLLM keeps such a cache as bytes. The layer knows its element type, and the scales ``_k_scale`` and ``_v_scale``: vLLM
divides by them before it stores, and multiplies by them after it has loaded. They come from the checkpoint, or are 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigurationError, UnsupportedError
from ..scales import Float8, checked_scales
from .cache import LayerShape

FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Element types by vLLM's names of cache types."""


def float8_of(
    shapes: Sequence[LayerShape], layers: Mapping[str, Any], *, tp: int, e4m3: str = "float8_e4m3fn"
) -> dict[str, Float8]:
    """The layers whose K and V are float8, by vLLM's name of the layer.

    Args:
        shapes: the layers' caches.
        layers: vLLM's attention layers, after their weights were loaded.
        tp: number of tensor-parallel ranks.
        e4m3: what this platform means by ``fp8``.

    Raises:
        ConfigurationError: a layer that vLLM does not have, or whose scales are missing or cannot be.
        UnsupportedError: a float8 of another kind.
    """
    found: dict[str, Float8] = {}
    for shape in shapes:
        if shape.parts is None:
            continue
        layer = layers.get(shape.name)
        if layer is None:
            raise ConfigurationError(f"layer {shape.name}: vLLM has no attention layer of this name")
        dtype = FLOAT8.get(str(layer.kv_cache_dtype))
        if dtype is None:
            continue
        if dtype == "float8_e4m3fn" != e4m3:
            raise UnsupportedError(f"layer {shape.name}: caches of {e4m3} are not moved yet")
        found[shape.name] = Float8(dtype, {name: _scales(shape, layer, name, tp) for name in ("k", "v")})
    return found


def _scales(shape: LayerShape, layer: Any, name: str, tp: int) -> tuple[float, ...]:
    where, given = f"layer {shape.name}: {name}_scale", getattr(layer, f"_{name}_scale", None)
    return checked_scales(where, given, heads=max(1, shape.heads // tp), tp=tp)
