"""What a transformers configuration says about the cache, and what is refused by name."""

from __future__ import annotations

import sys

import pytest
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from disagg_kv.engines.hf import spec_from_config
from disagg_kv.errors import GeometryError, MissingDependencyError, UnsupportedError
from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.ids import LayerId


def test_grouped_query_attention_is_keys_and_values_per_kv_head() -> None:
    """A6: units are KV heads, whatever the number of query heads."""
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=24)
    assert spec_from_config(config, "bfloat16", model=b"m") == CacheSpec.kv(3, 2, 24, "bfloat16", model=b"m")


def test_without_kv_heads_and_head_dim_the_query_heads_count() -> None:
    """Multi-head attention, under the names that GPT-2 gives its sizes."""
    assert spec_from_config(GPT2Config(n_layer=2, n_head=4, n_embd=64), "float32") == CacheSpec.kv(2, 4, 16, "float32")


def test_latent_attention_is_one_latent_and_one_rope_unit() -> None:
    """A11: every tensor-parallel rank holds both whole."""
    config = DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64)
    spec = spec_from_config(config, "bfloat16")
    assert spec.layers[LayerId(1)] == (
        Component("latent", "bfloat16", 1, 1024),
        Component("rope", "bfloat16", 1, 128),
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(num_hidden_layers=2, sliding_window=64), r"'mistral', layer 0: .*DynamicSlidingWindowLayer"),
        (Qwen3NextConfig(num_hidden_layers=4), r"'qwen3_next', layer 0: .*LinearAttention"),
        (MambaConfig(num_hidden_layers=2), r"'mamba', layer 0: .*LinearAttention"),
        (T5Config(), r"'t5': .*encoder-decoder"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_is_not_moved_yet_is_refused_by_layer_and_kind(config: PreTrainedConfig, message: str) -> None:
    """B7: never a part of a hybrid model's cache as if it were all of it."""
    with pytest.raises(UnsupportedError, match=message):
        spec_from_config(config, "float32")


def test_an_unknown_dtype_is_refused() -> None:
    """With the known ones."""
    with pytest.raises(GeometryError, match=r"unknown dtype 'float4'; known: .*bfloat16"):
        spec_from_config(LlamaConfig(num_hidden_layers=1), "float4")


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optional dependency is named with its remedy."""
    config = LlamaConfig(num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'disagg_kv\[hf\]'"):
        spec_from_config(config, "float32")
