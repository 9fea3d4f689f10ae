"""The names of SGLang that the plug-in uses. They move between versions, so they are looked up before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from ...errors import UnsupportedError

NAMES: Mapping[str, Sequence[str]] = {
    "sglang.srt.plugins.hook_registry": ("HookRegistry.register", "HookType.AROUND"),
    "sglang.srt.server_args": ("add_disagg_transfer_backend_choices",),
    "sglang.srt.disaggregation.utils": (
        "TransferBackend", "KVClassType.MANAGER", "KVClassType.SENDER", "KVClassType.RECEIVER",
        "KVClassType.BOOTSTRAP_SERVER", "DisaggregationMode.PREFILL", "get_kv_class",
    ),
    "sglang.srt.disaggregation.base.conn": (
        "BaseKVManager", "BaseKVSender.pop_decode_prefix_len", "BaseKVSender.should_send_kv_chunk", "BaseKVReceiver",
        "BaseKVBootstrapServer", "KVTransferMetric", "KVPoll.Bootstrapping",
    ),
    "sglang.srt.configs.model_config": ("ModelConfig.from_server_args", "ModelConfig.get_total_num_kv_heads"),
    "sglang.srt.runtime_context": ("get_parallel", "get_disagg"),
}  # fmt: skip
"""Attributes, and attributes of those, by module."""


def check(names: Mapping[str, Sequence[str]] = NAMES) -> None:
    """Raise an :class:`UnsupportedError` that lists the names that this SGLang does not have."""
    missing = [f"{module}.{name}" for module, several in names.items() for name in several if not _found(module, name)]
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
            return False
        found = getattr(found, part)
    return True
