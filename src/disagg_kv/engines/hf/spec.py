"""The cache of a transformers model, and a rank's part of it, read from the model's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...errors import UnsupportedError
from ...geometry import CacheSpec, Component, Shard, item_bytes, shard
from ...ids import LayerId
from ..versions import require

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

INDEXED = frozenset({"deepseek_v32"})
"""Architectures whose every layer keeps an index of its own; others share one, or keep more than its keys."""

STATE = "float32"
"""Type of recurrent states, whatever the model's own type: products over thousands of tokens need it."""


def spec_from_config(config: PreTrainedConfig, dtype: str, *, model: bytes = b"") -> CacheSpec:
    """The whole model's cache.

    Transformers itself decides which kind of cache a layer has (``DynamicCache(config=config)``, version 5.23):

    * attention: ``k`` and ``v`` per KV head, or for latent attention ``latent`` and ``rope``: the model passes the
      first to its cache as keys, the second as values. A sliding window of ``n`` tokens includes the current one, so
      ``n - 1`` are cached;
    * a sparse-attention index (DeepSeek-V3.2): ``index``, one unit per token, beside latent and rope;
    * a gated delta net: the blocks ``conv.q``, ``conv.k``, ``conv.v`` of its conv state ``[1, channels, kernel]``, and
      ``delta``: ``[1, heads, key dim, value dim]``;
    * Mamba 2: the blocks ``conv.x``, ``conv.b``, ``conv.c``, and ``ssm``: ``[1, heads, head dim, state]``.

    A conv state has a row for each of the kernel's columns, a recurrent state one for each of a head's rows.

    Args:
        config: the model's configuration.
        dtype: element type of the cache, usually the model's.
        model: the value of :attr:`CacheSpec.model`.

    Raises:
        UnsupportedError: a layer with another kind of cache; the message names layer and kind.
        MissingDependencyError: transformers is not installed.
    """
    require("transformers")
    from transformers.cache_utils import DynamicCache

    if config.is_encoder_decoder:
        raise UnsupportedError(f"model type {config.model_type!r}: the cache of an encoder-decoder is not moved")
    kinds = DynamicCache(config=config).layers
    layers: dict[LayerId, tuple[Component, ...]] = {}
    for number, (kind, of) in enumerate(zip(kinds, config.get_text_config(decoder=True).per_layer_config, strict=True)):
        try:
            layers[LayerId(number)] = tuple(_components(kind, of, dtype))
        except UnsupportedError as exc:
            raise UnsupportedError(f"model type {config.model_type!r}, layer {number}: {exc}") from exc
    return CacheSpec(layers, model)


def shard_from_config(
    config: PreTrainedConfig, spec: CacheSpec, *, tp: int = 1, rank: int = 0, layers: Iterable[int] | None = None
) -> Shard:
    """A rank's part of ``spec`` if transformers itself makes the model tensor-parallel (``tp_plan="auto"``).

    Transformers splits the KV heads of architectures that have a plan for it. Every rank holds all other components
    whole.

    Args:
        config: the model's configuration.
        spec: its cache.
        tp: tensor-parallel size.
        rank: tensor-parallel index.
        layers: the layers of its pipeline stage; None: all.
    """
    text = config.get_text_config(decoder=True)
    cut = any(name.endswith("self_attn.k_proj") for name in text.base_model_tp_plan or ())
    whole = {
        c.name: range(c.units)
        for components in spec.layers.values()
        for c in components
        if c.rows or (c.name in "kv" and not cut)
    }
    return shard(spec, tp=tp, rank=rank, layers=layers, units=whole)


def _components(kind: object, config: PreTrainedConfig, dtype: str) -> Iterator[Component]:
    """The cache of one layer; ``config`` is that layer's."""
    from transformers.cache_utils import (
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )

    if type(kind) in (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer):
        yield from _states(config, dtype)
    elif type(kind) is DynamicIndexedLayer and config.model_type in INDEXED:
        yield from _attention(config, dtype, None)
        yield Component("index", dtype, 1, config.index_head_dim * item_bytes(dtype))
        return
    elif type(kind) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedError(f"keeps a {type(kind).__name__}, which cannot be moved yet")
    if isinstance(kind, DynamicLayer):
        kept = kind.sliding_window - 1 if isinstance(kind, DynamicSlidingWindowLayer) else None
        if kept == 0:
            raise UnsupportedError("a sliding window of 1 token caches nothing")
        yield from _attention(config, dtype, kept)


def _attention(config: PreTrainedConfig, dtype: str, window: int | None) -> Iterator[Component]:
    size = item_bytes(dtype)
    latent: int | None = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        rope: int = config.qk_rope_head_dim
        yield Component("latent", dtype, 1, latent * size, window=window)
        yield Component("rope", dtype, 1, rope * size, window=window)
        return
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("k", "v"):
        yield Component(name, dtype, heads, dim * size, window=window)


def _states(config: PreTrainedConfig, dtype: str) -> Iterator[Component]:
    """The blocks of a conv state, in the order of its channels, then the recurrent state."""
    if hasattr(config, "linear_num_key_heads"):
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        key, value, kernel = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
        blocks = (("q", keys, key), ("k", keys, key), ("v", values, value))
        recurrent = ("delta", values, key, value)
    elif hasattr(config, "mamba_n_groups"):
        heads, groups, state = config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_state
        kernel = config.mamba_d_conv
        blocks = (("x", heads, config.mamba_d_head), ("b", groups, state), ("c", groups, state))
        recurrent = ("ssm", heads, config.mamba_d_head, state)
    else:
        raise UnsupportedError("keeps states of another kind than a gated delta net's or Mamba 2's")
    for block, units, channels in blocks:
        yield Component(f"conv.{block}", dtype, units, channels * item_bytes(dtype), tokens_per_row=0, rows=kernel)
    name, units, rows, columns = recurrent
    yield Component(name, STATE, units, columns * item_bytes(STATE), tokens_per_row=0, rows=rows)
