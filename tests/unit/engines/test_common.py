"""The description of a cache that engines have in common: what it is made of, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg_kv.engines.common import CommonCache, Strides, common_cache, read_config, rotation
from disagg_kv.errors import UnsupportedError
from disagg_kv.ids import LayerId

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64,
    "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def cache(**changes: Any) -> CommonCache:
    return common_cache({**LLAMA, **changes}, "a model", None, "float16")


def test_k_is_a_component_of_elements_for_each_head_and_v_one_of_heads() -> None:
    spec = cache().spec
    assert list(spec.layers) == [0, 1]
    components = [(one.name, one.dtype, one.units, one.unit_bytes) for one in spec.layers[LayerId(1)]]
    assert components == [*((f"k of head {head}", "float16", 8, 2) for head in range(4)), ("v", "float16", 4, 16)]


def test_a_rank_has_all_elements_of_its_heads() -> None:
    one = cache()
    assert [(h.component, h.units) for h in one.shard(2, 1)] == [
        ("k of head 2", range(8)), ("k of head 3", range(8)), ("v", range(2, 4)),
    ]  # fmt: skip
    assert one.shard(8, 5) == one.shard(8, 4)  # ranks that replicate a head
    for rank in range(2):
        one.shard(2, rank).check(one.spec)


def test_planes_follow_the_order_of_the_ranks_memory() -> None:
    k, v = Strides(0, 100, 1000, 2, 200, 8), Strides(1, 4, 1000, 16, 64, 2)
    planes = list(cache().planes(1, range(2, 4), k, v))
    assert [(p.layer, p.component, p.buffer, p.offset, p.row_stride, p.unit_stride) for p in planes] == [
        (1, "k of head 2", 0, 100, 2, 8), (1, "k of head 3", 0, 300, 2, 8), (1, "v", 1, 4, 16, 64),
    ]  # fmt: skip
    with pytest.raises(UnsupportedError, match="layer 1: elements of V lie 4 bytes apart"):
        list(cache().planes(1, range(2, 4), k, Strides(1, 4, 1000, 16, 64, 4)))


def test_both_spellings_of_a_rotation_are_one_name() -> None:
    """Transformers 5 writes ``rope_parameters``; older ones ``rope_theta`` and ``rope_scaling``, with ``type``."""
    named = rotation({"rope_parameters": {"rope_type": "default", "rope_theta": 10000}})
    assert named == "plain, rotated by halves: default, partial_rotary_factor 1.0, rope_theta 10000.0"
    assert rotation({"rope_theta": 10000.0, "rope_scaling": None}) == named
    assert rotation({"rope_theta": 10000.0, "rope_scaling": {"type": "default"}}) == named
    assert rotation({}) == named
    assert rotation({"rope_theta": 500000.0}) != named
    assert rotation({"partial_rotary_factor": 0.5}) != named


def test_a_long_rotation_is_named_by_its_digest() -> None:
    """A format has at most 256 characters."""
    names = [rotation({"rope_parameters": {"factors": [n, *range(100)]}}) for n in range(2)]
    assert len(set(names)) == 2
    assert all(len(one) < 80 for one in names)
    cache(rope_parameters={"factors": [*range(100)]})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    ],
)
def test_a_model_that_is_not_known_to_be_the_same_in_both_engines_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match="it is not known that two engines store the same numbers") as found:
        cache(**changes)
    assert named in str(found.value)


def test_what_the_digest_and_the_sizes_depend_on(tmp_path: Path) -> None:
    """A directory's name does not count; a name and its revision do."""
    assert cache().model != cache(num_key_value_heads=2).model
    assert (cache(num_key_value_heads=None).heads, cache(head_dim=16).dim) == (8, 16)
    assert cache().model != common_cache(LLAMA, "a model", "another revision", "float16").model
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights * 100)
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA, "model_type": "llama"}))
    folders = [str(tmp_path / name) for name in "abc"]
    digests = [common_cache(read_config(one, None), one, None, "float16").model for one in folders]
    assert digests[0] == digests[1] != digests[2]
    assert common_cache(LLAMA, folders[0], "main", "float16") == common_cache(LLAMA, folders[0], None, "float16")
