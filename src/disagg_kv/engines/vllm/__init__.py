"""A KV connector for vLLM: prefill and decode instances of different TP sizes serve through this library.

vLLM loads it by name, for example::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "DisaggKVConnector",
        "kv_connector_module_path": "disagg_kv.engines.vllm", "kv_role": "kv_producer"}'

The parts, none of which imports vLLM but the first:

* ``connector``: vLLM's hooks. Each calls one method of the two sides below, and catches what it raises.
* ``scheduler``: the side in vLLM's scheduler. It has no tensors, sockets or threads. It decides what each rank does.
* ``work``: what the ranks do in a step.
* ``worker``: the side in each rank's process. It has the endpoints.
* ``cache``: vLLM's KV tensors as a pool.
* ``states``: the states of Mamba layers and gated delta nets in it.
* ``element_order``: where vLLM's CPU attention stores each element.
* ``request``: what is read of vLLM's requests.
* ``turns``: rows that go back from decode to prefill.
* ``params``: what travels in ``kv_transfer_params``.
* ``stats``: counts and measurements for vLLM's log and metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import DisaggKVConnector

__all__ = ["DisaggKVConnector"]


def __getattr__(name: str) -> Any:
    """``DisaggKVConnector``, which needs vLLM; the parts do not."""
    if name == "DisaggKVConnector":
        from .connector import DisaggKVConnector

        return DisaggKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
