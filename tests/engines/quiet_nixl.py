"""vLLM's ``NixlConnector`` without NIXL's progress thread, which never sleeps.

NIXL's Python API starts that thread with a delay of 0, so each worker takes a whole core from its start on. On a host
with two cores the engines then starve: a request takes seconds. Without the thread NIXL makes progress in the calls
with which the connector polls in each step of the engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nixl._api import nixl_thread_sync_t
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector


class QuietNixlConnector(NixlConnector):  # type: ignore[misc]
    """The progress thread is left out; the connector's thread for handshakes needs the agent's lock then."""

    def __init__(self, *given: Any, **named: Any) -> None:
        locked = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        base_worker.nixl_agent_config = partial(
            base_worker.nixl_agent_config, enable_prog_thread=False, sync_mode=locked
        )
        super().__init__(*given, **named)
