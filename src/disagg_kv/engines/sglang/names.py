"""The names of SGLang that the plug-in uses. They move between versions, so they are looked up before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ...errors import UnsupportedError

NAMES: Mapping[str, Sequence[str]] = {
    "sglang.srt.plugins.hook_registry": ("HookRegistry.register", "HookRegistry.apply_hooks", "HookType.AROUND"),
    "sglang.srt.environ": (
        "envs.SGLANG_DISAGG_STAGING_BUFFER", "envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
        "envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK",
    ),
    "sglang.srt.server_args": (
        "add_disagg_transfer_backend_choices", "ServerArgs.dcp_size",
        "ServerArgs.speculative_algorithm", "ServerArgs.enable_hierarchical_cache", "ServerArgs.tokenizer_worker_num",
        "ServerArgs.enable_hisparse", "ServerArgs.model_path", "ServerArgs.host", "ServerArgs.device",
        "ServerArgs.disaggregation_bootstrap_port", "ServerArgs.disaggregation_enable_kv_checksum",
        "ServerArgs.enable_pd_role_switch",
        "ServerArgs.disaggregation_decode_allocation_policy", "ServerArgs.json_model_override_args",
        "ServerArgs.revision", "ServerArgs.enable_memory_saver", "ServerArgs.allow_auto_truncate",
        "ServerArgs.enable_two_batch_overlap", "ServerArgs.dllm_algorithm", "ServerArgs.enable_lmcache",
        "ServerArgs.enable_flexkv", "ServerArgs.enable_unified_cache_external_linker", "ServerArgs.radix_cache_backend",
    ),
    "sglang.srt.disaggregation.utils": (
        "TransferBackend", "KVClassType.MANAGER", "KVClassType.SENDER", "KVClassType.RECEIVER",
        "KVClassType.BOOTSTRAP_SERVER", "DisaggregationMode.PREFILL", "get_kv_class",
        "MetadataBuffers.get_buf_infos",
    ),
    "sglang.srt.disaggregation.base.conn": (
        "BaseKVManager.enable_deferred_decode_kv_release", "BaseKVSender.pop_decode_prefix_len",
        "BaseKVSender.should_send_kv_chunk",
        "BaseKVSender.get_transfer_metric", "BaseKVReceiver.send_metadata", "BaseKVReceiver.failure_exception",
        "BaseKVBootstrapServer", "KVTransferMetric.transfer_latency_s", "KVTransferMetric.transfer_total_bytes",
        "KVPoll.Failed", "KVPoll.Bootstrapping", "KVPoll.WaitingForInput", "KVPoll.Transferring", "KVPoll.Success",
        "KVArgs.kv_data_ptrs", "KVArgs.kv_data_lens", "KVArgs.kv_item_lens", "KVArgs.aux_data_ptrs",
        "KVArgs.aux_data_lens", "KVArgs.aux_item_lens", "KVArgs.page_size", "KVArgs.state_types",
        "KVArgs.num_draft_entries", "KVArgs.kv_layout", "KVArgs.kv_cache_dtype_str",
    ),
    "sglang.srt.configs.model_config": ("ModelConfig.from_server_args", "ModelConfig.get_total_num_kv_heads"),
    "sglang.srt.runtime_context": ("get_parallel", "get_disagg"),
}  # fmt: skip
"""Attributes, and attributes of those, by module. A field that a class only annotates counts."""

WORDS: Mapping[str, Sequence[str]] = {
    "sglang.srt.disaggregation.prefill": (
        "_early_send_wait_event", "pop_decode_prefix_len", "should_send_kv_chunk", "failure_exception",
        "create_sender", "translate_kv_indices_for_transfer", "extend_end", "checkpoint_disagg_prefill",
        "pending_bootstrap", "prefix_len",
    ),
    "sglang.srt.disaggregation.decode": (
        "transfer_queue", "deferred_kv_release_timeout", "enable_deferred_decode_kv_release", "abort_notified",
        "ensure_abort_notified", "bootstrap_infos", "is_abort_release_safe", "clear_deferred_abort_state",
        "_create_receiver_and_enqueue", "prefill_info_table", "try_ensure_parallel_info", "submit_prefill_recompute",
        "require_staging", "decode_prefix_len", "origin_input_ids", "failure_exception",
    ),
    "sglang.srt.disaggregation.utils": ("output_ids", "bootstrap_room"),
    "sglang.srt.managers.schedule_batch": (
        "return_logprob", "return_hidden_states", "return_sampling_mask", "multimodal_inputs", "input_embeds",
        "origin_input_ids", "disagg_kv_sender", "req_pool_idx", "forward_mode",
    ),
    "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend", "forward", "layer"),
    "sglang.srt.sampling.sampling_params": ("custom_params",),
    "sglang.srt.managers.scheduler": (
        "forward_stream", "enable_overlap", "run_batch", "req_to_token_pool", "token_to_kv_pool_allocator",
    ),
    "sglang.srt.runtime_context": (
        "attn_tp_size", "attn_tp_rank", "attn_tp_group", "attn_dp_size", "dp_size", "dp_rank",
        "pp_size", "attn_cp_size",
    ),
    "sglang.srt.arg_groups.fields.parallel": ("load_balance_method", "follow_bootstrap_room", "nnodes"),
}  # fmt: skip
"""Words of a module's source: attributes of its objects, or of the plug-in's, that only appear when it runs. The
module is not imported: SGLang imports these later, and in few of its processes."""


def check(names: Mapping[str, Sequence[str]] = NAMES, words: Mapping[str, Sequence[str]] = WORDS) -> None:
    """Raise an :class:`UnsupportedError` that lists the names that this SGLang does not have."""
    missing = [f"{module}.{name}" for module, several in names.items() for name in several if not _found(module, name)]
    missing += [f"{word} in {module}" for module, several in words.items() for word in _unmentioned(module, several)]
    if missing:
        raise UnsupportedError(f"not found in this SGLang: {', '.join(missing)}")


def _found(module: str, name: str) -> bool:
    try:
        found = import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module == exc.name or module.startswith(f"{exc.name}.")):
            return False
        raise
    for part in name.split("."):
        if not hasattr(found, part):
            return any(part in vars(one).get("__annotations__", {}) for one in getattr(found, "__mro__", ()))
        found = getattr(found, part)
    return True


def _unmentioned(module: str, words: Sequence[str]) -> list[str]:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return list(words)
    source = Path(spec.origin).read_text(errors="replace")
    return [word for word in words if not re.search(rf"\b{word}\b", source)]
