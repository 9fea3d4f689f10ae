"""The negative controls: connectors that swap two heads of all that has arrived."""

from __future__ import annotations

from typing import Any

from disagg_kv.engines.vllm.connector import DisaggKVConnector


class SwappedHeads(DisaggKVConnector):
    """Everything arrives, and is wrong."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the tensors."""
        self._tensors = kv_caches
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Swap heads 0 and 1 once rows have arrived."""
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            for tensor in self._swapped():
                tensor[:, [0, 1]] = tensor[:, [1, 0]]
        return results

    def _swapped(self) -> list[Any]:
        return list(self._tensors.values())


class SwappedStates(SwappedHeads):
    """The same, of recurrent states alone."""

    def _swapped(self) -> list[Any]:
        layers = self._vllm_config.compilation_config.static_forward_context
        return [layers[name].kv_cache[1] for name in self._tensors if name.endswith("mixer")]
