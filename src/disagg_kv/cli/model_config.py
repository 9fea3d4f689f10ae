"""A model's cache from its ``config.json``, as Hugging Face writes it; needs neither torch nor transformers.

It knows layers that are all alike: heads or latents. ``disagg_kv.engines.hf.spec_from_config`` also knows
windows, states and indexes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..geometry import CacheSpec

OTHER_CACHES = re.compile(
    r"mamba_.*|ssm_.*|linear_.*|layers_block_type|hybrid_override_pattern|attn_type_list|block_configs|multi_query|"
    r"is_encoder_decoder|index_topk|num_kv_shared_layers|global_head_dim|conv_kernel"
)
"""Keys of models whose layers keep something else than K and V, or not all the same."""


def spec_of(path: Path, dtype: str | None) -> CacheSpec:
    """The whole model's cache.

    Args:
        path: of the file.
        dtype: of the cache; None: the model's, or bfloat16 where the file names none.

    Raises:
        ConfigurationError: the file cannot be read, or describes another kind of cache.
    """
    text = _text_part(path)
    dtype = dtype or text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    others = sorted(key for key, value in text.items() if OTHER_CACHES.fullmatch(key) and value)
    kinds = text.get("layer_types") or ()
    others += sorted({*map(str, kinds if isinstance(kinds, list | tuple) else (kinds,))} - {"full_attention"})
    if text.get("sliding_window") and text.get("use_sliding_window") is not False:
        others.append("sliding_window")
    if others:
        remedy = "pass spec_from_config of disagg_kv.engines.hf to disagg_kv.strategies.explain"
        what = "its layers do not all keep K and V of all tokens"
        raise ConfigurationError(f"--config {path}: {what} ({', '.join(others)}); remedy: {remedy}")
    layers = _count(path, text, "num_hidden_layers")
    if text.get("kv_lora_rank"):
        latent = _count(path, text, "kv_lora_rank") + _count(path, text, "qk_rope_head_dim")
        return CacheSpec.mla(layers, latent, dtype)
    heads = "num_key_value_heads" if text.get("num_key_value_heads") is not None else "num_attention_heads"
    dim = (
        _count(path, text, "head_dim")
        if text.get("head_dim") is not None
        else _count(path, text, "hidden_size") // _count(path, text, "num_attention_heads")
    )
    v_dim = text.get("v_head_dim") and _count(path, text, "v_head_dim")
    return CacheSpec.kv(layers, _count(path, text, heads), dim, dtype, v_head_dim=v_dim)


def _text_part(path: Path) -> Mapping[str, Any]:
    """The part of the file that is about text; what other parts add keeps no cache between tokens."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("text_config"), dict):
        found = {"dtype": found.get("dtype"), "torch_dtype": found.get("torch_dtype"), **found["text_config"]}
    if not isinstance(found, dict):
        raise ConfigurationError(f"--config {path}: not the config.json of a model")
    return found


def _count(path: Path, text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"--config {path}: {key} is {value!r}, not a number of at least 1")
    return value
