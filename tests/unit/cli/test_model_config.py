"""A model's cache from its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg_kv.cli.model_config import spec_of
from disagg_kv.errors import ConfigurationError
from disagg_kv.geometry import CacheSpec

LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}


def wrote(folder: Path, **config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_heads_their_size_and_the_dtype_are_read(tmp_path: Path) -> None:
    assert spec_of(wrote(tmp_path, **LLAMA), None) == CacheSpec.kv(80, 8, 128, "bfloat16")
    assert spec_of(wrote(tmp_path, **LLAMA), "float8_e4m3fn") == CacheSpec.kv(80, 8, 128, "float8_e4m3fn")
    named = {**LLAMA, "head_dim": 64, "v_head_dim": 32, "torch_dtype": None, "dtype": "float16"}
    assert spec_of(wrote(tmp_path, **named), None) == CacheSpec.kv(80, 8, 64, "float16", v_head_dim=32)
    old = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "torch_dtype")}
    assert spec_of(wrote(tmp_path, **old), None) == CacheSpec.kv(80, 64, 128, "bfloat16")


def test_latents_and_the_text_part_of_a_model_with_pictures(tmp_path: Path) -> None:
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
    assert spec_of(wrote(tmp_path, **latent), None) == CacheSpec.mla(61, 576, "bfloat16")
    pictures = {"torch_dtype": "float16", "text_config": {k: v for k, v in LLAMA.items() if k != "torch_dtype"}}
    assert spec_of(wrote(tmp_path, **pictures), None) == CacheSpec.kv(80, 8, 128, "float16")


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    kinds = ["full_attention"] * 80
    for without in ({"sliding_window": None}, {"sliding_window": 128, "use_sliding_window": False}):
        assert not spec_of(wrote(tmp_path, **LLAMA, layer_types=kinds, **without), None).slides()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mamba_d_state": 128}, r"K and V of all tokens \(mamba_d_state\); remedy: pass spec_from_config"),
        ({"layer_types": ["linear_attention"] * 80}, "linear_attention"),
        ({"index_topk": 2048}, "index_topk"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"head_dim": True}, "head_dim is True"),
        ({"sliding_window": 128}, r"\(sliding_window\)"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        spec_of(wrote(tmp_path, **{**LLAMA, **more}), None)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        spec_of(tmp_path / "none.json", None)
    path = tmp_path / "config.json"
    for text, words in (("[1]", "not the config.json of a model"), ("{", "Expecting property name")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=words):
            spec_of(path, None)
