"""What a transformers configuration says about the cache, and what is refused by name."""

from __future__ import annotations

import sys

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    GlmMoeDsaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)

from disagg_kv.engines.hf import shard_from_config, spec_from_config
from disagg_kv.errors import GeometryError, MissingDependencyError, UnsupportedError
from disagg_kv.geometry import CacheSpec, Component
from disagg_kv.ids import LayerId


def test_grouped_query_attention_is_keys_and_values_per_kv_head() -> None:
    """Units are KV heads, whatever the number of query heads."""
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=24)
    assert spec_from_config(config, "bfloat16", model=b"m") == CacheSpec.kv(3, 2, 24, "bfloat16", model=b"m")


def test_without_kv_heads_and_head_dim_the_query_heads_count() -> None:
    """Multi-head attention, under the names that GPT-2 gives its sizes."""
    assert spec_from_config(GPT2Config(n_layer=2, n_head=4, n_embd=64), "float32") == CacheSpec.kv(2, 4, 16, "float32")


def test_latent_attention_is_one_latent_and_one_rope_unit() -> None:
    """Every tensor-parallel rank holds both whole."""
    config = DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64)
    spec = spec_from_config(config, "bfloat16")
    assert spec.layers[LayerId(1)] == (
        Component("latent", "bfloat16", 1, 1024),
        Component("rope", "bfloat16", 1, 128),
    )


def test_a_sparse_attention_index_is_one_more_component_of_a_token() -> None:
    """Rows like those of the latent, in the order in which the model caches them."""
    config = DeepseekV32Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert spec_from_config(config, "bfloat16").layers[LayerId(1)] == (
        Component("latent", "bfloat16", 1, 1024),
        Component("rope", "bfloat16", 1, 128),
        Component("index", "bfloat16", 1, 256),
    )


def test_a_sliding_window_keeps_one_token_less_than_it_sees() -> None:
    """Layers that slide and layers that do not, as the configuration says."""
    kinds = ["sliding_attention", "full_attention"]
    config = Qwen3Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=64, layer_types=kinds)
    spec = spec_from_config(config, "bfloat16")
    assert [[c.window for c in spec.layers[LayerId(i)]] for i in range(2)] == [[63, 63], [None, None]]


def test_a_gated_delta_net_has_a_component_per_block_of_its_conv_state() -> None:
    """Q and k have other heads than v; the recurrent state is float32 whatever the model's type."""
    spec = spec_from_config(Qwen3NextConfig(num_hidden_layers=4), "bfloat16")
    assert spec.layers[LayerId(0)] == (
        Component("conv.q", "bfloat16", 16, 128 * 2, 0, rows=4),
        Component("conv.k", "bfloat16", 16, 128 * 2, 0, rows=4),
        Component("conv.v", "bfloat16", 32, 128 * 2, 0, rows=4),
        Component("delta", "float32", 32, 128 * 4, 0, rows=128),
    )
    assert [c.name for c in spec.layers[LayerId(3)]] == ["k", "v"]


def test_mamba_beside_attention_has_both_in_one_layer() -> None:
    """Heads for x and the recurrent state, groups for B and C."""
    config = FalconH1Config(num_hidden_layers=1, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=32)
    (components,) = spec_from_config(config, "float32").layers.values()
    assert [(c.name, c.units, c.unit_bytes, c.rows) for c in components] == [
        ("conv.x", 8, 32, 4),
        ("conv.b", 1, 128, 4),
        ("conv.c", 1, 128, 4),
        ("ssm", 8, 128, 8),
        ("k", 8, 512, 0),
        ("v", 8, 512, 0),
    ]


def test_what_transformers_does_not_cut_every_rank_holds_whole() -> None:
    """States always, and the heads of an architecture without a tensor-parallel plan."""
    config = Qwen3NextConfig(num_hidden_layers=4, num_key_value_heads=2)
    spec = spec_from_config(config, "float32")
    held = shard_from_config(config, spec, tp=2, rank=1)
    assert held.units(LayerId(0), "delta") == (range(32),)
    assert held.units(LayerId(3), "k") == (range(1, 2),)
    falcon = FalconH1Config(num_hidden_layers=1, num_key_value_heads=8)
    whole = shard_from_config(falcon, spec_from_config(falcon, "float32"), tp=2, rank=1)
    assert whole.units(LayerId(0), "k") == (range(8),)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(num_hidden_layers=2, sliding_window=1), r"'mistral', layer 0: a sliding window of 1 token"),
        (MambaConfig(num_hidden_layers=2), r"'mamba', layer 0: keeps states of another kind"),
        (GlmMoeDsaConfig(num_hidden_layers=2), r"'glm_moe_dsa', layer 0: keeps a DynamicIndexedLayer"),
        (T5Config(), r"'t5': .*encoder-decoder"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_is_not_moved_yet_is_refused_by_layer_and_kind(config: PreTrainedConfig, message: str) -> None:
    """Never a part of a hybrid model's cache as if it were all of it."""
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
