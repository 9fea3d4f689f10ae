"""What the connector reads of vLLM's configuration, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg_kv.engines.vllm.host import facts, refuse_layered, refuse_states
from disagg_kv.errors import UnsupportedError
from disagg_kv.ids import KV, GroupId
from tests.support.vllm_like import (
    MLA,
    TWO_GROUPS,
    CrossAttentionSpec,
    FullAttentionSpec,
    Model,
    SlidingWindowSpec,
    configs,
    layer_name,
)


def test_an_instance_with_full_attention() -> None:
    vllm, cache = configs(Model(heads=4), "engine-7", tp=2, blocks=9)
    found = facts(vllm, cache, tiles=False)
    assert (found.instance, found.tp, found.blocks, found.block, found.row) == ("engine-7", 2, 9, 4, 1)
    assert [(g.id, g.index, g.block, g.row, g.page_rows) for g in found.groups] == [("group 0", 0, 4, 1, 4)]
    assert [layer.name for layer in found.layers] == [layer_name(n) for n in range(3)]
    assert {(layer.heads, layer.window, layer.format, layer.parts) for layer in found.layers} == {
        (4, None, "plain, vllm", (5, 3))
    }


def test_a_row_is_a_block_where_the_platform_never_cuts_one() -> None:
    found = facts(*configs(Model(), "P"), tiles=True)
    assert found.row == 4
    assert found.groups[0].page_rows == 1
    assert {(layer.format, layer.parts) for layer in found.layers} == {("vllm kv of a block none", None)}


def test_a_latent_has_one_head_and_rows_of_a_token() -> None:
    found = facts(*configs(MLA, "P", tp=2), tiles=True)
    assert found.row == 1
    assert {(layer.heads, layer.format) for layer in found.layers} == {(1, "vllm latent none")}


def test_two_groups_in_the_order_of_the_model() -> None:
    """Layer 10 follows layer 9. The order of layers must be that of the other instance."""
    model = Model(groups=((FullAttentionSpec, (0, 10), None), (SlidingWindowSpec, (9, 1), 6)))
    found = facts(*configs(model, "P"), tiles=False)
    assert [(layer.name, layer.group, layer.window) for layer in found.layers] == [
        (layer_name(0), GroupId("group 0"), None),
        (layer_name(1), GroupId("group 1"), 6),
        (layer_name(9), GroupId("group 1"), 6),
        (layer_name(10), GroupId("group 0"), None),
    ]
    assert [group.window for group in found.groups] == [None, 6]


def test_only_the_groups_that_vllm_transfers() -> None:
    vllm, cache = configs(TWO_GROUPS, "P")
    cache.transfer_group_ids = [1]
    found = facts(vllm, cache, tiles=False)
    assert [group.index for group in found.groups] == [1]
    assert [layer.name for layer in found.layers] == [layer_name(1), layer_name(3)]


def test_a_group_may_have_a_spec_per_layer() -> None:
    """``UniformTypeKVCacheSpecs``."""
    vllm, cache = configs(Model(heads=4), "P")
    group = cache.kv_cache_groups[0]
    window = SlidingWindowSpec(4, 4, 6)
    group.kv_cache_spec = SimpleNamespace(
        kv_cache_specs={
            layer_name(0): FullAttentionSpec(4, 4),
            layer_name(1): window,
            layer_name(2): FullAttentionSpec(4, 4, kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR")),
        }
    )
    found = facts(vllm, cache, tiles=False)
    assert [layer.window for layer in found.layers] == [None, 6, None]
    assert {(layer.format, layer.parts) for layer in found.layers} == {("plain, vllm", (5, 3))}


@pytest.mark.parametrize(
    ("mode", "changes", "tiles", "named"),
    [
        ("FP8_PER_TOKEN_HEAD", {}, False, "vllm kv fp8_per_token_head fp8_e5m2"),
        ("FP8_PER_TENSOR", {}, True, "vllm kv of a block fp8_per_tensor fp8_e5m2"),
        ("NONE", {"num_head_slots": 2}, False, "vllm kv none"),
        ("NONE", {"state_content_bytes": 40}, False, "vllm kv none"),
        ("NONE", {"tokens_per_state": 4}, False, "vllm kv none"),
    ],
)
def test_content_that_is_not_one_k_and_one_v_is_one_opaque_component(
    mode: str, changes: dict[str, Any], tiles: bool, named: str
) -> None:
    """It crosses between equal formats only; that of a quantized one names vLLM's type of the cache."""
    vllm, cache = configs(Model(), "P")
    vllm.cache_config.cache_dtype = "fp8_e5m2"
    cache.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        4, 4, kv_quant_mode=SimpleNamespace(name=mode), **changes
    )
    assert {(one.format, one.parts) for one in facts(vllm, cache, tiles=tiles).layers} == {(named, None)}


@pytest.mark.parametrize("tiles", [False, True])
def test_full_attention_is_full_whatever_window_its_merged_spec_carries(tiles: bool) -> None:
    """Without the hybrid cache manager vLLM makes sliding layers full ones, and merges them with those that are.

    The spec of the one group then has the window of the sliding layers; see ``unify_hybrid_kv_cache_specs``.
    """
    found = facts(*configs(Model(groups=((FullAttentionSpec, (0, 1, 2, 3), 6),)), "P"), tiles=tiles)
    assert {layer.window for layer in found.layers} == {None}
    assert [group.window for group in found.groups] == [None]


def test_a_window_over_rows_of_a_block() -> None:
    found = facts(*configs(TWO_GROUPS, "P"), tiles=True)
    assert [(layer.window, layer.format) for layer in found.layers] == [
        (None, "vllm kv of a block none"),
        (6, "vllm kv of a block none"),
    ] * 2


def _set(path: str, value: Any) -> Any:
    def change(vllm: Any, cache: Any) -> None:
        owner, _, name = path.rpartition(".")
        setattr(getattr(vllm, owner) if owner else vllm, name, value)

    return change


def _spec(value: Any, group: int = 0) -> Any:
    def change(vllm: Any, cache: Any) -> None:
        cache.kv_cache_groups[group].kv_cache_spec = value

    return change


def _no_groups(vllm: Any, cache: Any) -> None:
    cache.transfer_group_ids = []


@pytest.mark.parametrize(
    ("change", "tiles", "message"),
    [
        (_set("speculative_config", object()), False, "speculative decoding"),
        (_set("parallel_config.pipeline_parallel_size", 2), False, "pipeline parallelism"),
        (_set("parallel_config.decode_context_parallel_size", 2), False, "decode context parallelism"),
        (_set("parallel_config.prefill_context_parallel_size", 2), False, "prefill context parallelism"),
        (_spec(CrossAttentionSpec(4, 4)), False, "layer model.layers.0.*CrossAttentionSpec.*FullAttentionSpec"),
        (_spec(SimpleNamespace(block_size=4)), False, "SimpleNamespace"),
        (_spec(FullAttentionSpec(4, 3)), False, "3 KV heads on a rank of 1, of 4 in all"),
        (_spec(FullAttentionSpec(8, 4)), False, r"blocks of \[4, 8\] tokens"),
        (_no_groups, False, "no KV cache"),
        (_set("model_config.enable_sleep_mode", True), False, "sleep mode"),
        (lambda _, cache: setattr(cache, "has_mixed_precision_kv_cache", True), False, "several precisions"),
    ],
)
def test_what_is_not_moved_is_refused_by_name(change: Any, tiles: bool, message: str) -> None:
    vllm, cache = configs(TWO_GROUPS, "P")
    change(vllm, cache)
    with pytest.raises(UnsupportedError, match=message):
        facts(vllm, cache, tiles=tiles)


def test_layers_that_are_computed_in_parts_are_not_sent_one_by_one() -> None:
    vllm, _ = configs(Model(), "P")
    refuse_layered(vllm)
    vllm.parallel_config.use_ubatching = True
    with pytest.raises(UnsupportedError, match="dual-batch overlap"):
        refuse_layered(vllm)


def test_states_are_not_sent_where_vllm_zeroes_blocks_too_early() -> None:
    vllm, _ = configs(Model(), "P")
    vllm.use_v2_model_runner = False
    refuse_states(vllm)
    vllm.use_v2_model_runner = True
    with pytest.raises(UnsupportedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_states(vllm)


def test_context_parallelism_of_one_is_none() -> None:
    vllm, cache = configs(Model(), "P")
    vllm.parallel_config.prefill_context_parallel_size = 1
    assert facts(vllm, cache, tiles=False).tp == 1


def test_instances_of_one_model_agree_whatever_their_names_and_sizes() -> None:
    """And whatever the types of their caches, which the components name."""
    digest = facts(*configs(Model(), "P"), tiles=False).model
    vllm, cache = configs(Model(), "P")
    vllm.cache_config.cache_dtype = "fp8"
    assert facts(vllm, cache, tiles=False).model == digest
    assert digest == facts(*configs(Model(), "D", tp=2, blocks=7), tiles=True).model
    for path, value in [
        ("model_config.model", "another/model"),
        ("model_config.dtype", "bfloat16"),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_config", SimpleNamespace(to_dict=lambda: {"layers": 4})),
    ]:
        vllm, cache = configs(Model(), "P")
        _set(path, value)(vllm, cache)
        assert facts(vllm, cache, tiles=False).model != digest, path


def test_more_ranks_than_heads() -> None:
    """Each head is on several ranks."""
    found = facts(*configs(Model(heads=2), "P", tp=4), tiles=False)
    assert {layer.heads for layer in found.layers} == {2}


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "rope_theta": 10000.0,
}  # fmt: skip


def described(folder: Path, **given: Any) -> tuple[Any, Any]:
    """Configurations of an instance of a model that is in ``folder``."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    vllm, cache = configs(Model(heads=4), "P", **given)
    vllm.model_config.model = str(folder)
    return vllm, cache


def test_the_common_description_has_rows_of_a_token_and_no_facts_of_vllm(tmp_path: Path) -> None:
    """Nothing in it depends on this instance."""
    found = facts(*described(tmp_path), tiles=True, common=True)
    assert (found.row, [(group.id, group.page_rows) for group in found.groups]) == (1, [(KV, 4)])
    assert found.common is not None
    assert (found.common.layers, found.common.heads, found.common.dim, found.common.dtype) == (3, 4, 8, "float16")
    other = facts(*described(tmp_path, tp=2, block=8, blocks=7), tiles=True, common=True)
    assert found.common == other.common
    assert facts(*described(tmp_path), tiles=True).common is None


@pytest.mark.parametrize(
    ("change", "tiles", "message"),
    [
        (_set("speculative_config", None), False, "GPU backends"),
        (_spec(SlidingWindowSpec(4, 4, 6)), True, "caches of the kind SlidingWindowSpec"),
        (_set("cache_config.cache_dtype", "fp8"), True, "a cache of fp8"),
        (_set("model_config.quantization", "awq"), True, "quantization awq"),
        (_set("model_config.hf_overrides", {"rope_theta": 1.0}), True, "hf_overrides"),
        (_set("model_config.dtype", torch.bfloat16), True, None),
        (_set("cache_config.cache_dtype", "float16"), True, None),
    ],
    ids=range(7),
)
def test_what_has_no_common_description_is_refused_by_name(
    tmp_path: Path, change: Any, tiles: bool, message: str | None
) -> None:
    vllm, cache = described(tmp_path)
    change(vllm, cache)
    if message is None:
        assert facts(vllm, cache, tiles=tiles, common=True).common is not None
        return
    with pytest.raises(UnsupportedError, match=f"description 'common' does not support vLLM's {message} yet"):
        facts(vllm, cache, tiles=tiles, common=True)


def test_several_groups_have_no_common_description(tmp_path: Path) -> None:
    vllm, cache = configs(TWO_GROUPS, "P")
    with pytest.raises(UnsupportedError, match="FullAttentionSpec, SlidingWindowSpec, several cache groups"):
        facts(vllm, cache, tiles=True, common=True)
