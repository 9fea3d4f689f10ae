"""What SGLang's attention layers say of a float8 cache; see ``layers/radix_attention.py`` of SGLang 0.5.23.

A ``RadixAttention`` has ``k_scale`` and ``v_scale``: None, or what SGLang divides by before it stores. SGLang keeps the
numbers as bytes where its device has no indexing of float8. So the element type is that of the pool, not of buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigurationError, UnsupportedError
from ...geometry.formats import SCALED
from ..scales import checked_scales

Scales = tuple[float, ...]

LAYER = "RadixAttention"
"""Class of SGLang's attention layers. With MLA several have one number."""

SCALING = (
    "TritonAttnBackend",
    "FlashInferAttnBackend",
    "FlashAttentionBackend",
    "TRTLLMHAAttnBackend",
)
"""Classes of attention backends that divide by the scales before they store, and multiply when they load.

Others store and load as if all scales were 1, always (torch_native, torch_flex, wave) or for some element types
(intel_amx), or are not examined.
"""


def scales_of(
    modules: Iterable[Any], *, dtype: str, layers: int, heads: int, tp: int, latent: bool, backend: object
) -> list[tuple[Scales, Scales]]:
    """Of each layer those of K and of V; none: 1.

    Args:
        modules: of the model, after its weights were loaded.
        dtype: element type of the cache.
        layers: number of layers.
        heads: KV heads of this rank.
        tp: number of tensor-parallel ranks.
        latent: the cache has MLA's latents.
        backend: SGLang's attention backend, which may have one for prefill and one for decode.

    Raises:
        ConfigurationError: a layer that the model does not have, or whose scales are missing or cannot be.
        UnsupportedError: scales that SGLang does not use as a conversion would.
    """
    if dtype not in SCALED:
        return [((), ())] * layers
    found: dict[int, set[tuple[Scales, Scales]]] = {number: set() for number in range(layers)}
    for one in modules:
        if type(one).__name__ == LAYER and one.layer_id in found:
            found[one.layer_id].add(_of_layer(one, heads, tp))
    for number, of in found.items():
        if len(of) != 1:
            raise ConfigurationError(f"layer {number}: {len(of) or 'no'} attention layers with scales of their own")
    kept = [next(iter(of)) for of in found.values()]
    sides = [one for side in ("prefill", "decode") if (one := getattr(backend, f"{side}_backend", None)) is not None]
    unused = [name for name in (type(one).__name__ for one in sides or [backend]) if name not in SCALING]
    if any(one != ((), ()) for one in kept) and (unused or latent):
        what = f"the attention backend {unused[0]}" if unused else "MLA"
        raise UnsupportedError(f"scales of a float8 cache other than 1, with {what}, are not supported yet")
    return kept


def _of_layer(layer: Any, heads: int, tp: int) -> tuple[Scales, Scales]:
    given = {name: getattr(layer, name, "missing") for name in ("k_scale", "v_scale")}
    if all(one is None for one in given.values()):
        return (), ()
    k, v = (checked_scales(f"layer {layer.layer_id}: {name}", one, heads=heads, tp=tp) for name, one in given.items())
    return k, v
