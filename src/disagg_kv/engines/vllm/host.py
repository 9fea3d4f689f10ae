"""What the connector reads of vLLM's configuration, and what it refuses by name.

vLLM's objects are read by attribute, so this module does not import vLLM. Its classes of cache specs are known by name:
one that is not in :data:`ATTENTION`, and is not :data:`STATES`, is refused, since its bytes may mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ...errors import UnsupportedError
from ...geometry.spec import PLAIN
from ...ids import KV, GroupId
from ..common import CommonCache, common_cache, read_config
from ..model import model_digest
from .cache import LayerShape
from .request import BlockGroup
from .states import state_shape

ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""Cache specs of vLLM whose tensors have an axis of tokens, and nothing else in them."""

STATES = "MambaSpec"
"""That of layers with states."""


@frozen
class EngineFacts:
    """An instance of vLLM, as the connector needs it.

    Args:
        instance: its name: vLLM's ``engine_id``, which each data-parallel rank has for itself.
        tp: number of tensor-parallel ranks.
        blocks: number of cache blocks.
        block: tokens of a block.
        row: tokens of a row: 1, or ``block`` where the memory never separates them.
        groups: the cache groups, in order.
        layers: the layers' caches, in the order of the model.
        model: identifies the model.
        common: the cache in the terms that engines share; None: it is described as vLLM stores it.
    """

    instance: str
    tp: int
    blocks: int
    block: int
    row: int
    groups: tuple[BlockGroup, ...]
    layers: tuple[LayerShape, ...]
    model: bytes
    common: CommonCache | None = None


def facts(
    vllm_config: Any, kv_cache_config: Any, *, tiles: bool, common: bool = False, channels_first: bool = False
) -> EngineFacts:
    """Read them.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        tiles: the platform's attention stores the K of a whole block before its V.
        common: describe the cache in the terms that engines share.
        channels_first: vLLM's layout of conv states.

    Raises:
        UnsupportedError: a feature or a kind of cache that the connector does not move.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    refuse(vllm_config)
    specs = _layer_specs(kv_cache_config)
    tokens = [one for one in specs if type(one[2]).__name__ != STATES]
    if not tokens:
        raise UnsupportedError("the model has no KV cache of tokens that is transferred")
    if kv_cache_config.has_mixed_precision_kv_cache:
        # VLLM clears new blocks within a step, after transfers into them have begun.
        raise UnsupportedError("DisaggKVConnector does not support caches of several precisions yet")
    blocks = {spec.block_size for _, _, spec in tokens}
    if len(blocks) > 1:
        raise UnsupportedError(f"cache groups with blocks of {sorted(blocks)} tokens are not supported yet")
    block = blocks.pop()
    shared = _common(vllm_config, specs, tiles=tiles) if common else None
    whole = tiles and any(type(spec).__name__ != "MLAAttentionSpec" for _, _, spec in tokens)
    row, cache_dtype = block if whole and not common else 1, str(vllm_config.cache_config.cache_dtype)
    layers = tuple(
        _state_layer(group, name, spec, model, parallel, channels_first=channels_first)
        if type(spec).__name__ == STATES
        else LayerShape(
            name, group, _heads(name, spec, model, parallel), _window(spec), *_content(spec, row, cache_dtype)
        )
        for group, name, spec in specs
    )
    stateful = {one.group for one in layers if one.states is not None}
    groups = tuple(
        BlockGroup(
            KV if common else _group(index), index, block, row, _window_of(_group(index), layers),
            states=_group(index) in stateful,
        )
        for index in kv_cache_config.transfer_group_ids
    )  # fmt: skip
    digest = model_digest(
        str(model.model),
        model.hf_config.to_dict(),
        model.dtype,
        model.quantization,
        model.revision,
    )
    return EngineFacts(
        str(vllm_config.kv_transfer_config.engine_id),
        parallel.tensor_parallel_size,
        kv_cache_config.num_blocks,
        block,
        row,
        groups,
        layers,
        digest,
        shared,
    )


def _common(vllm_config: Any, specs: Sequence[tuple[GroupId, str, Any]], *, tiles: bool) -> CommonCache:
    """The cache in the terms that engines share; raises what is not known to be the same in another engine."""
    model, cache_dtype = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    kinds = {type(spec).__name__ for _, _, spec in specs}
    reasons = {
        "GPU backends": not tiles,
        f"caches of the kind {', '.join(sorted(kinds))}": kinds != {"FullAttentionSpec"},
        "several cache groups": len({group for group, _, _ in specs}) > 1,
        f"a cache of {cache_dtype}": cache_dtype not in ("auto", dtype),
        f"quantization {model.quantization}": model.quantization is not None,
        "hf_overrides": bool(model.hf_overrides),
    }
    if used := [reason for reason, on in reasons.items() if on]:
        raise UnsupportedError(f"description 'common' does not support vLLM's {', '.join(used)} yet")
    path = str(model.model)
    return common_cache(read_config(path, model.revision), path, model.revision, dtype)


def refuse(vllm_config: Any) -> None:
    """Raise an :class:`UnsupportedError` for a feature of vLLM under which the connector would not be right."""
    parallel = vllm_config.parallel_config
    wanted: Mapping[str, bool] = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "sleep mode": vllm_config.model_config.enable_sleep_mode,
    }
    for feature, used in wanted.items():
        if used:
            raise UnsupportedError(f"DisaggKVConnector does not support vLLM's {feature} yet")


def refuse_layered(vllm_config: Any) -> None:
    """Raise an :class:`UnsupportedError` where vLLM computes a layer in several parts, each announced as the layer."""
    if vllm_config.parallel_config.use_ubatching:
        raise UnsupportedError("a strategy that sends layers cannot be used with vLLM's dual-batch overlap")


def refuse_states(vllm_config: Any) -> None:
    """Raise an :class:`UnsupportedError` where a prefill instance with states might send rows that are zeros.

    For models with states vLLM zeroes blocks that it gives to a request. Its newer model runner does so before the
    connector can know that they were taken from another one, whose rows may still be read.
    """
    if vllm_config.use_v2_model_runner:
        raise UnsupportedError("models with states on a prefill instance need VLLM_USE_V2_MODEL_RUNNER=0")


def _group(index: int) -> GroupId:
    return GroupId(f"group {index}")


def _layer_specs(kv_cache_config: Any) -> list[tuple[GroupId, str, Any]]:
    """Group, name and spec of each layer; the order of the model, which is the same on all ranks."""
    found: list[tuple[GroupId, str, Any]] = []
    for index in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            if type(spec).__name__ not in (*ATTENTION, STATES):
                raise UnsupportedError(
                    f"layer {name}: DisaggKVConnector does not move vLLM's {type(spec).__name__} yet; "
                    f"it moves {', '.join((*ATTENTION, STATES))}"
                )
            found.append((_group(index), name, spec))
    return sorted(found, key=lambda one: _natural(one[1]))


def _natural(name: str) -> list[tuple[int, str]]:
    """``model.layers.10`` after ``model.layers.9``."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


def _heads(name: str, spec: Any, model: Any, parallel: Any) -> int:
    """Heads of the whole model."""
    if type(spec).__name__ == "MLAAttentionSpec":
        return 1
    total = int(model.get_total_num_kv_heads())
    local = max(1, total // parallel.tensor_parallel_size)
    if spec.num_heads != local:
        raise UnsupportedError(
            f"layer {name}: {spec.num_heads} KV heads on a rank of {parallel.tensor_parallel_size}, of {total} in all"
        )
    return total


def _state_layer(
    group: GroupId, name: str, spec: Any, model: Any, parallel: Any, *, channels_first: bool
) -> LayerShape:
    states = state_shape(
        name, spec, model.hf_text_config, tp=parallel.tensor_parallel_size, channels_first=channels_first
    )
    return LayerShape(name, group, states.heads, None, "", states=states)


def _window(spec: Any) -> int | None:
    """Tokens of a sliding window behind which vLLM frees blocks.

    A ``FullAttentionSpec`` has all rows, whatever its ``sliding_window``. Without its hybrid cache manager vLLM merges
    the specs of all layers into one, which carries the window of those that slide.
    """
    return int(spec.sliding_window) if type(spec).__name__ == "SlidingWindowSpec" else None


def _window_of(group: GroupId, layers: Sequence[LayerShape]) -> int | None:
    return min((one.window for one in layers if one.group == group and one.window is not None), default=None)


def _content(spec: Any, row: int, cache_dtype: str) -> tuple[str, tuple[int, int] | None]:
    """Names what is inside ``content``; and the elements of K and V, if they lie side by side without other bytes."""
    mode = getattr(spec.kv_quant_mode, "name", "NONE")
    latent = type(spec).__name__ == "MLAAttentionSpec"
    packed = (spec.num_head_slots, spec.state_content_bytes, spec.tokens_per_state) != (None, None, 1)
    if row == 1 and not latent and not packed and mode in ("NONE", "FP8_PER_TENSOR"):
        return f"{PLAIN}, vllm", (int(spec.head_size), int(spec.head_size_v))
    kind = f"{'latent' if latent else 'kv'}{' of a block' if row > 1 else ''}"
    return f"vllm {kind} {mode.lower()}{'' if mode == 'NONE' else f' {cache_dtype}'}", None
