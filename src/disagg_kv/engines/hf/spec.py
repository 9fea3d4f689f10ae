"""Which cache a transformers model keeps, read from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnsupportedError
from ...geometry import CacheSpec, Component, item_bytes
from ...ids import LayerId
from .optional import require_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def spec_from_config(config: PreTrainedConfig, dtype: str, *, model: bytes = b"") -> CacheSpec:
    """The whole model's cache: ``k`` and ``v`` per KV head, or for latent attention ``latent`` and ``rope``.

    A layer's first component is what the model passes to its cache as keys, the second as values. Which kind of cache
    a layer keeps is transformers' own decision (``DynamicCache(config=config)``); latent attention keeps
    ``[1, 1, tokens, kv_lora_rank]`` and ``[1, 1, tokens, qk_rope_head_dim]`` (transformers 5.23,
    ``modeling_deepseek_v3.py``).

    Args:
        config: the model's configuration.
        dtype: element type of the cache, usually the model's.
        model: what :attr:`CacheSpec.model` should be.

    Raises:
        UnsupportedError: a layer that keeps something else than all tokens of full attention; names layer and kind.
        MissingDependencyError: transformers is not installed.
    """
    require_transformers()
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if config.is_encoder_decoder:
        raise UnsupportedError(f"model type {config.model_type!r}: the cache of an encoder-decoder is not moved")
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    layers: dict[LayerId, tuple[Component, Component]] = {}
    for number, (kind, of) in enumerate(zip(kinds, config.get_text_config(decoder=True).per_layer_config, strict=True)):
        if kind is not DynamicLayer:
            raise UnsupportedError(
                f"model type {config.model_type!r}, layer {number}: keeps a {kind.__name__}; "
                "only full attention (DynamicLayer) is moved yet"
            )
        layers[LayerId(number)] = _components(of, dtype)
    return CacheSpec(layers, model)


def _components(config: PreTrainedConfig, dtype: str) -> tuple[Component, Component]:
    """Keys and values of one layer; ``config`` is that layer's."""
    size = item_bytes(dtype)
    latent: int | None = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        rope: int = config.qk_rope_head_dim
        return Component("latent", dtype, 1, latent * size), Component("rope", dtype, 1, rope * size)
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Component("k", dtype, heads, dim * size), Component("v", dtype, heads, dim * size)
