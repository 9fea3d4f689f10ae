"""A connector that notes when a prompt was computed, and when its first row was in decode's cache."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from disagg_kv.engines.vllm.connector import DisaggKVConnector
from disagg_kv.engines.vllm.work import StepWork


def note(what: str) -> None:
    """A line in the file that the environment names; the clock is the host's."""
    with open(os.environ["WATCHED"], "a") as file:
        file.write(json.dumps([what, time.monotonic()]) + "\n")


class Watched(DisaggKVConnector):
    """Transfers as ever."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the tensors."""
        self._tensors = kv_caches
        self._awaited: dict[str, int] = {}
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: StepWork) -> None:
        """Keep the first block of each load."""
        super().bind_connector_metadata(connector_metadata)
        self._awaited |= {name: load.pages[0][1][0] for name, load in connector_metadata.loads.items()}

    def wait_for_save(self) -> None:
        """The step is computed."""
        super().wait_for_save()
        for chunk in self._work.chunks.values():
            if chunk.last:
                note("computed")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Look whether anything is there."""
        for name, block in list(self._awaited.items()):
            if any(tensor[block].any() for tensor in self._tensors.values()):
                del self._awaited[name]
                note("landed")
        return super().get_transfer_results(finished_req_ids)
